"""What the client's and the mocks' clocks say together. Pure."""

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise

from benchmarks.gateway_speed.client import Heard, name_of

Sent = Mapping[str, Sequence[float]]


def tokens_per_s(heard: Sequence[Heard]) -> float:
    """Tokens of all answers, from the first request to the last token."""
    begin_s = min(answer.sent_s for answer in heard)
    end_s = max(answer.arrived_s[-1] for answer in heard)
    return sum(len(answer.arrived_s) for answer in heard) / (end_s - begin_s)


def events_per_token(heard: Sequence[Heard]) -> float:
    """One, less what was sent together; what is no token's does not count."""
    num_tokens = sum(len(answer.arrived_s) for answer in heard)
    return sum(answer.num_token_events for answer in heard) / num_tokens


def added_gaps_ms(heard: Sequence[Heard], sent: Sent) -> list[float]:
    """How much longer each token's gap to the one before was at the client than at the mock."""
    return [
        1e3 * ((later - earlier) - (sent_later - sent_earlier))
        for answer in heard
        for (earlier, later), (sent_earlier, sent_later) in zip(
            pairwise(answer.arrived_s), pairwise(sent[name_of(answer.number)]), strict=True
        )
    ]


def delays_ms(heard: Sequence[Heard], sent: Sent) -> list[float]:
    """From each token's sending to its arrival."""
    return [
        1e3 * (arrived_s - sent_s)
        for answer in heard
        for arrived_s, sent_s in zip(answer.arrived_s, sent[name_of(answer.number)], strict=True)
    ]


def first_token_p50_ms(heard: Sequence[Heard]) -> float:
    """From the request to its first token."""
    return statistics.median(1e3 * (answer.arrived_s[0] - answer.sent_s) for answer in heard)


def p99(values: Sequence[float]) -> float:
    """The 99th percentile."""
    return statistics.quantiles(values, n=100)[-1]
