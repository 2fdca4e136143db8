"""docs/api.md tells of every field that the gateway knows."""

import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from services.gateway.dialects import chat, completions, messages, responses, texting
from services.gateway.dialects.shapes import Served

DOCUMENT = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
DRAWING = "Drawing"
TEXTING = "POST /tokenize, POST /detokenize, GET /tokenizer_info"


def words(*headings: str) -> set[str]:
    """Every name that stands in code spans below these headings."""
    sections = re.split(r"^## ", DOCUMENT, flags=re.MULTILINE)
    found = [text for text in sections if text.partition("\n")[0] in headings]
    assert len(found) == len(headings)
    spans = re.findall(r"`([^`]+)`", "\n".join(found))
    return {name for span in spans for name in re.findall(r"[A-Za-z_]+", span)}


def names(shape: type[BaseModel]) -> Iterator[str]:
    """The names of a shape's fields, and of those within, as clients write them."""
    waiting, seen = [shape], {shape}
    while waiting:
        for name, field in waiting.pop().model_fields.items():
            yield field.alias or name
            for inner in shapes_in(field.annotation):
                if inner not in seen:
                    seen.add(inner)
                    waiting.append(inner)


def shapes_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from shapes_in(argument)


@pytest.mark.parametrize(
    ("shape", "served", "headings"),
    [
        (chat.ChatRequest, chat.SERVED, (DRAWING, "POST /v1/chat/completions")),
        (completions.CompletionRequest, completions.SERVED, (DRAWING, "POST /v1/completions")),
        (responses.ResponsesRequest, responses.SERVED, ("POST /v1/responses",)),
        (messages.MessagesRequest, messages.SERVED, ("POST /v1/messages",)),
        (texting.TokenizeRequest, texting.TOKENIZE_SERVED, (TEXTING, "POST /v1/chat/completions")),
        (texting.DetokenizeRequest, {}, (TEXTING,)),
    ],
)
def test_every_field_is_named(
    shape: type[BaseModel], served: Served, headings: tuple[str, ...]
) -> None:
    """Those that are served, those that are ignored, and those that are refused."""
    missing = ({*names(shape), *served}) - words(*headings)

    assert not missing


def test_a_count_s_own_fields_are_named() -> None:
    """What lies within them is told at messages."""
    fields = set(messages.CountRequest.model_fields)

    assert fields <= words("POST /v1/messages/count_tokens")
