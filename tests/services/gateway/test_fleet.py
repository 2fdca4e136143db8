"""The gateway's picture of the fleet: silence, new lives, and what fits."""

from services.gateway.fleet import Fleet
from shared import farspan_pb2 as pb


def beat(
    worker_id: str,
    epoch: int = 1,
    *,
    role: pb.Role = pb.ROLE_PREFILL,
    state: pb.ServiceState = pb.SERVICE_STATE_READY,
    max_tokens: int = 10,
    model: str = "m",
    fingerprint: str = "f",
    kv_format: str = "",
) -> pb.Heartbeat:
    return pb.Heartbeat(
        worker=pb.WorkerRef(worker_id=worker_id, epoch=epoch),
        role=role,
        state=state,
        model=model,
        limits=pb.Limits(max_sequence_tokens=max_tokens),
        layout=pb.KvLayout(model_fingerprint=fingerprint, kv_format=kv_format),
    )


def ref(worker_id: str, epoch: int = 1) -> pb.WorkerRef:
    return pb.WorkerRef(worker_id=worker_id, epoch=epoch)


def test_a_silent_worker_is_lost_and_no_longer_ready() -> None:
    """Three seconds are six heartbeats."""
    fleet = Fleet("m", 3.0)
    fleet.hear(beat("p"), 100.0)

    assert not fleet.is_lost(ref("p"), 0.0, 103.0)
    assert fleet.ready(pb.ROLE_PREFILL, 103.0)
    assert fleet.is_lost(ref("p"), 0.0, 103.1)
    assert not fleet.ready(pb.ROLE_PREFILL, 103.1)


def test_a_new_epoch_loses_the_old_life_at_once() -> None:
    """A restarted worker knows nothing of its former requests."""
    fleet = Fleet("m", 3.0)
    fleet.hear(beat("p", 5), 100.0)

    assert fleet.is_lost(ref("p", 4), 100.0, 100.0)
    assert not fleet.is_lost(ref("p", 5), 100.0, 100.0)


def test_a_late_heartbeat_of_an_earlier_life_is_ignored() -> None:
    """Messages of a partitioned process may come late."""
    fleet = Fleet("m", 3.0)
    fleet.hear(beat("p", 5), 100.0)
    fleet.hear(beat("p", 4), 101.0)

    assert fleet.is_lost(ref("p", 4), 100.0, 101.0)


def test_a_worker_never_heard_of_has_the_same_time_to_speak() -> None:
    """The router may have heard a new worker before the gateway did."""
    fleet = Fleet("m", 3.0)

    assert not fleet.is_lost(ref("new"), 100.0, 103.0)
    assert fleet.is_lost(ref("new"), 100.0, 103.1)


def test_a_silent_worker_is_heard_again_in_the_same_life_only() -> None:
    """Another life has lost the requests, and one that stops takes none."""
    fleet = Fleet("m", 3.0)
    fleet.hear(beat("p", 5), 100.0)
    assert not fleet.is_heard_after(103.1, ref("p", 5))

    fleet.hear(beat("p", 5), 104.0)
    assert fleet.is_heard_after(103.1, ref("p", 5))
    assert not fleet.is_heard_after(103.1, ref("p", 4))
    assert not fleet.is_heard_after(103.1, ref("q"))

    fleet.hear(beat("p", 5, state=pb.SERVICE_STATE_STOPPED), 105.0)
    assert not fleet.is_heard_after(103.1, ref("p", 5))


def test_silence_the_gateway_is_to_blame_for_is_forgiven() -> None:
    """With its own connection away, every worker is silent."""
    fleet = Fleet("m", 3.0)
    fleet.hear(beat("p"), 100.0)
    fleet.forgive(110.0)

    assert not fleet.is_lost(ref("p"), 0.0, 112.0)
    assert fleet.is_lost(ref("p"), 0.0, 113.1)


def test_a_draining_worker_keeps_its_requests_and_gets_no_new_ones() -> None:
    """A stopped one has lost them."""
    fleet = Fleet("m", 3.0)
    fleet.hear(beat("p", state=pb.SERVICE_STATE_DRAINING), 100.0)
    assert not fleet.is_lost(ref("p"), 0.0, 100.0)
    assert fleet.missing(100.0) == "no ready prefill and no ready decode worker"

    fleet.hear(beat("p", state=pb.SERVICE_STATE_STOPPED), 100.1)
    assert fleet.is_lost(ref("p"), 0.0, 100.1)


def test_a_request_may_have_what_the_largest_workers_of_both_roles_hold() -> None:
    """Of this model only."""
    fleet = Fleet("m", 3.0)
    fleet.hear(beat("p1", max_tokens=10), 100.0)
    fleet.hear(beat("p2", max_tokens=20), 100.0)
    fleet.hear(beat("p3", max_tokens=99, model="other"), 100.0)
    fleet.hear(beat("d1", max_tokens=15, role=pb.ROLE_DECODE), 100.0)

    assert fleet.max_sequence_tokens(100.0) == 15
    assert fleet.missing(100.0) == ""
    assert fleet.model_fingerprint(100.0) == "f"
    assert fleet.max_sequence_tokens(200.0) == 0


def test_a_request_may_have_what_one_pair_holds() -> None:
    """KV does not move between layouts: the largest of each role may not be a pair."""
    fleet = Fleet("m", 3.0)
    fleet.hear(beat("p1", max_tokens=65, kv_format="fp8"), 100.0)
    fleet.hear(beat("p2", max_tokens=200, kv_format="bf16"), 100.0)
    fleet.hear(beat("d1", max_tokens=233, kv_format="fp8", role=pb.ROLE_DECODE), 100.0)
    fleet.hear(beat("d2", max_tokens=30, kv_format="bf16", role=pb.ROLE_DECODE), 100.0)
    assert fleet.max_sequence_tokens(100.0) == 65

    fleet.hear(beat("d2", 2, max_tokens=150, kv_format="bf16", role=pb.ROLE_DECODE), 100.0)
    assert fleet.max_sequence_tokens(100.0) == 150


def test_workers_that_are_no_pair_are_missing_each_other() -> None:
    """A gateway in front of them serves nothing, and a request is not told it is too long."""
    fleet = Fleet("m", 3.0)
    fleet.hear(beat("p", kv_format="fp8"), 100.0)
    fleet.hear(beat("d", kv_format="bf16", role=pb.ROLE_DECODE), 100.0)

    assert fleet.max_sequence_tokens(100.0) == 0
    assert "agree" in fleet.missing(100.0)


def test_people_see_the_workers_with_their_pools() -> None:
    """Prefill first, each with the pools it has."""
    fleet = Fleet("m", 3.0)
    decode = beat("d", role=pb.ROLE_DECODE, state=pb.SERVICE_STATE_DRAINING)
    decode.load.MergeFrom(
        pb.Load(
            num_running=2,
            free_blocks=1,
            total_blocks=4,
            free_device_pages=2,
            total_device_pages=5,
            free_index_pages=3,
            total_index_pages=6,
            tokens_per_s=12.34,
        )
    )
    fleet.hear(decode, 99.0)
    fleet.hear(beat("p"), 100.0)

    prefill, shown = fleet.view(100.0)

    assert (prefill.id, prefill.role, prefill.state, prefill.pools) == ("p", "prefill", "ready", [])
    assert (shown.id, shown.role, shown.state, shown.model) == ("d", "decode", "draining", "m")
    assert (shown.running, shown.tokens_per_s, shown.heard_s_ago) == (2, 12.3, 1.0)
    assert [(pool.name, pool.free, pool.total) for pool in shown.pools] == [
        ("host pages", 1, 4),
        ("device pages", 2, 5),
        ("index pages", 3, 6),
    ]


def test_people_see_a_silent_worker_for_a_minute() -> None:
    """Long enough to notice who has gone."""
    fleet = Fleet("m", 3.0)
    fleet.hear(beat("p"), 100.0)

    assert [worker.state for worker in fleet.view(103.0)] == ["ready"]
    assert [worker.state for worker in fleet.view(103.1)] == ["silent"]
    assert fleet.view(160.1) == []
