"""Drawn at random: ranks, interleave, lengths, chunks and prefix hits never change a result.

The engine's part of test_composition.py, on ranks without services around them. Each group of ranks
is started once, and its blocks are used again by every example.
"""

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import cycle

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shared.engine.kv.layout import BLOCK_TOKENS
from shared.engine.step import BlockCopy, Sampled, Sampling
from tests import demo
from tests.prompts_on_ranks import PromptsOnRanks, running, token_rows

MAX_LENGTH, MAX_BEGIN = 600, 2500
# One group for each number of ranks and interleave; alone, a rank owns all tokens either way.
GROUPS = ((1, 64), (2, 1), (2, 64), (4, 1), (4, 64))


@dataclass(frozen=True)
class Case:
    """A prompt, of which `hit` tokens are found in an earlier prompt's blocks."""

    group: tuple[int, int]
    begin: int  # in the text
    length: int
    hit: int
    num_others: int  # tokens of the earlier prompt that follow the hit
    budgets: tuple[int, ...]  # of the chunks, over and over

    @property
    def prompt(self) -> list[int]:
        """Real text."""
        return [*demo.text_tokens()[self.begin : self.begin + self.length]]

    @property
    def others(self) -> list[int]:
        """Other text."""
        return [*demo.text_tokens()[MAX_BEGIN + MAX_LENGTH :][: self.num_others]]

    @property
    def ends(self) -> list[int]:
        """Where the chunks behind the hit end."""
        ends, budgets = [self.hit], cycle(self.budgets)
        while ends[-1] < self.length:
            ends.append(min(self.length, ends[-1] + next(budgets)))
        return ends[1:]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    length = draw(st.integers(1, MAX_LENGTH))
    budgets = st.lists(st.sampled_from((64, 128, 192, 512)), min_size=1, max_size=4)
    return Case(
        group=draw(st.sampled_from(GROUPS)),
        begin=draw(st.integers(0, MAX_BEGIN)),
        length=length,
        hit=BLOCK_TOKENS * draw(st.integers(0, (length - 1) // BLOCK_TOKENS)),
        num_others=draw(st.integers(0, 100)),
        budgets=tuple(draw(budgets)),
    )


class Groups:
    """Running groups of ranks, each started when it is first wanted."""

    def __init__(self, runner: asyncio.Runner, stack: AsyncExitStack) -> None:
        self.runner = runner
        self._stack = stack
        self._running: dict[tuple[int, int], PromptsOnRanks] = {}

    def get(self, group: tuple[int, int]) -> PromptsOnRanks:
        """A group whose blocks are all to be had."""
        if group not in self._running:
            starting = self._stack.enter_async_context(running(*group))
            self._running[group] = self.runner.run(starting)
        self._running[group].reuse_blocks()
        return self._running[group]


@pytest.fixture(scope="module")
def groups() -> Iterator[Groups]:
    stack = AsyncExitStack()
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner() as runner:
        patch.setenv("UCX_NET_DEVICES", "lo")
        try:
            yield Groups(runner, stack)
        finally:
            runner.run(stack.aclose())


@dataclass(frozen=True)
class Outcome:
    """What a prompt leaves behind."""

    sampled: Sampled
    rows: torch.Tensor
    index_keys: torch.Tensor

    @property
    def last_hidden(self) -> torch.Tensor:
        """Of the prompt's last token."""
        return torch.frombuffer(bytearray(self.sampled.last_hidden), dtype=torch.float32)


def alone(prompt: list[int]) -> Outcome:
    """One engine in one process, the whole prompt in one step."""
    one = demo.reference(len(prompt))
    sampled = one.prefill(prompt, len(prompt), Sampling())
    rows, keys = (token_rows(pages, len(prompt)) for pages in (one.pool.rows, one.pool.index_pages))
    return Outcome(sampled, rows, keys)


async def composed(prompts: PromptsOnRanks, case: Case) -> Outcome:
    """The same by the case's ranks and chunks, behind the beginning of another prompt."""
    earlier: list[int] = []
    if case.hit:
        other = [*case.prompt[: case.hit], *case.others]
        earlier = prompts.blocks(len(other))
        await prompts.compute(other, earlier, [len(other)])
    num_shared, rest = divmod(case.hit, prompts.block_tokens)
    new = prompts.blocks(case.length - num_shared * prompts.block_tokens)
    blocks = [*earlier[:num_shared], *new]
    copies = (BlockCopy(earlier[num_shared], new[0]),) if rest else ()
    sampled = await prompts.compute(case.prompt, blocks, case.ends, case.hit, copies)
    return Outcome(sampled, *await prompts.read_back(blocks, case.length))


@settings(deadline=None, max_examples=8)
@given(case=cases())
@example(case=Case((4, 1), 0, 9, 0, 0, (512,))).via(
    "empty chunks: eight ranks' worth of nine tokens"
)
@example(case=Case((4, 64), 0, 600, 320, 60, (64,))).via("a hit inside an effective block")
def test_any_composition_computes_what_one_engine_computes(groups: Groups, case: Case) -> None:
    """The token drawn, the hidden state handed over, and every layer's rows and index keys."""
    expected = alone(case.prompt)

    found = groups.runner.run(composed(groups.get(case.group), case))

    assert found.sampled.token_id == expected.sampled.token_id
    for ours, theirs in (
        (found.last_hidden, expected.last_hidden),
        (found.rows, expected.rows),
        (found.index_keys, expected.index_keys),
    ):
        assert torch.equal(ours, theirs)
