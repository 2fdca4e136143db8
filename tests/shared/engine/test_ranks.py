"""However many ranks share a prompt and its KV, the tokens and the rows are those of one."""

import asyncio
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from shared import farspan_pb2 as pb
from shared.engine import ranks
from shared.engine.rank_messages import RankSettings
from shared.engine.ranks import RankLost, Ranks
from shared.engine.step import Chunk, PrefillStep, Sampling
from shared.engine.transfer import Destination, KvImporter, PullRequest
from shared.errors import ConfigError
from tests import demo

EPOCH = 1_700_000_000_000_000_000
NUM_BLOCKS = 48
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
    return token_id, _flat(one.pool.rows), _flat(one.pool.index_pages)


def _flat(pages: torch.Tensor) -> torch.Tensor:
    """[layers, LENGTH, values] fp32 of block-major pages, or of [blocks, layers, page bytes]."""
    rows = pages.unflatten(-1, (64, -1)) if pages.dim() == 3 else pages
    return rows.transpose(0, 1).flatten(1, 2)[:, :LENGTH].contiguous().view(torch.float32)


def settings(
    num_ranks: int, interleave: int = 64, checkpoint: Path = demo.CHECKPOINT
) -> RankSettings:
    return RankSettings("p", EPOCH, checkpoint, "fp32", num_ranks, interleave, NUM_BLOCKS, 1)


class Prompts:
    """Runs prompts on ranks, handing out blocks one after another."""

    def __init__(self, engine: Ranks, num_ranks: int) -> None:
        self.engine = engine
        self.block_tokens = 64 * num_ranks
        self._interleave = engine.layout.interleave
        self._next_block = 1
        self._importer = KvImporter("test", engine.layout, staging_bytes=1 << 25, num_lanes=1)

    def blocks(self, num_tokens: int) -> list[int]:
        count = -(-num_tokens // self.block_tokens)
        self._next_block += count
        assert self._next_block <= NUM_BLOCKS
        return [*range(self._next_block - count, self._next_block)][::-1]

    async def compute(
        self, ids: list[int], blocks: list[int], chunk_tokens: int, num_cached: int = 0
    ) -> int:
        """The first token; KV is in the ranks' pools then."""
        fresh = tuple((block, 3) for block in blocks)
        for begin in range(num_cached, len(ids), chunk_tokens):
            end = min(begin + chunk_tokens, len(ids))
            early = 1 if begin else 0
            chunk = Chunk(
                request_id="r",
                token_ids=np.array(ids[begin - early : end], np.uint32),
                first=begin - early,
                num_recomputed=early,
                block_ids=tuple(blocks[: -(-end // self.block_tokens)]),
                sampling=Sampling() if end == len(ids) else None,
            )
            result = await self.engine.run(PrefillStep((chunk,), fresh))
        return result.sampled["r"].token_id

    async def read_back(self, blocks: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows and index keys in token order, as decode would pull them."""
        layout, num_pages = self.engine.layout, -(-LENGTH // 64)
        destination = Destination(
            torch.empty(
                (layout.num_mla_layers, num_pages, 64, layout.row_bytes), dtype=torch.uint8
            ),
            torch.empty(
                (layout.num_index_layers, num_pages, layout.index_page_bytes), dtype=torch.uint8
            ),
            range(num_pages),
        )
        pull = PullRequest(
            ranks=self.engine.regions,
            blocks=[pb.BlockRef(block_id=block, generation=3) for block in blocks],
            epoch=EPOCH,
            interleave=self._interleave,
            first_token=0,
            last_token=LENGTH,
            deadline_s=20.0,
            destination=destination,
        )
        await asyncio.to_thread(self._importer.pull, pull)
        pages = (destination.host_rows, destination.index_pages)
        return _flat(pages[0].transpose(0, 1)), _flat(pages[1].transpose(0, 1))


@asynccontextmanager
async def running(num_ranks: int, interleave: int) -> AsyncIterator[Prompts]:
    async with ranks.start(settings(num_ranks, interleave)) as engine:
        yield Prompts(engine, num_ranks)


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

            drawn = await prompts.compute(prompt(variant), blocks, chunk_tokens, num_cached)
            found_rows, found_keys = await prompts.read_back(blocks)

            assert drawn == token_id
            torch.testing.assert_close(found_rows, rows, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(found_keys, keys, rtol=1e-5, atol=1e-5)


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
