import pytest

from services.gateway.door.origin import is_loopback, is_own_host, is_own_origin


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("", False),
        ("::", False),
        ("10.0.0.1", False),
        ("gateway", False),
    ],
)
def test_only_this_machine_reaches_a_loopback_address(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1:8000", True),
        ("10.0.0.1", True),
        ("[::1]:8000", True),
        ("localhost:8000", True),
        ("LOCALHOST", True),
        ("farspan.localhost:8000", True),
        ("known.example:8000", True),
        ("rebound.example:8000", False),
        ("localhost.example", False),
        ("127.0.0.1.example", False),
        ("", False),
        ("[", False),
        ("user@evil.example", False),
    ],
)
def test_a_name_that_others_may_own_is_not_ours(host: str, expected: bool) -> None:
    assert is_own_host(host, ["known.example"]) is expected


@pytest.mark.parametrize(
    ("origin", "host", "expected"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1:8000", True),
        ("http://localhost", "localhost:80", True),
        ("https://a.example", "a.example", True),
        ("https://known.example", "10.0.0.1:8000", True),
        ("http://127.0.0.1:9000", "127.0.0.1:8000", False),
        ("https://evil.example", "127.0.0.1:8000", False),
        ("null", "127.0.0.1:8000", False),
        ("", "127.0.0.1:8000", False),
        ("file://", "127.0.0.1:8000", False),
        ("http://[", "127.0.0.1:8000", False),
    ],
)
def test_a_page_of_another_site_is_told_from_ours(origin: str, host: str, expected: bool) -> None:
    assert is_own_origin(origin, host, ["known.example"]) is expected
