import numpy as np

from benchmarks.placement.index import DELAY_S, LateIndex
from services.router.view import WorkerKey
from tests.benchmarks.placement.plays import request


def test_a_block_is_known_when_its_event_has_arrived_and_not_before() -> None:
    """A router never sees the present."""
    now_s = [0.0]
    index = LateIndex(lambda: now_s[0])
    changed = index.follower("p00")
    index.follower("p01")
    changed(0, np.arange(5), True)

    assert index.hits(request([0, 1, 2])) == {}
    now_s[0] = DELAY_S
    hits = index.hits(request([0, 1, 2, 3, 4, 5, 900]))
    assert {key: hit.num_blocks for key, hit in hits.items()} == {WorkerKey("p00", 1): 5}
    assert index.hits(request([0, 1], space=1)) == {}
    changed(0, np.array([3, 4]), False)
    now_s[0] = 1.0
    assert index.hits(request([0, 1, 2, 3, 4]))[WorkerKey("p00", 1)].num_blocks == 3
