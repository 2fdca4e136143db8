"""What an answer's text must be, as masks over tokens: the only module that knows llguidance.

Loads neither torch nor numpy, so that the gateway can refuse a grammar before any worker sees it.
"""

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import llguidance

from shared import stop_tokens
from shared.errors import BadRequest, ConfigError
from shared.json_file import read_object

MAX_GRAMMAR_CHARACTERS = 1 << 18

# A mask is made between two steps of everybody: within the library's own bounds it may take a
# second, within these some 50 ms; schemas with 1,500 properties have room.
_LIMITS = llguidance.LLParserLimits(
    max_items_in_row=2000,
    initial_lexer_fuel=100_000,  # compiles within half a second; with a million it took up to 110 s
    step_lexer_fuel=100_000,
    step_max_items=5_000,
    max_lexer_states=50_000,
    max_grammar_size=20_000,
    verbose_errors=False,  # else an error tells what was written so far
)
# The library compiles by recursion without a bound for depth: an overflow would end the process.
# No grammar of the characters allowed goes deeper than this holds; what is not used costs nothing.
_STACK_BYTES = 1 << 30
_SILENT = 0
_LONGEST_REASON = 300

T = TypeVar("T")
_starting = threading.Lock()


def check(lark: str) -> None:
    """Raise BadRequest, with the reason, for a grammar that no worker could use.

    Takes up to a second, mostly without the interpreter's lock.
    """
    _refuse_long(lark)
    reason = _deep_down(lambda: llguidance.LLMatcher.validate_grammar(lark, None, limits=_LIMITS))
    if reason:
        raise BadRequest(f"the grammar cannot be used: {_in_one_line(reason)}")


class Vocabulary:
    """The tokens of one checkpoint; for several threads.

    The first grammar makes the library's view of them, which takes about 2 s and 200 MB for
    150,000 tokens: a worker that is never asked for a grammar does not pay.
    """

    def __init__(self, directory: Path, size: int) -> None:
        """`size` is the model's, which may have ids that no token has."""
        self.size = size
        self._directory = directory
        self._making = threading.Lock()
        self._made: _Tokens | None = None

    def constraint(self, lark: str, answer: Sequence[int] = ()) -> "Constraint":
        """A new answer's, of which the tokens given are there already.

        Raises BadRequest for a grammar that cannot be used or does not fit them.
        """
        constraint = Constraint(lark, self._tokens())
        for token_id in answer:
            constraint.accept(token_id)
        return constraint

    def _tokens(self) -> "_Tokens":
        with self._making:
            if self._made is None:
                self._made = _Tokens(self._directory, self.size)
            return self._made


class Constraint:
    """One answer's place in its grammar. Used by one thread at a time."""

    def __init__(self, lark: str, tokens: "_Tokens") -> None:
        _refuse_long(lark)
        self.is_over = False  # a stop token was accepted
        self._tokens = tokens
        self._next: bytes | None
        self._matcher, self._next = _deep_down(lambda: _begun(tokens, lark))
        self._check("the grammar cannot be used")

    @property
    def is_complete(self) -> bool:
        """Whether the text may end here."""
        return bool(self._matcher.is_accepting())

    def mask(self, unwanted: Sequence[int] = ()) -> bytes:
        """The tokens that may come next: bit i % 8 of byte i // 8 stands for token i.

        The unwanted ones are among them only if nothing else is: a text that is complete must end.
        Raises BadRequest when there is none at all, or when they cannot be found within bounds.
        """
        found = self._next or self._matcher.compute_bitmask()
        self._next = None
        # In its error state the library allows a stop, which would pass a part for the whole.
        self._check("the grammar became too complex")
        allowed = int.from_bytes(found, "little") & self._tokens.usable
        wanted = allowed & ~sum(1 << token_id for token_id in set(unwanted))
        if not allowed:
            raise BadRequest("the grammar allows no token here")
        return (wanted or allowed).to_bytes(self._tokens.num_mask_bytes, "little")

    def accept(self, token_id: int) -> None:
        """The text goes on with this token. Raises BadRequest if it must not."""
        if self.is_over:
            raise BadRequest("the text had ended before its last token")
        if self._tokens.stops >> token_id & 1:
            if not self.is_complete:
                raise BadRequest("the text ended before its grammar was complete")
            self.is_over = True
            return
        self._next = None
        self._matcher.consume_token(token_id)
        self._check("the text does not fit its grammar")

    def _check(self, what: str) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error().strip()[:_LONGEST_REASON]
            raise BadRequest(f"{what}: {reason}")


def _begun(tokens: "_Tokens", lark: str) -> tuple[llguidance.LLMatcher, bytes]:
    """A matcher with its first mask: of many alternatives that takes long, and no step may wait."""
    matcher = llguidance.LLMatcher(tokens.known, lark, log_level=_SILENT, limits=_LIMITS)
    return matcher, b"" if matcher.is_error() else matcher.compute_bitmask()


def _deep_down(work: Callable[[], T]) -> T:
    """What `work` gives, on a thread with room for deep recursion."""
    found: Future[T] = Future()

    def run() -> None:
        try:
            found.set_result(work())
        except BaseException as error:
            found.set_exception(error)

    with _starting:  # the size is the whole process's, for threads that start
        usual_bytes = threading.stack_size(_STACK_BYTES)
        try:
            thread = threading.Thread(target=run, name="grammar")
            thread.start()
        finally:
            threading.stack_size(usual_bytes)
    thread.join()
    return found.result()


def _refuse_long(lark: str) -> None:
    if len(lark) > MAX_GRAMMAR_CHARACTERS:
        raise BadRequest(f"a grammar has at most {MAX_GRAMMAR_CHARACTERS} characters")


def _in_one_line(reason: str) -> str:
    return " ".join(reason.split())[:_LONGEST_REASON]


class _Tokens:
    """What the library knows of a vocabulary, and what it must not allow."""

    def __init__(self, directory: Path, size: int) -> None:
        path = directory / "tokenizer.json"
        stops = stop_tokens.stop_token_ids(directory)
        spelling = _Spelling(path, size, stops)
        wrapped = llguidance.TokenizerWrapper(spelling)
        self.known = llguidance.LLTokenizer(wrapped, n_vocab=size, eos_token=list(stops))
        self.num_mask_bytes = -(-size // 8)
        self.stops = sum(1 << token_id for token_id in set(stops))
        named = sum(1 << token_id for token_id, text in enumerate(spelling.tokens) if text)
        control = sum(1 << token_id for token_id in spelling.special_token_ids)
        # A grammar may name a control token; in an answer it would end a turn or begin another.
        self.usable = named & ~control | self.stops


class _Spelling:
    """What llguidance.TokenizerWrapper asks for, from a tokenizer.json that says itself which of
    its added tokens are control tokens.

    The library alone takes `<think>` for one, and a text that has it would then fit no grammar.
    """

    bos_token_id = None

    def __init__(self, path: Path, size: int, stops: Sequence[int]) -> None:
        definition = read_object(path)
        if (definition.get("decoder") or {}).get("type") != "ByteLevel":
            raise ConfigError(f"{path} is not byte-level, the only kind that grammars know")
        self.eos_token_id = stops[0]
        self.special_token_ids: list[int] = []
        added_tokens = definition.get("added_tokens", [])
        ids = [*definition["model"]["vocab"].values(), *(added["id"] for added in added_tokens)]
        if max(ids) >= size:
            raise ConfigError(f"{path} has token {max(ids)}, the model {size} tokens")
        self.tokens = [b""] * size
        byte_of = _bytes_of_characters()
        for text, token_id in definition["model"]["vocab"].items():
            self.tokens[token_id] = bytes(byte_of[character] for character in text)
        for added in added_tokens:
            self.tokens[added["id"]] = added["content"].encode()
            if added["special"]:
                self.special_token_ids.append(added["id"])
        self._encoder = llguidance.LLTokenizer(
            json.dumps(definition), n_vocab=size, eos_token=list(stops)
        )

    def __call__(self, text: bytes | str) -> list[int]:
        """The usual tokens of a text: where only one text can follow, they are what is allowed."""
        if isinstance(text, bytes):
            return self._encoder.tokenize_bytes(text, parse_special=True)
        return self._encoder.tokenize_str(text, parse_special=True)


def _bytes_of_characters() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for: printable Latin-1 for
    itself, the others for those from 256 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    found = {chr(byte): byte for byte in printable}
    return found | {chr(256 + place): byte for place, byte in enumerate(others)}
