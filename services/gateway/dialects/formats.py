"""What clients may demand of an answer's form: response_format, and vLLM's structured_outputs."""

from typing import Annotated, Any

from pydantic import Field
from pydantic_core import from_json

from services.gateway.ask import Form, JsonObject, JsonSchema, Lark, OneOf, Regex
from services.gateway.dialects.shapes import Shape
from services.gateway.dialects.structure import refuse_intricate
from services.gateway.failures import InvalidRequest


class NamedSchema(Shape):
    """What response_format calls json_schema."""

    name: Annotated[str, Field(max_length=256)] | None = None
    json_schema: Annotated[dict[str, Any] | bool | None, Field(alias="schema")] = None


class ResponseFormat(Shape):
    """What the answer proper must be."""

    type: str
    json_schema: NamedSchema | None = None

    def form(self) -> Form | None:
        """None for any text. Raises InvalidRequest for a type that is not served."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return JsonObject()
        if self.type == "json_schema":
            if self.json_schema is None or self.json_schema.json_schema is None:
                raise _invalid_format("response_format.json_schema.schema is missing")
            return JsonSchema(self.json_schema.json_schema)
        raise _invalid_format(
            f"response_format.type {self.type!r} is not supported; only text, json_object and"
            " json_schema are"
        )


class StructuredOutputs(Shape):
    """vLLM's way to name a grammar; one of these."""

    json_: Annotated[dict[str, Any] | bool | str | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None

    def form(self) -> Form | None:
        """Raises InvalidRequest when several are given."""
        found: list[Form] = []
        if self.json_ is not None:
            found.append(JsonSchema(_schema(self.json_)))
        if self.json_object:
            found.append(JsonObject())
        if self.regex is not None:
            found.append(Regex(self.regex))
        if self.choice is not None:
            found.append(OneOf(tuple(self.choice)))
        if self.grammar is not None:
            found.append(Lark(self.grammar))
        if len(found) > 1:
            raise InvalidRequest(
                "structured_outputs: only one of json, json_object, regex, choice and grammar",
                param="structured_outputs",
                code="invalid_value",
            )
        return found[0] if found else None


def _invalid_format(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="response_format", code="invalid_value")


def _schema(given: dict[str, Any] | bool | str) -> Any:
    """A schema; vLLM's clients may send it as JSON text."""
    if not isinstance(given, str):
        return given
    refuse_intricate(given.encode(), "structured_outputs.json", "structured_outputs")
    try:
        return from_json(given, allow_inf_nan=False)
    except ValueError:
        raise InvalidRequest(
            "structured_outputs.json is not JSON", param="structured_outputs", code="invalid_value"
        ) from None
