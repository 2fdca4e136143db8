"""Whatever sequences come, share, grow and go: what a step reads is what was written."""

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.engine.gpu import tier as gpu_tier
from shared.engine.gpu.tier import GpuSequence, GpuTier
from shared.engine.gpu.transfers import sent
from shared.engine.kernels.forget_rows import forget_rows
from shared.engine.kernels.host_gather import host_gather
from shared.engine.kernels.hot_tables import BatchBlocks, Resolution
from shared.engine.kernels.resolve_rows import resolve_rows
from shared.engine.kv.fetch_plan import IndexGroup
from shared.engine.kv.layout import BLOCK_TOKENS
from shared.engine.kv.page_residency import StepRange
from shared.engine.kv.pinned_pool import pinned_pool
from shared.engine.kv.residency import ResidencyMode, make_policy
from shared.engine.kv.tier_pools import TierPools, TierShape
from shared.errors import WorkerLost

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda:0" if HAS_GPU else "cpu")
GROUPS = (IndexGroup(0), IndexGroup(1, (2,)))
SHAPE = TierShape(
    num_mla_layers=3,
    num_index_layers=2,
    row_bytes=656,
    index_page_bytes=8448,
    num_host_pages=40,
    num_device_pages=22,
)
MAX_SEQUENCES, WIDTH = 4, 48
NUM_STEPS = 60 if HAS_GPU else 12


@dataclass
class Live:
    sequence: GpuSequence
    blocks: list[int]
    num_shared: int
    num_tokens: int = 0  # rows written so far


@dataclass
class World:
    """A tier, and every host row as it was last written."""

    tier: GpuTier
    chance: random.Random
    live: list[Live] = field(default_factory=list)
    free: list[int] = field(default_factory=lambda: list(range(SHAPE.num_host_pages)))
    truth: torch.Tensor = field(
        default_factory=lambda: torch.zeros(
            (SHAPE.num_mla_layers, SHAPE.num_host_pages * BLOCK_TOKENS, SHAPE.row_bytes),
            dtype=torch.uint8,
        )
    )

    def open(self) -> None:
        """A prompt whose rows are handed over, behind pages of another sequence or not."""
        donor = self.chance.choice(self.live) if self.live and self.chance.random() < 0.5 else None
        shared = donor.blocks[: self.chance.randint(0, donor.num_tokens // 64)] if donor else []
        num_new = self.chance.randint(1, 8)
        if len(self.live) == MAX_SEQUENCES or num_new > len(self.free):
            return
        blocks = [*shared, *(self.free.pop() for _ in range(num_new))]
        live = Live(self.tier.open(blocks, len(shared)), blocks, len(shared))
        prompt = len(shared) * 64 + self.chance.randint(1, num_new * 64 - 1)
        for position in range(len(shared) * 64, prompt):
            self.write_host(blocks[position // 64] * 64 + position % 64)
        live.num_tokens = prompt
        self.live.append(live)

    def close(self) -> None:
        live = self.live.pop(self.chance.randrange(len(self.live)))
        self.tier.close(live.sequence)
        held = {block for other in self.live for block in other.blocks}
        self.free += [block for block in live.blocks if block not in held]
        self.chance.shuffle(self.free)

    def write_host(self, row: int) -> None:
        numbers = np.frombuffer(self.chance.randbytes(3 * 656), np.uint8).reshape(3, 656)
        self.truth[:, row] = self.tier.pools.host_rows[:, row] = torch.from_numpy(numbers.copy())

    def step(self) -> None:
        batch = [live for live in self.live if live.num_tokens < len(live.blocks) * 64]
        batch = self.chance.sample(batch, self.chance.randint(0, len(batch)))
        if not batch:
            return
        self.tier.prepare(
            [StepRange(live.sequence, live.num_tokens, live.num_tokens + 1) for live in batch]
        )
        self.write(batch)
        for group in range(len(GROUPS)):
            self.read(batch, group)
        for live in batch:
            live.num_tokens += self.chance.random() < 0.8  # else the step is repeated

    def write(self, batch: list[Live]) -> None:
        positions = np.array([live.num_tokens for live in batch])
        hosts, devices = self.tier.write_rows([live.sequence for live in batch], positions)
        rows = sent(hosts.astype(np.int32)[:, None], DEVICE)
        forget_rows(rows, self.leases(batch), self.tier.tables.hot)
        for host, device in zip(hosts.tolist(), devices.tolist(), strict=True):
            self.write_host(host)
            if device >= 0:
                self.tier.pools.device_rows[:, device] = self.truth[:, host].to(DEVICE)

    def read(self, batch: list[Live], group: int) -> None:
        tables, pools = self.tier.tables, self.tier.pools
        positions = np.array([self.wanted(live) for live in batch], np.int32)[:, None]
        found = Resolution.allocate(len(batch), 1, WIDTH, DEVICE)
        slots = sent(np.array([live.sequence.slot for live in batch]), DEVICE)
        blocks = BatchBlocks(tables.blocks[slots], self.leases(batch), tables.first_rows)
        resolve_rows(sent(positions, DEVICE), blocks, tables.hot, group, tables.scratch, found)
        assert not found.counts[:, 2].any(), "rows were nowhere"
        for layer in GROUPS[group].layers:
            host_gather(pools.host_rows[layer], pools.device_rows[layer], found.plan, 2)
            rows = found.row_ids[:, 0].long()
            read = pools.device_rows[layer][rows.clamp_min(0)].cpu()
            for number, live in enumerate(batch):
                for place, position in enumerate(positions[number, 0].tolist()):
                    assert (position < 0) == (int(rows[number, place]) < 0)
                    if position >= 0:
                        host = live.blocks[position // 64] * 64 + position % 64
                        assert torch.equal(read[number, place], self.truth[layer, host])

    def wanted(self, live: Live) -> list[int]:
        """Mostly the same few positions, so that hot rows hit; the newest among them."""
        recent = [live.num_tokens, *range(0, live.num_tokens, 37)]
        count = self.chance.randint(1, WIDTH)
        chosen = [
            self.chance.choice(recent)
            if self.chance.random() < 0.5
            else self.chance.randint(0, live.num_tokens)
            for _ in range(count)
        ]
        return sorted(set(chosen)) + [-1] * (WIDTH - len(set(chosen)))

    def leases(self, batch: list[Live]) -> torch.Tensor:
        sequences = [live.sequence for live in batch]
        return sent(np.array([s.slot if s.has_tables else -1 for s in sequences], np.int32), DEVICE)


@pytest.mark.parametrize("residency", list(ResidencyMode))
@given(seed=st.integers(0, 2**32))
@settings(max_examples=10 if HAS_GPU else 2, deadline=None)
def test_a_step_reads_what_was_written(residency: ResidencyMode, seed: int) -> None:
    """Blocks and slots change hands, prefixes are shared, steps repeated, pages unpinned."""
    chance = random.Random(seed)
    policy = make_policy(residency, hot_rows=64, union_rows=WIDTH, num_device_pages=22)
    num_device_pages = 40 if residency is ResidencyMode.ALL_RESIDENT else 22
    shape = TierShape(**{**SHAPE.__dict__, "num_device_pages": num_device_pages})
    with pinned_pool(shape.host_bytes) as memory:
        tier = GpuTier(TierPools(shape, DEVICE, memory), GROUPS, policy, MAX_SEQUENCES)
        world = World(tier, chance)
        for _ in range(NUM_STEPS):
            world.open()
            world.step()
            if world.live and chance.random() < 0.2:
                world.close()
            tier.check_integrity()
        while world.live:
            world.close()
        tier.check_integrity()


def test_a_step_that_could_not_tell_the_device_is_told_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A repeated step must not believe that its page table was sent."""
    policy = make_policy(ResidencyMode.MIXED, hot_rows=64, union_rows=64, num_device_pages=22)

    def refuse(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("full")

    with pinned_pool(SHAPE.host_bytes) as memory:
        tier = GpuTier(TierPools(SHAPE, DEVICE, memory), GROUPS, policy, MAX_SEQUENCES)
        sequence = tier.open([3, 1])
        with monkeypatch.context() as patch:
            patch.setattr(gpu_tier, "sent", refuse)
            with pytest.raises(torch.OutOfMemoryError):
                tier.prepare([StepRange(sequence, 5, 6)])
        tier.prepare([StepRange(sequence, 5, 6)])

        assert int(tier.tables.first_rows[3]) >= 0


def test_a_sequence_that_could_not_be_opened_has_taken_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = make_policy(ResidencyMode.MIXED, hot_rows=64, union_rows=64, num_device_pages=22)
    tier = GpuTier(TierPools(SHAPE, DEVICE), GROUPS, policy, MAX_SEQUENCES)

    def refuse(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("full")

    with monkeypatch.context() as patch:
        patch.setattr(gpu_tier, "sent", refuse)
        with pytest.raises(torch.OutOfMemoryError):
            tier.open([0, 1])

    tier.check_integrity()
    for first in range(0, 2 * MAX_SEQUENCES, 2):
        tier.open([first, first + 1])
    tier.check_integrity()


def test_rows_that_were_nowhere_end_the_worker() -> None:
    """The device counts what it could not find; the tokens of such a step are never told."""
    policy = make_policy(ResidencyMode.MIXED, hot_rows=64, union_rows=64, num_device_pages=22)
    tier = GpuTier(TierPools(SHAPE, DEVICE), GROUPS, policy, MAX_SEQUENCES)

    tier.count(np.array([[5, 0, 0, 0], [1, 2, 0, 3]]))
    with pytest.raises(WorkerLost, match="outside the device"):
        tier.count(np.array([[5, 0, 1, 0], [1, 2, 0, 3]]))

    counters = tier.counters[1]
    assert (counters.resident, counters.hits, counters.misses) == (1, 2, 3)
    assert counters.host_bytes == 3 * 2 * 656
