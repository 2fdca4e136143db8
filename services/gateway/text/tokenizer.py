"""A checkpoint's text side: text to token ids, chats to prompt text, token ids to text.

The only module that knows `tokenizers`. Knows nothing of HTTP.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from services.gateway.text.checkpoint import Checkpoint, read_checkpoint
from services.gateway.text.detokenizer import Detokenizer, TokenBytes
from services.gateway.text.segments import Cuts, SegmentCache
from services.gateway.text.spellings import MARK, Spellings
from services.gateway.text.template import Template
from services.gateway.wanted import check_wanted
from shared import block_hash
from shared.errors import BadRequest, ConfigError
from shared.json_file import read_object

_USUAL_CHARACTERS_PER_TOKEN = 4  # texts below this are encoded once, in full
_PIECE_CHARACTERS = 1 << 16
# Of what cannot be cut: a second and 140 MB. Only what is no text has longer runs of one kind.
_MAX_SEGMENT_CHARACTERS = 1 << 20
_CUT_TOKENS = 64  # more than a cut in the middle of a word can add
_CACHE_BYTES = 256 << 20


class Tokenizer:
    """Text and token ids of one checkpoint; safe to use from several threads."""

    def __init__(self, directory: Path, cache_bytes: int = _CACHE_BYTES) -> None:
        """Load from a checkpoint directory; up to `cache_bytes` of token ids are remembered.

        Raises ConfigError naming what is missing.
        """
        self.checkpoint: Checkpoint = read_checkpoint(directory)
        path = directory / "tokenizer.json"
        definition = read_object(path)
        decoder = definition.get("decoder") or {}
        if decoder.get("type") != "ByteLevel":
            raise ConfigError(
                f"{path} is not byte-level (decoder {decoder.get('type')}), the only kind supported"
            )
        self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        self._cuts = Cuts(definition)
        self._cache = SegmentCache(cache_bytes)
        self._template = Template(directory)
        self._spellings = Spellings(definition)
        self._named_bytes = self._read_token_bytes(silent=())
        self._token_bytes = self._read_token_bytes(silent=self._silent_ids())
        self._most_token_characters = _most_token_characters(self._tokenizer, definition)

    def encode(self, text: str, tenant: str = "") -> list[int]:
        """The token ids of a text, as `encode_bytes` finds them."""
        return block_hash.token_ids(self.encode_bytes(text, tenant))

    def encode_bytes(self, text: str, tenant: str = "") -> bytes:
        """The token ids of a text in wire form: little-endian uint32.

        Control tokens in it are recognised, except across a MARK, which itself stands for nothing;
        none are added. Segments that this tenant has sent before are not tokenised again. Takes a
        second for each 3 MB of others, during which other threads run. Raises BadRequest for what
        cannot be tokenised within bounds.
        """
        return b"".join(self._segment_ids(text, tenant))

    def surely_exceeds(self, text: str, max_tokens: int, tenant: str = "") -> bool:
        """Whether a very long text has more tokens than that, found without encoding all of it.

        A refusal should not take as long as tokenising does.
        """
        num_characters = len(text) - text.count(MARK)
        if num_characters <= _USUAL_CHARACTERS_PER_TOKEN * max_tokens:
            return False
        if num_characters > self._most_token_characters * max_tokens:
            return True
        num_tokens = 0
        for num_more in self._counts(text, tenant):
            num_tokens += num_more
            if num_tokens > max_tokens:
                return True
        return False

    def detokenizer(self) -> Detokenizer:
        """A fresh incremental decoder for one answer."""
        return Detokenizer(self._token_bytes)

    def decode(self, token_ids: Sequence[int], *, skips_special: bool) -> str:
        """The text of token ids; control tokens are left out or stand by name.

        Raises BadRequest for an id outside the vocabulary.
        """
        size = len(self._token_bytes)
        for token_id in token_ids:
            if not 0 <= token_id < size:
                raise BadRequest(f"token id {token_id} is not in the vocabulary of {size}")
        spelled = self._token_bytes if skips_special else self._named_bytes
        return b"".join(spelled[token_id] for token_id in token_ids).decode(errors="replace")

    def token_text(self, token_id: int) -> str:
        """A token as a person reads it; control tokens by name."""
        return self._named_bytes[token_id].decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to an answer: a run of UTF-8 bytes, none for a control token."""
        return self._token_bytes[token_id]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> str:
        """The prompt text of a chat, up to where the assistant speaks unless an option denies that.

        A MARK stands in whatever would make a client's words a control token. Raises BadRequest
        when the template refuses the chat.
        """
        return self._template.render(*self._spellings.marked(messages, tools, options))

    def _segment_ids(self, text: str, tenant: str) -> Iterator[bytes]:
        for segment in self._cuts.segments(text):
            if len(segment) > _MAX_SEGMENT_CHARACTERS and self._cuts.is_possible:
                raise BadRequest(
                    f"a run of more than {_MAX_SEGMENT_CHARACTERS} characters has no place to split"
                    " it: no space between words, no digit beside a letter, no line's end"
                )
            yield self._cache.get(tenant, segment, self._encode)

    def _encode(self, text: str) -> bytes:
        check_wanted()
        # Of the ways to encode, `encode` alone keeps the interpreter's lock all the while.
        pieces = text.split(MARK)
        encodings = self._tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
        return b"".join(block_hash.token_bytes(encoding.ids) for encoding in encodings)

    def _counts(self, text: str, tenant: str) -> Iterator[int]:
        """Numbers of tokens that are certain, piece by piece."""
        if self._cuts.is_possible:
            yield from (len(ids) // 4 for ids in self._segment_ids(text, tenant))
            return
        for start in range(0, len(text), _PIECE_CHARACTERS):
            yield len(self._encode(text[start : start + _PIECE_CHARACTERS])) // 4 - _CUT_TOKENS

    def _silent_ids(self) -> set[int]:
        added = self._tokenizer.get_added_tokens_decoder()
        special = {token_id for token_id, token in added.items() if token.special}
        return special | set(self.checkpoint.stop_token_ids)

    def _read_token_bytes(self, silent: Iterable[int]) -> TokenBytes:
        added = self._tokenizer.get_added_tokens_decoder()
        size = max(self.checkpoint.vocab_size, self._tokenizer.get_vocab_size())
        return TokenBytes(
            [self._tokenizer.id_to_token(token_id) for token_id in range(size)],
            {token_id: token.content for token_id, token in added.items()},
            silent,
        )


def _most_token_characters(tokenizer: tokenizers.Tokenizer, definition: dict[str, Any]) -> float:
    """No token stands for more characters of a text; infinite where texts shrink beforehand."""
    is_shrinking = definition.get("normalizer") is not None or any(
        token.get("lstrip") or token.get("rstrip") for token in definition.get("added_tokens", ())
    )
    return float("inf") if is_shrinking else max(map(len, tokenizer.get_vocab()))
