"""A checkpoint's text side: text to token ids, chats to prompt text, token ids to text.

The only module that knows `tokenizers` and jinja2. The chat template is the checkpoint's own
program, so it runs in an immutable sandbox. Knows nothing of HTTP.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers

from services.gateway.text.checkpoint import Checkpoint, read_checkpoint
from services.gateway.text.detokenizer import Detokenizer, TokenBytes
from shared.errors import BadRequest, ConfigError
from shared.json_file import read_object

_USUAL_CHARACTERS_PER_TOKEN = 4  # texts below this are encoded once, in full
_PIECE_CHARACTERS = 1 << 16
_CUT_TOKENS = 64  # more than a cut in the middle of a word can add


class Tokenizer:
    """Text and token ids of one checkpoint; safe to use from several threads."""

    def __init__(self, directory: Path) -> None:
        """Load from a checkpoint directory. Raises ConfigError naming what is missing."""
        self.checkpoint: Checkpoint = read_checkpoint(directory)
        path = directory / "tokenizer.json"
        definition = read_object(path)
        decoder = definition.get("decoder") or {}
        if decoder.get("type") != "ByteLevel":
            raise ConfigError(
                f"{path} is not byte-level (decoder {decoder.get('type')}), the only kind supported"
            )
        self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        self._template = _load_template(directory)
        self._token_bytes = self._read_token_bytes()
        self._most_token_characters = _most_token_characters(self._tokenizer, definition)

    def encode(self, text: str) -> list[int]:
        """The token ids of a text; control tokens in it are recognised, none are added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def surely_exceeds(self, text: str, max_tokens: int) -> bool:
        """Whether a very long text has more tokens than that, found without encoding all of it.

        Encoding runs at about a megabyte a second, and a refusal should not take that long.
        """
        if len(text) <= _USUAL_CHARACTERS_PER_TOKEN * max_tokens:
            return False
        if len(text) > self._most_token_characters * max_tokens:
            return True
        num_tokens = 0
        for start in range(0, len(text), _PIECE_CHARACTERS):
            num_tokens += len(self.encode(text[start : start + _PIECE_CHARACTERS])) - _CUT_TOKENS
            if num_tokens > max_tokens:
                return True
        return False

    def detokenizer(self) -> Detokenizer:
        """A fresh incremental decoder for one answer."""
        return Detokenizer(self._token_bytes)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> str:
        """The prompt text of a chat, up to where the assistant speaks.

        Raises BadRequest when the template refuses the chat.
        """
        given = {**options, "messages": messages, "tools": tools, "add_generation_prompt": True}
        try:
            return self._template.render(given)
        except (jinja2.TemplateError, TypeError, AttributeError) as error:
            raise BadRequest(f"the chat template cannot render these messages: {error}") from error

    def _read_token_bytes(self) -> TokenBytes:
        added = self._tokenizer.get_added_tokens_decoder()
        silent = {token_id for token_id, token in added.items() if token.special}
        silent.update(self.checkpoint.stop_token_ids)
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


def _load_template(directory: Path) -> jinja2.Template:
    """The chat template, in the environment that transformers gives templates."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    path = directory / "chat_template.jinja"
    try:
        return environment.from_string(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"{path} line {error.lineno}: {error.message}") from error


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    """jinja2's own filter escapes for HTML, which a prompt must not have."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
