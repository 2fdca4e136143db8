import hashlib
import hmac
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.door.keys import Caller, Limits, identify, new_key, parse, salt
from shared import block_hash
from shared.errors import ConfigError

NOW = datetime(2027, 1, 1, tzinfo=UTC)


def entry(key: str, name: str = "alice", more: str = "") -> str:
    digest = hashlib.sha256(key.encode()).hexdigest()
    return f'[[keys]]\nname = "{name}"\ntenant = "research"\nsha256 = "{digest}"\n{more}\n'


def test_a_key_is_known_by_its_digest() -> None:
    more = (
        "max_in_flight = 3\nrequests_per_minute = 60\nprompt_tokens_per_minute = 1000\n"
        "max_priority = 0\noperator = true"
    )
    keys = parse(entry("k1", "alice", more) + entry("k2", "bob"))

    assert identify(keys, ["k1"], NOW) == Caller("alice", "research", Limits(3, 60, 1000, 0), True)
    assert identify(keys, ["wrong", "k2"], NOW) == Caller("bob", "research")
    assert identify(keys, ["k", "k11", ""], NOW) is None
    assert identify(keys, [], NOW) is None


def test_without_entries_nobody_comes_in() -> None:
    assert identify(parse(""), ["", "k1"], NOW) is None


@pytest.mark.parametrize(
    "more",
    [
        "disabled = true",
        "expires = 2026-12-31T23:59:59Z",
        "expires = 2027-01-01T00:00:00",  # without a zone it is UTC
    ],
)
def test_a_disabled_or_expired_key_opens_nothing(more: str) -> None:
    keys = parse(entry("k1", more=more))

    assert identify(keys, ["k1"], NOW) is None


def test_a_key_is_valid_until_it_expires() -> None:
    keys = parse(entry("k1", more="expires = 2027-01-01T00:00:01Z"))

    assert identify(keys, ["k1"], NOW) is not None
    assert identify(keys, ["k1"], NOW + timedelta(seconds=1)) is None


def test_every_entry_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after one was found: time must not tell which."""
    compared: list[bytes] = []
    real = hmac.compare_digest

    def compare(left: bytes, right: bytes) -> bool:
        compared.append(right)
        return real(left, right)

    keys = parse("".join(entry(f"k{n}", f"name{n}") for n in range(3)))
    monkeypatch.setattr(hmac, "compare_digest", compare)

    for presented in ("k0", "k2", "wrong"):
        compared.clear()
        identify(keys, [presented], NOW)
        assert compared == [key.digest for key in keys]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        pytest.param("[[keys]", "not valid TOML", id="no-toml"),
        pytest.param("colour = 1", "nothing else", id="another-table"),
        pytest.param("keys = 1", "nothing else", id="no-tables"),
        pytest.param("keys = [1]", "key 1 is no table", id="no-table"),
        pytest.param(entry("k").replace("tenant", "#"), "tenant", id="no-tenant"),
        pytest.param(entry("k", "a b"), "name", id="a-name-that-forges-labels"),
        pytest.param(entry("k", more="colour = 1"), "'alice': colour is not", id="unknown"),
        pytest.param(entry("k", more="max_in_flight = 0"), "at least 1", id="zero"),
        pytest.param(entry("k", more="max_in_flight = true"), "whole number", id="no-number"),
        pytest.param(entry("k", more='disabled = "no"'), "true or false", id="no-flag"),
        pytest.param(entry("k", more="expires = 2027-01-01"), "date and time", id="no-time"),
        pytest.param(entry("k") + entry("l"), "one name", id="one-name-twice"),
        pytest.param(entry("k", "a") + entry("k", "b"), "one sha256", id="one-key-twice"),
        pytest.param(entry("k").replace("sha256", "key"), "key is not", id="the-key-itself"),
    ],
)
def test_a_file_that_is_not_understood_is_refused(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parse(text)


def test_a_fresh_key_opens_the_door_and_is_not_in_its_entry() -> None:
    key, text = new_key("alice", "research")

    assert identify(parse(text), [key], NOW) == Caller("alice", "research")
    assert key not in text
    assert len(key) >= 43, "256 bits in base64"
    with pytest.raises(ValueError, match="not made of"):
        new_key('a"\nsha256 = "', "t")


# Two of few words, some of which look like what others become.
words = st.sampled_from(["", "a", "b", "[", '["a", "b"]', '["", "a"]', 'a", "b']) | st.text()
pairs = st.tuples(words, words)


@given(pairs, pairs)
def test_salts_are_equal_only_for_one_tenant_and_one_cache_salt(
    left: tuple[str, str], right: tuple[str, str]
) -> None:
    assert (salt(*left) == salt(*right)) is (left == right)


def test_without_tenants_a_salt_is_the_clients() -> None:
    """What a gateway without keys has cached stays cached."""
    assert salt("", "") == ""
    assert salt("", "mine") == "mine"


def test_two_tenants_share_no_block() -> None:
    prompt = range(128)
    spaces = [
        block_hash.namespace("model", "revision", salt(tenant, cache_salt))
        for tenant, cache_salt in [("a", ""), ("b", ""), ("", "a"), ("", ""), ("a", "b")]
    ]
    hashes = [block for space in spaces for block in block_hash.block_hashes(space, prompt)]

    assert len(set(hashes)) == len(spaces) * 2
