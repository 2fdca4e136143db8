import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.placement.cache import PrefixCache
from benchmarks.placement.traces import Nodes
from shared.block_hash import BlockHash
from shared.engine.kv.allocator import BlockAllocator
from tests.benchmarks.placement.plays import request


@given(st.integers(0, 2**32), st.integers(12, 60))
@settings(max_examples=60, deadline=None)
def test_it_hits_and_evicts_as_the_engines_allocator(seed: int, num_blocks: int) -> None:
    """The replay's reuse is the engine's: same hits, same room, for random chains with branches.

    Prompts end inside a block: of one that ends with it the engine computes and keeps a copy.
    """
    rng = random.Random(seed)
    chains = [list(range(100 * i, 100 * i + 8)) for i in range(3)]
    chains += [[*chains[i][:cut], *range(500 + 20 * n, 510 + 20 * n)] for n, (i, cut) in
               enumerate([(0, 3), (0, 6), (1, 5), (2, 1)])]  # fmt: skip
    cache, allocator = PrefixCache(num_blocks), BlockAllocator(num_blocks)
    for _ in range(60):
        nodes = rng.choice(chains)[: rng.randrange(1, 16)]
        one = request(nodes, len(nodes) * 64 + rng.randrange(1, 64))
        hashes = [BlockHash(node.to_bytes(16, "big")) for node in nodes]
        num_tokens = one.turn.num_tokens

        lease = cache.allocate(one, num_tokens)
        allocation = allocator.allocate(num_tokens, hashes)

        assert (lease is None) == (allocation is None)
        if lease is not None and allocation is not None:
            assert lease.num_hit_nodes * 64 == allocation.hit_tokens
            cache.publish(lease, num_tokens)
            allocator.publish(allocation, num_tokens)
            assert cache.num_free == allocator.num_free
            cache.free(lease)
            allocator.free(allocation)
        assert cache.num_free == allocator.num_free == num_blocks


@given(st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_no_block_is_lost_whatever_overlaps(seed: int) -> None:
    """Prompts that share a prefix run at once, are published in parts, and end in any order."""
    rng = random.Random(seed)
    cache = PrefixCache(50)
    open_leases = []
    for _ in range(80):
        if open_leases and rng.random() < 0.5:
            lease = open_leases.pop(rng.randrange(len(open_leases)))
            cache.publish(lease, rng.randrange(0, lease.request.turn.num_tokens + 1))
            cache.free(lease)
        else:
            first = rng.choice([0, 0, 200, 300])
            one = request(list(range(first, first + rng.randrange(1, 20))))
            lease = cache.allocate(one, one.turn.num_tokens)
            if lease is not None:
                cache.publish(lease, rng.randrange(0, one.turn.num_tokens + 1))
                open_leases.append(lease)
        assert 0 <= cache.num_empty <= cache.num_free <= 50
    for lease in open_leases:
        cache.free(lease)

    assert cache.num_free == 50


def test_changes_are_told_so_that_an_index_can_follow() -> None:
    """What was told is what can be found: stored when computed, gone when evicted, tail first."""
    held: set[int] = set()
    last_gone: list[int] = []

    def changed(space: int, nodes: Nodes, is_held: bool) -> None:
        held.update(nodes.tolist()) if is_held else held.difference_update(nodes.tolist())
        if not is_held:
            last_gone[:] = nodes.tolist()

    cache = PrefixCache(10, changed)
    first = cache.allocate(request(list(range(6))), 400)
    assert first is not None
    cache.publish(first, 200)
    assert held == {0, 1, 2}
    cache.publish(first, 400)
    cache.free(first)
    assert held == set(range(6))
    second = cache.allocate(request(list(range(100, 105))), 6 * 64)
    assert second is not None
    assert held == {0, 1, 2, 3}
    assert last_gone == [4, 5]


def test_the_age_of_what_goes_first_is_told() -> None:
    """Using a block makes it young; what is not cached has no age."""
    now_s = [0.0]
    cache = PrefixCache(20, clock=lambda: now_s[0])

    def use(nodes: list[int]) -> None:
        lease = cache.allocate(request(nodes), len(nodes) * 64)
        assert lease is not None
        cache.publish(lease, len(nodes) * 64)
        cache.free(lease)

    assert cache.eviction_age_s == 0
    use([0, 1, 2])
    now_s[0] = 10.0
    use([5, 6])
    now_s[0] = 15.0
    assert (cache.eviction_age_s, cache.num_empty) == (15, 15)
    use([0, 1, 2])
    assert cache.eviction_age_s == 5


def test_presence_along_a_chain_is_monotone() -> None:
    """The first gap ends a hit, so a search may stop there."""
    rng = random.Random(3)
    held = np.zeros(1000, np.bool_)
    cache = PrefixCache(30, lambda space, nodes, is_held: held.__setitem__(nodes, is_held))
    for _ in range(300):
        nodes = list(range(rng.randrange(1, 25))) if rng.random() < 0.5 else [0, 1, 2, 50, 51]
        if rng.random() < 0.4:
            nodes = [600 + node for node in nodes]
        lease = cache.allocate(request(nodes), len(nodes) * 64)
        assert lease is not None
        cache.publish(lease, len(nodes) * 64)
        cache.free(lease)
        presence = held[np.array(nodes)]
        assert presence[: int(presence.sum())].all()
