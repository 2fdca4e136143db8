"""Cuts long texts into segments whose token ids, one after another, are the ids of the whole.

A cut is made only where the tokenizer itself surely splits: at its added tokens, and where its
pre-tokenizer's pattern cannot match across. Where neither can be shown, a text stays whole. A cut
depends on what stands before it and right behind it, so a text that grew at its end has the
segments it had, but for the last.
"""

import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from hashlib import blake2b
from secrets import token_bytes
from threading import Lock
from typing import Any

SEGMENT_CHARACTERS = 1 << 14  # tokenised in 5 ms
_SEARCH_CHARACTERS = 1 << 16  # one search keeps the interpreter busy for less than 2 ms
_ENTRY_BYTES = 200  # of a cached segment besides its ids: key, nodes, object headers

# Of the pattern that GLM's tokenizers split with, this form is known: {} is nothing or {1,3}.
_KNOWN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}@"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_KNOWN_PATTERNS = frozenset(_KNOWN_PATTERN.replace("@", run) for run in ("", "{1,3}"))

# Letters, digits and others in every version of Unicode that a tokenizer could know.
_LETTERS = "A-Za-zÀ-ÖØ-öø-ÿА-яぁ-ゔァ-ヺ一-龥가-힣"
_DIGITS = "0-9"
_OTHERS = r"!-/:-@\[-`{-~、。，！？"
_NO_SPACE = r"[^\s\u180e]"  # a space once, and now none
# No alternative of the known pattern goes on from a letter or a digit to another class, from what
# is no space to a space, or from a newline to what is no space; its only look-ahead follows spaces
# that end in no newline.
_SURE_SPLIT = (
    rf"(?<={_NO_SPACE})(?= )"
    rf"|(?<=\n)(?={_NO_SPACE})"
    rf"|(?<=[{_LETTERS}])(?=[{_DIGITS}{_OTHERS}\n])"
    rf"|(?<=[{_DIGITS}])(?=[{_LETTERS}{_OTHERS}\n])"
)


class Cuts:
    """Where texts may be cut for one tokenizer."""

    def __init__(
        self, definition: dict[str, Any], segment_characters: int = SEGMENT_CHARACTERS
    ) -> None:
        """`definition` is tokenizer.json; segments have at least `segment_characters`."""
        self._segment_characters = segment_characters
        added = [token["content"] for token in definition.get("added_tokens", ())]
        self._longest_added = max(map(len, added), default=0)
        self._added = _any_of(added)
        sure = [_SURE_SPLIT] if _splits_as_known(definition) else []
        starts = [rf"(?={self._added.pattern})"] if added else []
        self._places = re.compile("|".join(sure + starts)) if sure + starts else None
        if not _is_local(definition):
            self._places = None

    @property
    def is_possible(self) -> bool:
        """Whether texts are cut at all."""
        return self._places is not None

    def segments(self, text: str) -> Iterator[str]:
        """The text in segments, in order; together they are the text."""
        start = 0
        while start < len(text):
            end = self._cut(text, start + self._segment_characters)
            yield text[start:end]
            start = end

    def _cut(self, text: str, earliest: int) -> int:
        """The first sure place from `earliest` on; else the text's end."""
        while self._places is not None and earliest < len(text):
            found = self._places.search(text, earliest, earliest + _SEARCH_CHARACTERS)
            if found is not None:
                return self._outside_added(text, found.start())
            earliest += _SEARCH_CHARACTERS
        return len(text)

    def _outside_added(self, text: str, place: int) -> int:
        """The place, or the end of the added token that it lies in."""
        begin = max(0, place - self._longest_added + 1)
        for token in self._added.finditer(text, begin, place + self._longest_added):
            if token.start() < place < token.end():
                return token.end()
        return place


class SegmentCache:
    """The ids of segments, for each tenant apart; the least recently used go first.

    Safe to use from several threads. Holds no text: a key is a digest under a secret of this
    process. Tenants do not share entries, so that no one learns from the time that a prompt takes
    what another has sent.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._secret = token_bytes(32)
        self._ids: OrderedDict[bytes, bytes] = OrderedDict()
        self._lock = Lock()

    def get(self, tenant: str, segment: str, encode: Callable[[str], bytes]) -> bytes:
        """The segment's ids in wire form; `encode` is asked where they are not known."""
        key = self._key(tenant, segment)
        with self._lock:
            ids = self._ids.get(key)
            if ids is not None:
                self._ids.move_to_end(key)
                return ids
        ids = encode(segment)
        with self._lock:
            self._keep(key, ids)
        return ids

    @property
    def num_bytes(self) -> int:
        """What is held, in bytes."""
        return self._num_bytes

    def _keep(self, key: bytes, ids: bytes) -> None:
        num_bytes = len(ids) + _ENTRY_BYTES
        if key in self._ids or num_bytes > self._max_bytes:
            return
        self._ids[key] = ids
        self._num_bytes += num_bytes
        while self._num_bytes > self._max_bytes:
            _, dropped = self._ids.popitem(last=False)
            self._num_bytes -= len(dropped) + _ENTRY_BYTES

    def _key(self, tenant: str, segment: str) -> bytes:
        name = tenant.encode()
        digest = blake2b(len(name).to_bytes(4, "little") + name, digest_size=16, key=self._secret)
        digest.update(segment.encode(errors="surrogatepass"))  # marks are surrogates
        return digest.digest()


def _any_of(tokens: list[str]) -> re.Pattern[str]:
    """Finds the longest of the tokens at the first place where there is one, as tokenizers do."""
    ordered = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) if ordered else r"(?!)")


def _is_local(definition: dict[str, Any]) -> bool:
    """Whether added tokens split a text exactly where they stand, and nothing reaches across."""
    added = definition.get("added_tokens", ())
    names = [token["content"] for token in added]
    return (
        all(definition.get(name) is None for name in ("normalizer", "truncation", "padding"))
        and not definition["model"].get("dropout")
        and not any(
            token.get(name)
            for token in added
            for name in ("lstrip", "rstrip", "single_word", "normalized")
        )
        and not any(_may_overlap(one, other) for one in names for other in names)
        and all(not step.get("add_prefix_space") for step in _pre_tokenizers(definition))
        and {step["type"] for step in _pre_tokenizers(definition)} <= {"Split", "ByteLevel"}
    )


def _may_overlap(one: str, other: str) -> bool:
    """Whether `other` may begin within `one`, so that which of them counts depends on the start."""
    tails = [one[start:] for start in range(1, len(one))]
    return any(tail.startswith(other) or other.startswith(tail) for tail in tails)


def _splits_as_known(definition: dict[str, Any]) -> bool:
    """Whether the pre-tokenizer is one pattern, of the known form, and bytes after it."""
    steps = _pre_tokenizers(definition)
    if [step["type"] for step in steps] != ["Split", "ByteLevel"]:
        return False
    split, byte_level = steps
    return (
        split["pattern"].get("Regex") in _KNOWN_PATTERNS
        and split["behavior"] == "Isolated"
        and not split["invert"]
        and not byte_level["use_regex"]
    )


def _pre_tokenizers(definition: dict[str, Any]) -> list[dict[str, Any]]:
    found = definition.get("pre_tokenizer")
    if found is None:
        return []
    steps: list[dict[str, Any]] = found["pretokenizers"] if found["type"] == "Sequence" else [found]
    return steps
