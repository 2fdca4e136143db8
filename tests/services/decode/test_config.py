"""The settings of a decode worker."""

import pytest

from services.decode.config import DecodeConfig
from shared.config import load
from shared.errors import ConfigError

NEEDED = {"DECODE_NATS_URL": "nats://n:4222", "DECODE_CHECKPOINT": "/models/demo"}


def test_two_settings_are_enough() -> None:
    config = load(DecodeConfig, NEEDED, "DECODE_")

    assert config.model_name == "demo"


@pytest.mark.parametrize(
    ("name", "value"),
    [("WORKER_ID", "a.b"), ("RESIDENCY", "somewhere"), ("DRAIN_S", "0"), ("MAX_CONCURRENT", "-1")],
)
def test_a_wrong_setting_is_named(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name.lower()):
        load(DecodeConfig, {**NEEDED, f"DECODE_{name}": value}, "DECODE_")
