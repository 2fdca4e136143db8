"""Settings: a frozen dataclass read from the environment, strictly.

Knows field types and variable names; knows no service. Every problem is found before anything
starts, and all problems are reported at once.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from shared.errors import ConfigError

T = TypeVar("T")


def load(cls: type[T], environ: Mapping[str, str], prefix: str) -> T:
    """A `cls` whose field `x_y` comes from the variable `<prefix>X_Y`, or from the field's default.

    A field that is a dataclass takes its own fields from `<prefix>X_Y_<FIELD>`. Raises ConfigError
    that names each unknown, missing or unparsable variable.
    """
    if not dataclasses.is_dataclass(cls):
        raise TypeError(f"{cls.__name__} is not a dataclass")
    known = _names(cls, prefix)
    problems = [
        f"{name} is not a setting"
        for name in sorted(environ)
        if name.startswith(prefix) and name not in known
    ]
    value = _read(cls, environ, prefix, problems)
    if value is None:
        raise ConfigError("; ".join(problems))
    return value


def _names(cls: Any, prefix: str) -> set[str]:
    """Every variable that is read."""
    names: set[str] = set()
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        name = prefix + field.name.upper()
        hint = hints[field.name]
        names |= _names(hint, f"{name}_") if dataclasses.is_dataclass(hint) else {name}
    return names


def _read(cls: type[T], environ: Mapping[str, str], prefix: str, problems: list[str]) -> T | None:
    """A `cls`, or None when there are problems, which are added to those known."""
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]  # `load` saw a dataclass
        name, hint = prefix + field.name.upper(), hints[field.name]
        if dataclasses.is_dataclass(hint):
            values[field.name] = _read(typing.cast(type, hint), environ, f"{name}_", problems)
        elif name in environ:
            try:
                values[field.name] = _parse(hint, environ[name])
            except ValueError as error:
                problems.append(f"{name}={environ[name]!r} is not {error}")
        elif _is_required(field):
            problems.append(f"{name} is missing")
    if problems:
        return None
    try:
        return cls(**values)
    except ValueError as error:  # a check in the dataclass's own __post_init__
        problems.append(f"{prefix}*: {error}")
        return None


def _is_required(field: "dataclasses.Field[Any]") -> bool:
    missing = dataclasses.MISSING
    return field.default is missing and field.default_factory is missing


def _parse(hint: Any, text: str) -> object:
    """The value `text` stands for; raises ValueError whose text says what was expected."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        (inner,) = (argument for argument in arguments if argument is not types.NoneType)
        return None if text == "" else _parse(inner, text)
    if origin is tuple:
        parts = (part.strip() for part in text.split(","))
        return tuple(_parse(arguments[0], part) for part in parts if part)
    if origin is typing.Literal:
        if text not in arguments:
            raise ValueError("one of " + ", ".join(arguments))
        return text
    return _SCALARS[hint](text)


def _bool(text: str) -> bool:
    words = {"true": True, "1": True, "false": False, "0": False}
    if text.lower() not in words:
        raise ValueError("true or false")
    return words[text.lower()]


def _int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("int") from None


def _float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError("float") from None
    if not math.isfinite(value):
        raise ValueError("a finite float")
    return value


def _path(text: str) -> Path:
    if not text:
        raise ValueError("a path")
    return Path(text)


_SCALARS: dict[object, Callable[[str], object]] = {
    str: str,
    int: _int,
    float: _float,
    bool: _bool,
    Path: _path,
}
