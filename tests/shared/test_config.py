from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from shared.config import load
from shared.errors import ConfigError


@dataclass(frozen=True)
class Settings:
    nats_url: str
    num_blocks: int = 64
    timeout_s: float = 1.5
    is_verbose: bool = False
    checkpoint: Path = Path("x")
    trace_file: Path | None = None
    names: tuple[str, ...] = ()
    kv_format: Literal["fp32", "fp8_ds_mla"] = "fp8_ds_mla"
    sizes: tuple[int, ...] = field(default_factory=tuple)

    def __post_init__(self) -> None:
        if self.num_blocks < 1:
            raise ValueError("num_blocks must be positive")


def load_with(**variables: str) -> Settings:
    environ = {"T_NATS_URL": "nats://n", "OTHER": "x", **variables}
    return load(Settings, environ, "T_")


def test_fields_come_from_variables_with_the_prefix() -> None:
    """Other variables are none of ours."""
    settings = load_with(
        T_NUM_BLOCKS="7",
        T_TIMEOUT_S="0.25",
        T_IS_VERBOSE="true",
        T_CHECKPOINT="/a/b",
        T_TRACE_FILE="/t",
        T_NAMES="a, b,,c",
        T_KV_FORMAT="fp32",
        T_SIZES="1,2",
    )

    assert settings == Settings(
        "nats://n", 7, 0.25, True, Path("/a/b"), Path("/t"), ("a", "b", "c"), "fp32", (1, 2)
    )


def test_absent_variables_leave_the_defaults() -> None:
    assert load_with() == Settings("nats://n")


def test_an_empty_optional_is_none() -> None:
    """Compose files write optional settings as empty strings."""
    assert load_with(T_TRACE_FILE="").trace_file is None


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("T_NUM_BLOCKS", "many", "int"),
        ("T_NUM_BLOCKS", "", "int"),
        ("T_NUM_BLOCKS", "1.5", "int"),
        ("T_TIMEOUT_S", "soon", "float"),
        ("T_TIMEOUT_S", "nan", "finite"),
        ("T_IS_VERBOSE", "yes", "true or false"),
        ("T_CHECKPOINT", "", "path"),
        ("T_KV_FORMAT", "fp16", "one of fp32, fp8_ds_mla"),
        ("T_SIZES", "1,x", "int"),
    ],
)
def test_an_unparsable_value_is_refused_by_name(name: str, text: str, expected: str) -> None:
    """A typing error must not become the default, and bool("false") must not be true."""
    with pytest.raises(ConfigError, match=f"{name}='{text}' is not .*{expected}"):
        load_with(**{name: text})


def test_an_unknown_name_is_refused() -> None:
    """A misspelt setting would otherwise be silently without effect."""
    with pytest.raises(ConfigError, match="T_NUM_BLOCK is not a setting"):
        load_with(T_NUM_BLOCK="7")


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(ConfigError, match=r"T_X is not a setting.*T_NATS_URL is missing"):
        load(Settings, {"T_X": "1"}, "T_")


def test_a_check_of_the_dataclass_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="num_blocks must be positive"):
        load_with(T_NUM_BLOCKS="0")


@dataclass(frozen=True)
class Inner:
    port: int = 1
    name: str = ""

    def __post_init__(self) -> None:
        if self.port < 0:
            raise ValueError("port must not be negative")


@dataclass(frozen=True)
class Outer:
    host: str
    link: Inner = Inner()


def test_a_dataclass_inside_takes_variables_of_its_own() -> None:
    assert load(Outer, {"T_HOST": "h", "T_LINK_PORT": "7"}, "T_") == Outer("h", Inner(7))
    assert load(Outer, {"T_HOST": "h"}, "T_") == Outer("h", Inner())


def test_what_is_wrong_inside_is_told_with_the_rest() -> None:
    environ = {"T_LINK_PORT": "x", "T_LINK_COLOUR": "red", "T_LINK": "?"}
    with pytest.raises(ConfigError) as refused:
        load(Outer, environ, "T_")

    told = str(refused.value)
    assert "T_LINK_PORT='x' is not int" in told
    assert "T_LINK_COLOUR is not a setting" in told
    assert "T_LINK is not a setting" in told
    assert "T_HOST is missing" in told
    with pytest.raises(ConfigError, match=r"T_LINK_\*: port must not be negative"):
        load(Outer, {"T_HOST": "h", "T_LINK_PORT": "-1"}, "T_")
