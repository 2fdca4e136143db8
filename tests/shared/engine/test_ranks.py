"""However many ranks share a prompt and its KV, the tokens and the rows are those of one."""

import asyncio
import multiprocessing
import os
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from shared.engine import ranks
from shared.engine.ranks import RankLost
from shared.engine.step import Chunk, PrefillStep, Sampling
from shared.errors import ConfigError
from tests import demo
from tests.prompts_on_ranks import chunk_ends, running, settings, token_rows

LENGTH = 450
SHARED = 256  # tokens of the prefix hit: whole effective blocks for up to four ranks


@pytest.fixture(autouse=True)
def use_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")


def prompt(variant: int) -> list[int]:
    """Real text; both variants begin with the same SHARED tokens."""
    text = demo.text_tokens()
    return [*text[:SHARED], *text[SHARED + 500 * variant : LENGTH + 500 * variant]]


@cache
def expected(variant: int) -> tuple[int, torch.Tensor, torch.Tensor]:
    """First token, rows and index keys of one engine in one process, whole prompt in one step."""
    one = demo.reference(LENGTH)
    token_id = one.prefill(prompt(variant), LENGTH, Sampling()).token_id
    rows, keys = (token_rows(pages, LENGTH) for pages in (one.pool.rows, one.pool.index_pages))
    return token_id, rows, keys


@pytest.mark.parametrize(
    ("num_ranks", "interleave"),
    [
        pytest.param(1, 64, id="alone"),
        pytest.param(2, 64, id="two-by-page"),
        pytest.param(2, 1, id="two-by-token"),
        pytest.param(4, 64, id="four-by-page"),
        pytest.param(4, 1, id="four-by-token"),
    ],
)
async def test_ranks_compute_what_one_engine_computes(num_ranks: int, interleave: int) -> None:
    """Same token, and the same rows in every layer, the MTP layer's and the index keys too.

    Chunk budgets of one block and of the whole prompt, and a prompt that begins with another's
    blocks. Sums of fp32 products in another order differ by 1e-5 of values of up to 20.
    """
    async with running(num_ranks, interleave) as prompts:
        whole, by_block = prompts.blocks(LENGTH), prompts.blocks(LENGTH)
        num_shared = SHARED // prompts.block_tokens
        behind = [*whole[:num_shared], *prompts.blocks(LENGTH - SHARED)]
        runs = [(0, whole, 512, 0), (0, by_block, 64, 0), (1, behind, 512, SHARED)]
        for variant, blocks, chunk_tokens, num_cached in runs:
            token_id, rows, keys = expected(variant)

            ends = chunk_ends(num_cached, LENGTH, chunk_tokens)
            drawn = await prompts.compute(prompt(variant), blocks, ends, num_cached)
            found_rows, found_keys = await prompts.read_back(blocks, LENGTH)

            assert drawn.token_id == token_id
            assert torch.equal(found_rows, rows)
            assert torch.equal(found_keys, keys)


async def test_a_killed_rank_is_noticed_while_idle_and_in_a_step() -> None:
    """What it held is lost, so the worker has to know at once."""
    async with ranks.start(settings(2)) as engine:
        watching = asyncio.create_task(engine.watch())
        victim = max(multiprocessing.active_children(), key=lambda child: child.name)
        victim.kill()

        with pytest.raises(RankLost, match="rank 1 is gone"):
            await asyncio.wait_for(watching, 10)
        chunk = Chunk("r", np.arange(64, dtype=np.uint32), 0, 0, (0,), Sampling())
        with pytest.raises(RankLost):
            await asyncio.wait_for(engine.run(PrefillStep((chunk,), ((0, 1),))), 30)

    assert not multiprocessing.active_children()


async def test_a_wrong_checkpoint_is_a_wrong_setting(tmp_path: Path) -> None:
    """Said once, by name, with no process left behind."""
    with pytest.raises(ConfigError, match=str(tmp_path)):
        async with ranks.start(settings(2, checkpoint=tmp_path)):
            raise AssertionError("started without a checkpoint")

    assert not multiprocessing.active_children()


async def test_a_gpu_that_is_not_there_is_a_wrong_setting() -> None:
    """Named as the rank would have it: the second one's device follows the first one's."""
    with pytest.raises(ConfigError, match="cuda:9"):
        async with ranks.start(settings(2, device="cuda:98")):
            raise AssertionError("started without a GPU")

    assert not multiprocessing.active_children()


_COORDINATOR = """
import asyncio, multiprocessing, sys
from pathlib import Path
from shared.engine import ranks
from shared.engine.rank_messages import RankSettings

async def main():
    settings = RankSettings("p", 1, Path(sys.argv[1]), "fp32", 1, 64, 4, 1)
    async with ranks.start(settings):
        print(*(child.pid for child in multiprocessing.active_children()), flush=True)
        await asyncio.sleep(60)

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_ranks_die_with_their_coordinator(tmp_path: Path) -> None:
    """Even if it is killed: a rank left behind would keep its memory and its core."""
    script = tmp_path / "coordinator.py"
    script.write_text(_COORDINATOR)
    with subprocess.Popen(
        [sys.executable, str(script), str(demo.CHECKPOINT)],
        env={**os.environ, "PYTHONPATH": str(demo.CHECKPOINT.parents[1])},
        stdout=subprocess.PIPE,
        text=True,
    ) as coordinator:
        assert coordinator.stdout is not None
        rank_pid = int(coordinator.stdout.readline())
        coordinator.kill()

    until = time.monotonic() + 10
    while not _is_gone(rank_pid):
        assert time.monotonic() < until, "the rank outlives its coordinator"
        time.sleep(0.01)


def _is_gone(pid: int) -> bool:
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
