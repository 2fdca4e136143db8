"""API keys as they stand in a file, and who bears one. Pure.

The file holds SHA-256 digests, never keys. A key is 256 random bits, which nobody guesses however
fast the hash is, so it takes no salt and no slow hash; a password chosen by a person would.
"""

import hashlib
import hmac
import json
import re
import secrets
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from shared.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")  # it stands in logs and metrics
_DIGEST = re.compile(r"[0-9a-f]{64}")
_KEY_BYTES = 32
_COUNTS = ("max_in_flight", "requests_per_minute", "prompt_tokens_per_minute")
_FIELDS = {*_COUNTS, "name", "tenant", "sha256", "max_priority", "disabled", "expires", "operator"}


@dataclass(frozen=True)
class Limits:
    """What one key may use; None is no limit."""

    max_in_flight: int | None = None
    requests_per_minute: int | None = None
    prompt_tokens_per_minute: int | None = None
    max_priority: int | None = None  # requests that claim more are refused

    @property
    def is_free(self) -> bool:
        """Whether nothing is counted by the minute."""
        return self.requests_per_minute is None and self.prompt_tokens_per_minute is None


@dataclass(frozen=True)
class Caller:
    """Who sends a request. Without keys everybody is the same caller, of tenant ""."""

    name: str = ""
    tenant: str = ""  # prompts' blocks are shared within it, never beyond
    limits: Limits = Limits()
    is_operator: bool = False  # may read what is about others' requests


@dataclass(frozen=True)
class Key:
    """One entry of the file."""

    digest: bytes
    caller: Caller
    is_disabled: bool = False
    expires: datetime | None = None

    def is_valid(self, now: datetime) -> bool:
        """Whether it opens the door now."""
        return not self.is_disabled and (self.expires is None or now < self.expires)


def parse(text: str) -> tuple[Key, ...]:
    """The keys in a TOML document with a table `[[keys]]` for each. Raises ConfigError."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"it is not valid TOML: {error}") from None
    entries = document.pop("keys", [])
    if document or not isinstance(entries, list):
        raise ConfigError("it must hold tables [[keys]] and nothing else")
    keys = tuple(_key(place, entry) for place, entry in enumerate(entries, 1))
    if len({key.caller.name for key in keys}) < len(keys):
        raise ConfigError("two keys have one name")
    if len({key.digest for key in keys}) < len(keys):
        raise ConfigError("two keys have one sha256")
    return keys


def identify(keys: Iterable[Key], given: Sequence[str], now: datetime) -> Caller | None:
    """Who bears one of the keys given; None if nobody may come in with them.

    Every given key is compared with every entry, so that time tells nothing of which is near.
    """
    found = None
    for text in given:
        digest = hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
        for key in keys:
            if hmac.compare_digest(digest, key.digest) and key.is_valid(now):
                found = key.caller
    return found


def new_key(name: str, tenant: str) -> tuple[str, str]:
    """A fresh key, and the entry to add to the file. Raises ValueError for an unfit name."""
    for word in (name, tenant):
        if not _NAME.fullmatch(word):
            raise ValueError(f"{word!r} is not made of 1 to 64 of [A-Za-z0-9._-]")
    key = f"fs-{secrets.token_urlsafe(_KEY_BYTES)}"
    digest = hashlib.sha256(key.encode()).hexdigest()
    entry = f'[[keys]]\nname = "{name}"\ntenant = "{tenant}"\nsha256 = "{digest}"\n'
    return key, entry


def salt(tenant: str, cache_salt: str) -> str:
    """What keeps one tenant's blocks from another's: different pairs give different salts."""
    is_plain = not tenant and not cache_salt.startswith("[")
    return cache_salt if is_plain else json.dumps([tenant, cache_salt])


def _key(place: int, entry: object) -> Key:
    if not isinstance(entry, dict):
        raise ConfigError(f"key {place} is no table")
    name = _text(entry, "name", f"key {place}", _NAME)
    where = f"key {name!r}"
    if unknown := sorted(entry.keys() - _FIELDS):
        raise ConfigError(f"{where}: {', '.join(unknown)} is not a setting of a key")
    in_flight, requests, tokens = (_count(entry, field, where) for field in _COUNTS)
    limits = Limits(in_flight, requests, tokens, _whole(entry, "max_priority", where))
    return Key(
        bytes.fromhex(_text(entry, "sha256", where, _DIGEST)),
        Caller(name, _text(entry, "tenant", where, _NAME), limits, _flag(entry, "operator", where)),
        _flag(entry, "disabled", where),
        _moment(entry, where),
    )


def _text(entry: Mapping[str, Any], field: str, where: str, pattern: re.Pattern[str]) -> str:
    value = entry.get(field)
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise ConfigError(f"{where}: {field} must be a string like {pattern.pattern}")
    return value


def _whole(entry: Mapping[str, Any], field: str, where: str) -> int | None:
    value = entry.get(field)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise ConfigError(f"{where}: {field} must be a whole number")
    return value


def _count(entry: Mapping[str, Any], field: str, where: str) -> int | None:
    value = _whole(entry, field, where)
    if value is not None and value < 1:
        raise ConfigError(f"{where}: {field} must be at least 1")
    return value


def _flag(entry: Mapping[str, Any], field: str, where: str) -> bool:
    value = entry.get(field, False)
    if not isinstance(value, bool):
        raise ConfigError(f"{where}: {field} must be true or false")
    return value


def _moment(entry: Mapping[str, Any], where: str) -> datetime | None:
    value = entry.get("expires")
    if value is None:
        return None
    if not isinstance(value, datetime):
        raise ConfigError(f"{where}: expires must be a date and time, as 2027-01-31T00:00:00Z")
    return value if value.tzinfo is not None else value.replace(tzinfo=UTC)
