"""What the request shapes of all APIs share: strict parsing, and refusals that name a field.

A body is parsed strictly: no type is converted, unknown fields are ignored, and fields that are
known but not served are refused by name unless they hold their default.
"""

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from services.gateway.dialects.bounds import refuse_endless
from services.gateway.dialects.structure import refuse_intricate
from services.gateway.failures import InvalidRequest, shortened

MAX_INT = 2**31 - 1
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1000
MAX_TOOLS = 1024

Count = Annotated[int, Field(ge=1, le=MAX_INT)]
ShapeT = TypeVar("ShapeT", bound=BaseModel)
Served = Mapping[str, tuple[object, ...]]  # known field -> its only served values; null always is


class Shape(BaseModel):
    """A part of a request."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)


def word_or(shape: Any, as_shape: Callable[[Any], Any]) -> BeforeValidator:
    """Text is taken for the shape that it stands for, and told of in the OpenAPI document.

    Unlike a union's, an error then names one thing only.
    """
    return BeforeValidator(as_shape, json_schema_input_type=str | shape)


def stop_list(stop: str | list[str] | None) -> tuple[str, ...]:
    """The stop strings."""
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def checked_stops(stop: str | list[str] | None) -> str | list[str] | None:
    """Stop strings as they came. Raises ValueError for too many, empty or too long ones."""
    stops = stop_list(stop)
    if len(stops) > MAX_STOPS:
        raise ValueError(f"at most {MAX_STOPS} stop strings")
    if not all(1 <= len(text) <= MAX_STOP_CHARACTERS for text in stops):
        raise ValueError(f"a stop string has 1 to {MAX_STOP_CHARACTERS} characters")
    return stop


def read_fields(body: bytes) -> dict[str, Any]:
    """The JSON object in a body, of bounded size. Raises InvalidRequest."""
    refuse_intricate(body)
    try:
        fields = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise InvalidRequest("the body must be a JSON object", code="invalid_type")
    refuse_endless(fields)
    return fields


def parse(shape: type[ShapeT], body: bytes, served: Served) -> ShapeT:
    """The request in a body. Raises InvalidRequest that names the parameter at fault."""
    fields = read_fields(body)
    refuse_unserved(served, fields)
    return validated(shape, fields)


def validated(shape: type[ShapeT], fields: dict[str, Any]) -> ShapeT:
    """The fields as a request. Raises InvalidRequest that names the parameter at fault."""
    try:
        return shape.model_validate(fields)
    except ValidationError as error:
        raise as_invalid(error) from None


def refuse_unserved(served: Served, fields: Mapping[str, Any]) -> None:
    """Raise InvalidRequest for a field that is known, not served, and not at a served value."""
    for name, values in served.items():
        value = fields.get(name)
        if value is not None and not any(_equals(value, allowed) for allowed in values):
            hint = f"; only {' or '.join(map(json.dumps, values))} is" if values else ""
            raise InvalidRequest(
                f"{name} is not supported{hint}", param=name, code="unsupported_value"
            )


def as_invalid(error: ValidationError) -> InvalidRequest:
    """The first thing that is wrong with a request."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    names = [shortened(str(part)) for part in first["loc"]]
    message = first["msg"].removeprefix("Value error, ")
    code = "missing_required_parameter" if first["type"] == "missing" else "invalid_value"
    where = f"{'.'.join(names)}: " if names else ""
    return InvalidRequest(where + message, param=names[0] if names else None, code=code)


def _equals(value: object, allowed: object) -> bool:
    """Equal as JSON values: true is not 1."""
    return isinstance(value, bool) == isinstance(allowed, bool) and value == allowed
