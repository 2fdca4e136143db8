"""A checkpoint's chat template: conversations to prompt text.

The only module that knows jinja2. The template is the checkpoint's own program, so it runs in an
immutable sandbox; what clients give it is data.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from services.gateway.text.spellings import MARK
from shared.errors import BadRequest, ConfigError

# What a template meets when values have not the types that it was written for.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    AttributeError,
    ValueError,
    LookupError,
    ArithmeticError,
    RecursionError,
)
_NO_ASCII = re.compile(rf"[^\x00-\x7f{MARK}]")


class Template:
    """One checkpoint's; safe to use from several threads."""

    def __init__(self, directory: Path) -> None:
        """Load from a checkpoint directory. Raises ConfigError for what is missing or broken."""
        # The environment that transformers gives templates.
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        path = directory / "chat_template.jinja"
        try:
            self._template = environment.from_string(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"{path} line {error.lineno}: {error.message}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> str:
        """The prompt text of a chat, up to where the assistant speaks unless an option denies that.

        Raises BadRequest when the template refuses the chat.
        """
        given = {"add_generation_prompt": True, **options, "messages": messages, "tools": tools}
        try:
            return self._template.render(given)
        except _TEMPLATE_ERRORS as error:
            told = str(error).replace(MARK, "")
            raise BadRequest(f"the chat template cannot render these messages: {told}") from error


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    """jinja2's own filter escapes for HTML, which a prompt must not have; marks stay marks."""
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    return _NO_ASCII.sub(_escaped, text) if ensure_ascii else text


def _escaped(found: re.Match[str]) -> str:
    return json.dumps(found[0])[1:-1]


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
