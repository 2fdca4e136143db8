"""Nothing is lost or owned twice, only true prefixes are hit, chains lose their tails first."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shared.block_hash import BLOCK_TOKENS, BlockHash, block_hashes, namespace
from shared.engine.kv.allocator import Allocation, BlockAllocator
from shared.engine.kv.cache_events import Cleared, Removed, Stored
from shared.engine.step import BlockCopy

NAMESPACE = namespace("model", "revision")


def chain(letters: str) -> list[BlockHash]:
    """The hashes of a prompt in which each letter fills one 64-token block."""
    return block_hashes(NAMESPACE, [ord(letter) for letter in letters for _ in range(BLOCK_TOKENS)])


def allocate(
    allocator: BlockAllocator, letters: str, extra_tokens: int = 1, reserve_tokens: int = 0
) -> Allocation:
    """An allocation for the letters' blocks and a few tokens of a next one."""
    allocation = allocator.allocate(
        len(letters) * BLOCK_TOKENS + extra_tokens, chain(letters), reserve_tokens=reserve_tokens
    )
    assert allocation is not None
    return allocation


def store(allocator: BlockAllocator, letters: str) -> None:
    """Compute, publish and free a prompt."""
    allocation = allocate(allocator, letters)
    allocator.publish(allocation, len(letters) * BLOCK_TOKENS)
    allocator.free(allocation)


def test_a_shared_prefix_is_stored_once() -> None:
    """Two sequences that begin with the same blocks hold them together."""
    allocator = BlockAllocator(10)
    first = allocate(allocator, "aab")
    allocator.publish(first, 3 * BLOCK_TOKENS)

    second = allocate(allocator, "aac")

    assert second.block_ids[:2] == first.block_ids[:2]
    assert second.hit_tokens == 2 * BLOCK_TOKENS
    assert second.new_block_ids == second.block_ids[2:]
    assert allocator.num_free == 10 - 6


def test_blocks_are_found_only_once_they_are_computed() -> None:
    """A block handed out but not computed holds another request's rows."""
    allocator = BlockAllocator(10)
    first = allocate(allocator, "abc")
    allocator.publish(first, 2 * BLOCK_TOKENS + 63)

    assert allocator.hit_tokens(1000, chain("abc")) == 2 * BLOCK_TOKENS


def test_the_last_prompt_token_is_never_a_hit() -> None:
    """Its output is wanted, so at least one token is computed."""
    allocator = BlockAllocator(10)
    store(allocator, "abc")

    assert allocator.hit_tokens(3 * BLOCK_TOKENS, chain("abc")) == 2 * BLOCK_TOKENS
    assert allocator.hit_tokens(3 * BLOCK_TOKENS + 1, chain("abc")) == 3 * BLOCK_TOKENS


def test_room_reserved_for_the_answer_does_not_widen_the_hit() -> None:
    """Reserved tokens are not prompt tokens."""
    allocator = BlockAllocator(10)
    store(allocator, "abc")

    allocation = allocator.allocate(3 * BLOCK_TOKENS, chain("abc"), reserve_tokens=100)

    assert allocation is not None
    assert allocation.hit_tokens == 2 * BLOCK_TOKENS
    assert len(allocation.block_ids) == 5


def test_a_full_pool_refuses_and_takes_nothing() -> None:
    """None means that the caller may try again later with the pool as it was."""
    allocator = BlockAllocator(4)
    held = allocate(allocator, "ab")

    assert allocator.allocate(2 * BLOCK_TOKENS, chain("xy")) is None

    allocator.free(held)
    assert allocator.num_free == 4
    allocator.check_integrity()


def test_a_generation_changes_each_time_a_block_is_handed_out() -> None:
    """A reader with an old reference must see that the block holds something else."""
    allocator = BlockAllocator(1)
    first = allocate(allocator, "")
    allocator.free(first)
    second = allocate(allocator, "")

    assert (first.generations, second.generations) == ([1], [2])


def test_a_hit_keeps_the_generation() -> None:
    """The content is the same, so references to it stay alive."""
    allocator = BlockAllocator(4)
    store(allocator, "a")

    assert allocate(allocator, "a").generations[0] == 1


def test_a_chain_loses_its_tail_before_its_head() -> None:
    """Then the longest prefix is found by binary search, and what is left is of use."""
    allocator = BlockAllocator(4)
    store(allocator, "abc")

    held = [allocate(allocator, "")]
    found = []
    for _ in range(3):
        held.append(allocate(allocator, ""))
        found.append(allocator.hit_tokens(1000, chain("abc")) // BLOCK_TOKENS)

    assert found == [2, 1, 0]


def test_the_least_recently_used_chain_goes_first() -> None:
    """A used chain will likely be used again."""
    allocator = BlockAllocator(5)
    store(allocator, "a")
    store(allocator, "b")
    store(allocator, "a")

    held = [allocate(allocator, "") for _ in range(4)]

    assert len(held) == 4
    assert allocator.hit_tokens(1000, chain("a")) == BLOCK_TOKENS
    assert allocator.hit_tokens(1000, chain("b")) == 0


def test_the_age_of_what_goes_first_and_the_empty_blocks_are_told() -> None:
    """A router sends new prompts where they drive out the oldest blocks, or none."""
    now_s = [100.0]
    allocator = BlockAllocator(10, clock=lambda: now_s[0])
    assert (allocator.eviction_age_s, allocator.num_empty) == (0, 10)
    store(allocator, "aa")
    now_s[0] = 130.0
    store(allocator, "bb")

    assert (allocator.eviction_age_s, allocator.num_empty) == (30, 6)
    store(allocator, "aa")
    assert allocator.eviction_age_s == 0, "all of it was used just now"


def test_only_the_loss_of_the_last_copy_is_told() -> None:
    """Two sequences computed the same block at once; one copy's end does not end the hits."""
    allocator = BlockAllocator(4)
    twins = [allocate(allocator, "a"), allocate(allocator, "a")]
    for twin in twins:
        allocator.publish(twin, BLOCK_TOKENS)
    assert allocator.drain_events() == [Stored(tuple(chain("a")))]
    for twin in twins:
        allocator.free(twin)

    held = [allocate(allocator, "") for _ in range(3)]
    assert allocator.drain_events() == []
    assert allocator.hit_tokens(1000, chain("a")) == BLOCK_TOKENS

    held.append(allocate(allocator, ""))
    assert allocator.drain_events() == [Removed(tuple(chain("a")))]


def test_events_tell_tail_before_head() -> None:
    """A listener's view is monotone along a chain at every moment too."""
    allocator = BlockAllocator(4, ranks=2)
    store(allocator, "abc")
    assert allocator.drain_events() == [Stored(tuple(chain("abc")))]

    allocator.allocate(4 * allocator.block_tokens, [])

    assert allocator.drain_events() == [Removed(tuple(reversed(chain("abc"))))]


def test_a_clear_forgets_everything_even_what_running_sequences_publish_later() -> None:
    """After new weights, what a running sequence computed before must not be found."""
    allocator = BlockAllocator(8)
    store(allocator, "a")
    running = allocate(allocator, "bc")
    allocator.drain_events()

    allocator.clear()
    allocator.publish(running, 2 * BLOCK_TOKENS)

    assert allocator.drain_events() == [Cleared()]
    assert allocator.cached_hashes() == []
    allocator.free(running)
    allocator.check_integrity()
    assert allocator.num_free == 8


def test_a_hit_inside_an_effective_block_is_copied() -> None:
    """Blocks of 64 tokens are found though one block id covers 64 tokens on each rank."""
    allocator = BlockAllocator(8, ranks=4)
    store(allocator, "abcdef")

    allocation = allocate(allocator, "abcdez")

    shared, own = allocation.block_ids
    assert allocation.hit_tokens == 5 * BLOCK_TOKENS
    assert allocation.num_shared_blocks == 1
    assert allocation.copies == [BlockCopy(allocation.copies[0].source, own)]
    assert allocation.copies[0].source not in (shared, own)


def test_a_copy_source_is_pinned_until_the_first_publish() -> None:
    """Between allocation and the copy another allocation must not reuse the source."""
    allocator = BlockAllocator(3, ranks=2)
    store(allocator, "a")
    allocation = allocate(allocator, "a", extra_tokens=64)
    assert len(allocation.copies) == 1

    assert allocator.num_free == 1
    allocator.publish(allocation, 2 * BLOCK_TOKENS)
    assert allocator.num_free == 2


def test_a_prompt_that_needs_the_whole_pool_gives_up_its_partial_hit() -> None:
    """Else the pinned source would be the missing block for ever."""
    allocator = BlockAllocator(2, ranks=2)
    store(allocator, "a")

    allocation = allocator.allocate(4 * BLOCK_TOKENS, chain("axyz"))

    assert allocation is not None
    assert allocation.hit_tokens == 0
    assert allocation.copies == []


def test_a_sequence_grows_block_by_block() -> None:
    """Growth takes what is missing and says when it is not there."""
    allocator = BlockAllocator(2)
    allocation = allocate(allocator, "", extra_tokens=64)

    assert allocator.grow(allocation, 65)
    assert len(allocation.block_ids) == len(allocation.generations) == 2
    assert not allocator.grow(allocation, 129)
    assert len(allocation.block_ids) == 2


def test_blocks_filled_by_the_answer_are_found_by_the_next_turn() -> None:
    """The owner appends the new blocks' hashes and publishes again."""
    allocator = BlockAllocator(8)
    allocation = allocate(allocator, "a", reserve_tokens=200)
    allocator.publish(allocation, BLOCK_TOKENS)
    allocation.hashes.extend(chain("abc")[1:])

    allocator.publish(allocation, 3 * BLOCK_TOKENS)

    assert allocator.hit_tokens(1000, chain("abc")) == 3 * BLOCK_TOKENS


def test_a_block_cannot_be_given_back_twice() -> None:
    """A double free is our bug and must not pass in silence."""
    allocator = BlockAllocator(2)
    allocation = allocate(allocator, "a")
    allocator.free(allocation)

    with pytest.raises(KeyError):
        allocator.free(allocation)


class AllocatorMachine(RuleBasedStateMachine):
    """Random admit, compute, grow and finish against a listener and a naive model of content."""

    @initialize(
        ranks=st.sampled_from([1, 2, 4]),
        num_blocks=st.integers(4, 14),
    )
    def start(self, ranks: int, num_blocks: int) -> None:
        self.allocator = BlockAllocator(num_blocks, ranks=ranks)
        self.ranks = ranks
        self.live: list[tuple[Allocation, str]] = []
        self.prompts: set[str] = set()
        # What lies in each block: the letters of the whole chain up to each of its 64-token blocks.
        self.content: dict[int, list[str]] = {}
        self.outside: set[BlockHash] = set()

    @rule(letters=st.text("ab", max_size=6), extra=st.integers(0, 63), reserve=st.integers(0, 200))
    def admit(self, letters: str, extra: int, reserve: int) -> None:
        num_tokens = max(1, len(letters) * BLOCK_TOKENS + extra)
        before = self.allocator.num_free
        generations = {
            b: g for a, _ in self.live for b, g in zip(a.block_ids, a.generations, strict=True)
        }
        expected = self.allocator.hit_tokens(num_tokens, chain(letters))
        allocation = self.allocator.allocate(num_tokens, chain(letters), reserve_tokens=reserve)
        if allocation is None:
            assert self.allocator.num_free == before
            return
        assert allocation.hit_tokens in (expected, allocation.num_shared_blocks * 64 * self.ranks)
        assert allocation.hit_tokens < num_tokens
        self.hits_are_true_prefixes(allocation, letters)
        for block in allocation.new_block_ids:
            assert block not in generations, "owned twice"
            self.content[block] = []
        for copy in allocation.copies:
            num_copied = allocation.hit_tokens // BLOCK_TOKENS % self.ranks
            self.content[copy.target] = self.content[copy.source][:num_copied]
        assert all(generation > 0 for generation in allocation.generations)
        self.live.append((allocation, letters))
        self.prompts.add(letters)

    def hits_are_true_prefixes(self, allocation: Allocation, letters: str) -> None:
        prefixes = [letters[: place + 1] for place in range(len(letters))]
        found = [
            p for b in allocation.block_ids[: allocation.num_shared_blocks] for p in self.content[b]
        ]
        for copy in allocation.copies:
            found += self.content[copy.source][: allocation.hit_tokens // BLOCK_TOKENS % self.ranks]
        assert found == prefixes[: allocation.hit_tokens // BLOCK_TOKENS]

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        allocation, letters = data.draw(st.sampled_from(self.live))
        num_done = data.draw(st.integers(allocation.hit_tokens // BLOCK_TOKENS, len(letters)))
        self.compute_blocks(allocation, letters, num_done)

    def compute_blocks(self, allocation: Allocation, letters: str, num_done: int) -> None:
        first = allocation.num_shared_blocks * self.ranks
        for place in range(first, num_done):
            content = self.content[allocation.block_ids[place // self.ranks]]
            if len(content) <= place % self.ranks:
                content.append(letters[: place + 1])
        self.allocator.publish(allocation, num_done * BLOCK_TOKENS)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), num_tokens=st.integers(0, 1000))
    def grow(self, data: st.DataObject, num_tokens: int) -> None:
        allocation, _ = data.draw(st.sampled_from(self.live))
        before = len(allocation.block_ids)
        if self.allocator.grow(allocation, num_tokens):
            assert len(allocation.block_ids) * self.allocator.block_tokens >= num_tokens
        for block in allocation.block_ids[before:]:
            self.content[block] = []

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.live))
        self.live.remove(entry)
        self.allocator.free(entry[0])

    @precondition(lambda self: self.live)
    @rule()
    def complete_and_finish(self) -> None:
        allocation, letters = self.live.pop()
        self.compute_blocks(allocation, letters, len(letters))
        self.allocator.free(allocation)

    @invariant()
    def blocks_are_conserved(self) -> None:
        self.allocator.check_integrity()
        used = {block for allocation, _ in self.live for block in allocation.block_ids}
        assert self.allocator.num_free <= self.allocator.num_blocks - len(used)

    @invariant()
    def presence_along_a_chain_is_monotone(self) -> None:
        present = set(self.allocator.cached_hashes())
        for letters in self.prompts:
            flags = [block_hash in present for block_hash in chain(letters)]
            assert flags == sorted(flags, reverse=True)

    @invariant()
    def a_listener_knows_what_can_be_found(self) -> None:
        for event in self.allocator.drain_events():
            match event:
                case Stored(hashes):
                    assert self.outside.isdisjoint(hashes)
                    self.outside.update(hashes)
                case Removed(hashes):
                    assert self.outside.issuperset(hashes)
                    self.outside.difference_update(hashes)
                case Cleared():
                    self.outside.clear()
        assert self.outside == set(self.allocator.cached_hashes())

    def teardown(self) -> None:
        if not hasattr(self, "allocator"):
            return
        for allocation, _ in self.live:
            self.allocator.free(allocation)
        assert self.allocator.num_free == self.allocator.num_blocks


AllocatorMachine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=30, deadline=None
)
TestAllocatorMachine = AllocatorMachine.TestCase


def test_an_allocation_that_may_not_hit_computes_everything_and_can_be_found() -> None:
    """Blocks do not hold what logprobs are made of."""
    allocator = BlockAllocator(8)
    hashes = [BlockHash(bytes([place]) * 16) for place in range(3)]
    first = allocator.allocate(200, hashes)
    assert first is not None
    allocator.publish(first, 200)

    second = allocator.allocate(200, hashes, may_hit=False)

    assert second is not None and second.hit_tokens == 0
    assert not set(second.block_ids) & set(first.block_ids)
    allocator.publish(second, 200)
    allocator.free(first)
    assert allocator.hit_tokens(200, hashes) == 192
    allocator.free(second)
    allocator.check_integrity()
