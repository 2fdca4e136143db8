"""Which prefill workers are taken for dead."""

from services.decode.prefills import Prefills
from shared import farspan_pb2 as pb


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def ref(epoch: int = 1) -> pb.WorkerRef:
    return pb.WorkerRef(worker_id="p", epoch=epoch)


def beat(epoch: int = 1, state: pb.ServiceState = pb.SERVICE_STATE_READY) -> pb.Heartbeat:
    return pb.Heartbeat(worker=ref(epoch), role=pb.ROLE_PREFILL, state=state)


def test_silence_is_death() -> None:
    clock = Clock()
    prefills = Prefills(clock)
    prefills.observe(beat())

    assert not prefills.is_lost(ref())
    clock.now_s += 4
    assert prefills.is_lost(ref())


def test_our_own_deafness_is_not() -> None:
    """While the bus is away nobody can be heard."""
    clock = Clock()
    prefills = Prefills(clock)
    prefills.note(ref())
    clock.now_s += 4

    prefills.excuse_silence()

    assert not prefills.is_lost(ref())


def test_a_new_life_or_a_stop_ends_the_old_one_at_once() -> None:
    prefills = Prefills(Clock())
    prefills.observe(beat())
    prefills.observe(beat(epoch=2))

    assert prefills.is_lost(ref(1))
    assert not prefills.is_lost(ref(2))
    prefills.observe(beat(epoch=2, state=pb.SERVICE_STATE_STOPPED))
    assert prefills.is_lost(ref(2))


def test_what_is_not_known_is_not_lost() -> None:
    prefills = Prefills(Clock())
    prefills.observe(pb.Heartbeat(worker=ref(5), role=pb.ROLE_DECODE))

    assert not prefills.is_lost(ref(1))
