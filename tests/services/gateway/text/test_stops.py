"""The stop scanner: a stop string never leaks, and nothing else is ever lost."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.text.stops import StopScanner

ALPHABET = "ab<é한"
texts = st.text(ALPHABET, max_size=24)
stop_lists = st.lists(st.text(ALPHABET, min_size=1, max_size=5), min_size=1, max_size=4)


def scan(chunks: list[str], stops: list[str]) -> tuple[str, str | None]:
    scanner = StopScanner(stops)
    text = "".join(scanner.feed(chunk) for chunk in chunks)
    return text + scanner.flush(), scanner.stopped_by


def expected(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition, one character at a time: the first to complete, the longest of equals."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            winner = max(complete, key=len)
            return text[: end - len(winner)], winner
    return text, None


@settings(deadline=None)
@given(texts, stop_lists, st.data())
def test_the_result_is_the_definition_for_every_chunking(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    """Clients must not see how the tokens happened to be batched."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    edges = [0, *cuts, len(text)]
    chunks = [text[a:b] for a, b in pairwise(edges)]

    assert scan(chunks, stops) == expected(text, stops)


def test_every_two_way_split_of_every_stop_is_found() -> None:
    """A stop string that arrives in two chunks must not leak its head."""
    for stop in ["</s>", "\n\n", "끝", "ENDE", "🙂!"]:
        text = f"before {stop} after"
        for cut in range(len(text) + 1):
            assert scan([text[:cut], text[cut:]], [stop]) == ("before ", stop)


def test_text_that_can_not_become_a_stop_is_passed_on_at_once() -> None:
    """Only a possible beginning is held back, so that streaming stays streaming."""
    scanner = StopScanner(["STOP"])

    assert scanner.feed("hello S") == "hello "
    assert scanner.feed("T") == ""
    assert scanner.feed("art") == "START"[:2] + "art"


def test_nothing_follows_a_stop() -> None:
    """Tokens computed past the stop are nobody's business."""
    scanner = StopScanner(["."])

    assert scanner.feed("One. Two") == "One"
    assert scanner.feed(" three") == ""
    assert scanner.flush() == ""
