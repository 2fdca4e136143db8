"""Turns token ids into text as they arrive, without ever splitting a code point.

Knows byte-level BPE: each token is a run of bytes, and text is their UTF-8 decoding. Control
tokens and stop tokens have no text. The concatenation equals the tokenizer's own decoding of the
whole answer.
"""

import codecs
from collections.abc import Iterable, Sequence


def byte_alphabet() -> dict[str, int]:
    """The printable character for each byte of a byte-level vocabulary, as GPT-2 defined it."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return alphabet | {chr(256 + place): byte for place, byte in enumerate(others)}


class TokenBytes:
    """The bytes of every token of a vocabulary; built once, shared by all requests.

    `texts` are those of tokens that hold whole code points only, else None.
    """

    def __init__(
        self, tokens: Sequence[str | None], added: dict[int, str], silent: Iterable[int]
    ) -> None:
        alphabet = byte_alphabet()
        self._bytes = [_bytes_of(token, alphabet) for token in tokens]
        for token_id, content in added.items():
            self._bytes[token_id] = content.encode()
        for token_id in silent:
            self._bytes[token_id] = b""
        # Of tokens that are whole code points: nearly all of any answer.
        self.texts = [_whole_text(data) for data in self._bytes]

    def __getitem__(self, token_id: int) -> bytes:
        return self._bytes[token_id]

    def __len__(self) -> int:
        return len(self._bytes)


class Detokenizer:
    """One answer's text; holds at most the three bytes of an unfinished code point."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_between = True  # no code point is unfinished

    def feed(self, token_id: int) -> str:
        """The text that is complete after this token."""
        text = self._token_bytes.texts[token_id]
        if text is not None and self._is_between:
            return text
        text = self._decoder.decode(self._token_bytes[token_id])
        self._is_between = not self._decoder.getstate()[0]
        return text

    def flush(self) -> str:
        """A replacement character when the answer ended inside a code point, else nothing."""
        return self._decoder.decode(b"", final=True)


def _whole_text(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _bytes_of(token: str | None, alphabet: dict[str, int]) -> bytes:
    if token is None:  # ids between the vocabulary and the padded embedding have no text
        return b""
    if all(character in alphabet for character in token):
        return bytes(alphabet[character] for character in token)
    return token.encode()
