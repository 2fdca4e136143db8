"""What a client is told of a failure stays short."""

from services.gateway.failures import InvalidRequest, as_http, shortened
from shared.errors import BadRequest


def test_a_message_has_an_end() -> None:
    """Whoever wrote it, and whatever of a client's is in it."""
    for kind in (InvalidRequest, BadRequest):
        assert as_http(kind("x" * 10**6)).message == "x" * 1000 + "…"
        assert as_http(kind("x" * 1000)).message == "x" * 1000


def test_a_client_s_words_are_cut() -> None:
    """Their beginning tells which they were."""
    assert shortened("x" * 101) == "x" * 100 + "…"
    assert shortened("x" * 100) == "x" * 100
