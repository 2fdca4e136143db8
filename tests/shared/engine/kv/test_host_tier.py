"""Placement never changes what is read: hybrid HiSparse against the true rows."""

from collections.abc import Iterable

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shared.block_hash import block_hashes, namespace
from shared.engine.kv.allocator import Allocation, BlockAllocator
from shared.engine.kv.fetch_plan import IndexGroup
from shared.engine.kv.host_tier import HostTier, StepRange, TieredSequence
from shared.engine.kv.residency import ResidencyMode, make_policy
from shared.engine.kv.tier_pools import TierPools, TierShape

GROUPS = (IndexGroup(0), IndexGroup(1, (2,)), IndexGroup(3))
NUM_LAYERS = 4
ROW_BYTES = 8


def make_tier(
    mode: ResidencyMode = ResidencyMode.MIXED,
    *,
    num_host_pages: int = 32,
    num_device_pages: int = 12,
    hot_rows: int = 64,
    moves_bytes: bool = True,
) -> HostTier:
    shape = TierShape(
        num_mla_layers=NUM_LAYERS,
        num_index_layers=len(GROUPS),
        row_bytes=ROW_BYTES,
        index_page_bytes=64,
        num_host_pages=num_host_pages,
        num_device_pages=num_device_pages,
    )
    policy = make_policy(mode, hot_rows=hot_rows, union_rows=1, num_device_pages=num_device_pages)
    return HostTier(TierPools(shape), GROUPS, policy, moves_bytes=moves_bytes)


def import_rows(tier: HostTier, sequence: TieredSequence, num_tokens: int) -> torch.Tensor:
    """Rows of a handoff, written to the host pages as a transfer writes them."""
    rows = torch.randint(0, 256, (NUM_LAYERS, num_tokens, ROW_BYTES), dtype=torch.uint8)
    positions = np.arange(num_tokens)
    host_rows = sequence.blocks[positions // 64] * 64 + positions % 64
    tier.pools.host_rows[:, torch.from_numpy(host_rows)] = rows
    return rows


def read(
    tier: HostTier, sequence: TieredSequence, group_idx: int, positions: Iterable[int]
) -> torch.Tensor:  # [layers of the group, n, row_bytes]
    """What the group's layers see at these positions."""
    resolved = tier.resolve(sequence, group_idx, torch.tensor([list(positions)]))
    layers = GROUPS[group_idx].layers
    for layer in layers:
        resolved.plan.fetch(layer)
    return torch.stack([tier.pools.device_rows[layer][resolved.row_ids[0]] for layer in layers])


def opened(
    tier: HostTier, num_blocks: int, first_block: int = 0
) -> tuple[TieredSequence, torch.Tensor]:
    """A sequence with all rows imported but the last, and prepared for its next step."""
    sequence = tier.open(range(first_block, first_block + num_blocks))
    num_tokens = num_blocks * 64 - 1
    rows = import_rows(tier, sequence, num_tokens)
    tier.prepare([StepRange(sequence, num_tokens, num_tokens + 1)])
    return sequence, rows


def test_nothing_is_fetched_row_by_row_while_there_is_room() -> None:
    """A mixed tier without pressure reads everything in place."""
    tier = make_tier()
    sequence, rows = opened(tier, 8)

    assert torch.equal(read(tier, sequence, 1, range(0, 500, 9)), rows[1:3, 0:500:9])
    assert (tier.counters[1].hits, tier.counters[1].misses) == (0, 0)
    assert tier.counters[1].resident == 56


def test_all_host_reads_all_but_the_tail_through_hot_rows() -> None:
    """The first read misses, the second hits, the tail is resident."""
    tier = make_tier(ResidencyMode.ALL_HOST)
    sequence, rows = opened(tier, 8)
    selected = [0, 100, 200, 400, 500]

    for _ in range(2):
        assert torch.equal(read(tier, sequence, 1, selected), rows[1:3, selected])

    counters = tier.counters[1]
    assert (counters.misses, counters.hits, counters.resident) == (3, 3, 4)
    assert counters.host_bytes == 3 * 2 * ROW_BYTES


def test_pressure_unpins_the_longest_unused_sequence_from_its_tail() -> None:
    """Its head, which others may share, and its last two pages stay."""
    tier = make_tier(num_device_pages=12)
    old, old_rows = opened(tier, 8)
    recent, _ = opened(tier, 4, first_block=8)
    tier.prepare([StepRange(recent, 255, 256)])
    tier.prepare([StepRange(old, 511, 512)])

    for position, is_resident in [(0, True), (5 * 64, False), (6 * 64, True)]:
        before = tier.counters[0].misses
        assert torch.equal(read(tier, old, 0, [position]), old_rows[:1, [position]])
        assert (tier.counters[0].misses == before) == is_resident
    tier.check_integrity()


def test_every_query_of_a_step_reads_the_union() -> None:
    """Rows that two verification tokens select are fetched once, and none evicts another."""
    tier = make_tier(ResidencyMode.ALL_HOST)
    sequence, rows = opened(tier, 8)
    positions = torch.stack([torch.arange(0, 40), torch.arange(24, 64)])

    resolved = tier.resolve(sequence, 0, positions)
    resolved.plan.fetch(0)

    assert torch.equal(tier.pools.device_rows[0][resolved.row_ids], rows[0][positions])
    assert tier.counters[0].misses == 64


def test_missing_entries_stay_missing() -> None:
    """-1 means no position, resident or not."""
    for mode in ResidencyMode:
        tier = make_tier(mode)
        sequence, _ = opened(tier, 8)

        resolved = tier.resolve(sequence, 0, torch.tensor([[0, -1, 505], [-1, -1, -1]]))

        assert (resolved.row_ids == -1).tolist() == [[False, True, False], [True, True, True]]


def test_a_written_row_is_read_back_at_once_and_after_its_page_was_unpinned() -> None:
    """Host and device are written together, so unpinning loses nothing."""
    tier = make_tier(ResidencyMode.ALL_HOST, num_host_pages=8)
    sequence = tier.open(range(8))
    written = torch.randint(0, 256, (NUM_LAYERS, 512, ROW_BYTES), dtype=torch.uint8)

    for position in range(512):
        tier.prepare([StepRange(sequence, position, position + 1)])
        slots = tier.write_slots(sequence, position, position + 1)
        for layer in range(NUM_LAYERS):
            tier.pools.write(layer, slots, written[layer, position : position + 1])
        assert torch.equal(read(tier, sequence, 1, [position]), written[1:3, [position]])

    assert torch.equal(read(tier, sequence, 1, range(0, 512, 8)), written[1:3, 0:512:8])


def test_a_sequence_may_grow_past_the_device_in_one_step() -> None:
    """Rows that find no page are written to the host alone, and read from there."""
    tier = make_tier(num_device_pages=6)
    sequence = tier.open(range(16))
    written = torch.randint(0, 256, (NUM_LAYERS, 1024, ROW_BYTES), dtype=torch.uint8)

    for first, end in [(0, 64), (64, 1024)]:
        tier.prepare([StepRange(sequence, first, end)])
        slots = tier.write_slots(sequence, first, end)
        for layer in range(NUM_LAYERS):
            tier.pools.write(layer, slots, written[layer, first:end])

    assert torch.equal(read(tier, sequence, 1, range(0, 1024, 16)), written[1:3, 0:1024:16])


def test_a_rewritten_host_row_is_not_read_from_its_hot_copy() -> None:
    """A row that went hot and is rewritten on the host alone must be fetched anew."""
    tier = make_tier(ResidencyMode.ALL_HOST)
    sequence, _ = opened(tier, 8)
    read(tier, sequence, 0, [70])

    new = torch.full((1, ROW_BYTES), 9, dtype=torch.uint8)
    tier.pools.write(0, tier.write_slots(sequence, 70, 71), new)

    assert torch.equal(read(tier, sequence, 0, [70])[0], new)


def test_a_recycled_block_shows_its_new_rows() -> None:
    """A page left resident by a sequence that ended must not serve the next owner."""
    tier = make_tier()
    first, _ = opened(tier, 4)
    tier.close(first)

    second, rows = opened(tier, 4)

    assert torch.equal(read(tier, second, 0, range(0, 255, 5)), rows[:1, 0:255:5])


def test_a_block_in_use_cannot_be_handed_out() -> None:
    """That would be wrong KV; it is our bug and must stop the step."""
    tier = make_tier()
    opened(tier, 4)

    with pytest.raises(RuntimeError, match="handed out anew"):
        tier.open([3, 4])


def test_a_shared_block_cannot_be_rewritten() -> None:
    """The other sequence's rows would change."""
    tier = make_tier()
    sequence, _ = opened(tier, 4)
    tier.open([0, 1, 10], num_shared_blocks=2)

    with pytest.raises(RuntimeError, match="several sequences"):
        tier.write_slots(sequence, 64, 65)


def test_a_layer_that_did_not_fetch_stops_the_request() -> None:
    """Its hot rows would silently hold another position's KV."""
    tier = make_tier(ResidencyMode.ALL_HOST)
    sequence, _ = opened(tier, 8)

    resolved = tier.resolve(sequence, 1, torch.tensor([[0]]))
    resolved.plan.fetch(1)

    with pytest.raises(RuntimeError, match="not fetched"):
        tier.confirm(sequence)
    with pytest.raises(RuntimeError, match="has not fetched"):
        tier.resolve(sequence, 1, torch.tensor([[1]]))
    resolved.plan.fetch(2)
    tier.confirm(sequence)


def test_a_plan_serves_only_its_group() -> None:
    """Another layer's plane has other rows in the same places."""
    tier = make_tier(ResidencyMode.ALL_HOST)
    sequence, _ = opened(tier, 8)

    with pytest.raises(ValueError, match="not of the group"):
        tier.resolve(sequence, 1, torch.tensor([[0]])).plan.fetch(3)


def test_walking_plans_without_moving_bytes_never_yields_tokens() -> None:
    """The switch exists to measure; what it computes is wrong, for ever after the first miss."""
    tier = make_tier(ResidencyMode.ALL_HOST, moves_bytes=False)
    sequence, _ = opened(tier, 8)
    for _ in range(2):
        read(tier, sequence, 0, [0])

        with pytest.raises(RuntimeError, match="only measures"):
            tier.confirm(sequence)


def test_a_long_sequence_runs_on_the_smallest_device_it_is_admitted_to() -> None:
    """Hot pages and two tail pages are enough at any length."""
    tier = make_tier(num_device_pages=3)
    sequence, rows = opened(tier, 32)

    assert torch.equal(read(tier, sequence, 0, range(0, 2000, 32)), rows[:1, 0:2000:32])
    tier.close(sequence)
    tier.check_integrity()


class Model:
    """One sequence as the test knows it."""

    def __init__(self, tiered: TieredSequence, allocation: Allocation, truth: torch.Tensor) -> None:
        self.tiered = tiered
        self.allocation = allocation
        self.truth = truth  # [layers, reserved tokens, row_bytes]
        self.num_tokens = 0
        self.cost = 0


class TierMachine(RuleBasedStateMachine):
    """Random imports with shared prefixes, steps with drafts and rejections, ends; in all modes."""

    @initialize(
        mode=st.sampled_from(ResidencyMode),
        hot_pages=st.integers(1, 2),
        num_device_pages=st.integers(6, 20),
        seed=st.integers(0, 1000),
    )
    def start(self, mode: ResidencyMode, hot_pages: int, num_device_pages: int, seed: int) -> None:
        self.hot_rows = 64 * hot_pages
        self.tier = make_tier(mode, num_device_pages=num_device_pages, hot_rows=self.hot_rows)
        self.policy = make_policy(
            mode, hot_rows=self.hot_rows, union_rows=1, num_device_pages=num_device_pages
        )
        self.allocator = BlockAllocator(32)
        self.free_pages = num_device_pages
        self.live: list[Model] = []
        self.random = np.random.default_rng(seed)

    def rows(self, num_rows: int, seed: bytes | None = None) -> torch.Tensor:
        random = self.random if seed is None else np.random.default_rng(list(seed))
        values = random.integers(0, 256, (NUM_LAYERS, num_rows, ROW_BYTES), dtype=np.uint8)
        return torch.from_numpy(values)

    @rule(
        letters=st.text("ab", min_size=1, max_size=9),
        extra=st.integers(1, 64),
        new=st.integers(1, 200),
    )
    def admit(self, letters: str, extra: int, new: int) -> None:
        num_prompt = len(letters) * 64 + extra
        cost = self.policy.device_pages(num_prompt + new)
        hashes = block_hashes(namespace("m", "r"), [ord(c) for c in letters for _ in range(64)])
        if cost > self.free_pages:
            return
        allocation = self.allocator.allocate(num_prompt, hashes, reserve_tokens=new)
        if allocation is None:
            return
        self.free_pages -= cost
        tiered = self.tier.open(allocation.block_ids, allocation.num_shared_blocks)
        # Prompt rows are a function of the chain, as real KV is.
        parts = [self.rows(64, block_hash) for block_hash in hashes]
        truth = torch.cat([*parts, self.rows(extra + new)], 1)
        positions = np.arange(allocation.hit_tokens, num_prompt)
        host_rows = torch.from_numpy(tiered.blocks[positions // 64] * 64 + positions % 64)
        self.tier.pools.host_rows[:, host_rows] = truth[:, positions]
        self.allocator.publish(allocation, num_prompt)
        model = Model(tiered, allocation, truth)
        model.num_tokens, model.cost = num_prompt, cost
        self.live.append(model)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), num_drafts=st.integers(0, 3))
    def step(self, data: st.DataObject, num_drafts: int) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.live), min_size=1, unique=True))
        batch = []
        for model in chosen:
            end = min(model.num_tokens + 1 + num_drafts, model.truth.shape[1])
            if model.num_tokens < end:
                batch.append((model, model.num_tokens, end))
        self.tier.prepare([StepRange(m.tiered, first, end) for m, first, end in batch])
        slots = [self.tier.write_slots(m.tiered, first, end) for m, first, end in batch]
        for model, first, end in batch:
            model.truth[:, first:end] = self.rows(end - first)
        for group_idx, group in enumerate(GROUPS):
            plans = []
            for layer in group.layers:
                for (model, first, end), slot in zip(batch, slots, strict=True):
                    self.tier.pools.write(layer, slot, model.truth[layer, first:end])
                if layer == group.owner:
                    plans = [self.select(m, group_idx, first, end) for m, first, end in batch]
                for (model, _, _), (positions, resolved) in zip(batch, plans, strict=True):
                    resolved.plan.fetch(layer)
                    self.rows_are_true(model, layer, positions, resolved.row_ids)
        for model, first, end in batch:
            self.tier.confirm(model.tiered)
            model.num_tokens = first + int(self.random.integers(1, end - first + 1))

    def select(self, model: Model, group_idx: int, first: int, end: int):  # type: ignore[no-untyped-def]
        width = self.hot_rows // (end - first)
        positions = self.random.integers(0, first + 1, (end - first, width))
        positions[:, 0] = np.arange(first, end)  # the newest token is always a candidate
        positions[self.random.random(positions.shape) < 0.1] = -1
        selected = torch.from_numpy(positions)
        return selected, self.tier.resolve(model.tiered, group_idx, selected)

    def rows_are_true(
        self, model: Model, layer: int, positions: torch.Tensor, row_ids: torch.Tensor
    ) -> None:
        assert torch.equal(positions == -1, row_ids == -1)
        is_real = positions >= 0
        read = self.tier.pools.device_rows[layer][row_ids[is_real]]
        assert torch.equal(read, model.truth[layer][positions[is_real]])

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        model = data.draw(st.sampled_from(self.live))
        self.live.remove(model)
        self.tier.close(model.tiered)
        self.allocator.free(model.allocation)
        self.free_pages += model.cost

    @invariant()
    def pools_are_whole(self) -> None:
        self.tier.check_integrity()
        self.allocator.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "tier"):
            return
        for model in self.live:
            self.tier.close(model.tiered)
            self.allocator.free(model.allocation)
        self.pools_are_whole()
        assert self.allocator.num_free == self.allocator.num_blocks
        # Handing out every block anew drops every page: the device is empty, so nothing is leased.
        self.tier.close(self.tier.open(range(self.allocator.num_blocks)))
        assert self.tier.num_free_device_pages == self.tier.pools.shape.num_device_pages


TierMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=25, deadline=None)
TestTierMachine = TierMachine.TestCase
