"""Tokens in order, each once, from any mixture of lost, late and repeated messages."""

import asyncio
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.inbox import Inbox
from shared import farspan_pb2 as pb
from shared.block_hash import token_bytes

PREFILL = pb.WorkerRef(worker_id="p", epoch=1)
DECODE = pb.WorkerRef(worker_id="d", epoch=2)
STOP = pb.End(reason=pb.FINISH_REASON_STOP)


def message(index: int, ids: list[int], end: pb.End | None = None) -> pb.Tokens:
    return pb.Tokens(sender=DECODE, index=index, token_ids=token_bytes(ids), end=end)


@settings(deadline=None)
@given(
    num_tokens=st.integers(1, 12),
    first=st.integers(0, 3),
    pieces=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 4)), max_size=30),
)
def test_any_pieces_in_any_order_make_the_answer(
    num_tokens: int, first: int, pieces: list[tuple[int, int]]
) -> None:
    """What was taken is always a beginning of the answer, and a resend completes it."""
    answer = list(range(1000, 1000 + num_tokens))
    inbox = Inbox(first, [PREFILL, DECODE])
    taken: list[int] = []

    for start, length in pieces:
        start = min(start, num_tokens)
        is_taken = inbox.accept(message(first + start, answer[start : start + length]))
        assert is_taken == (first + start <= inbox.next_index)
        taken += inbox.take().token_ids
        assert taken == answer[: len(taken)]
        assert inbox.next_index == first + len(taken)
    inbox.accept(message(inbox.next_index, answer[len(taken) :], STOP))

    assert taken + inbox.take().token_ids == answer
    assert inbox.end == STOP


def test_an_end_with_tokens_missing_is_not_the_end() -> None:
    """The sender resends from the index it is answered with."""
    inbox = Inbox(0, [DECODE])

    assert not inbox.accept(message(2, [7], STOP))
    assert (inbox.end, inbox.next_index) == (None, 0)


def test_a_failure_ends_the_answer_whatever_is_missing() -> None:
    """The next attempt continues from what is here."""
    failed = pb.End(reason=pb.FINISH_REASON_FAILED)
    inbox = Inbox(0, [DECODE])

    assert inbox.accept(message(5, [], failed))
    assert inbox.end == failed


def test_only_the_two_workers_in_this_life_are_trusted() -> None:
    """A restarted worker has another epoch and another memory."""
    inbox = Inbox(0, [PREFILL, DECODE])

    assert inbox.trusts(PREFILL)
    assert not inbox.trusts(pb.WorkerRef(worker_id="d", epoch=1))


async def test_waiting_ends_with_the_first_arrival_or_the_time() -> None:
    """A reader must neither poll nor hang."""
    inbox = Inbox(0, [DECODE])
    begun_s = time.monotonic()
    await inbox.wait(0.05)
    assert time.monotonic() - begun_s >= 0.04

    asyncio.get_running_loop().call_later(0.01, inbox.accept, message(0, [1]))
    await inbox.wait(5)
    assert inbox.take().token_ids == [1]
