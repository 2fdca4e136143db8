"""A wrong setting is found before anything is loaded."""

import re
from pathlib import Path

import pytest

from services.prefill.config import PrefillConfig
from shared.config import load
from shared.errors import ConfigError

LEAST = {
    "PREFILL_NATS_URL": "nats://127.0.0.1:1",
    "PREFILL_CHECKPOINT": "/checkpoint",
    "PREFILL_MODEL": "demo",
}


def test_a_scaled_service_gets_an_id_from_its_host() -> None:
    config = load(PrefillConfig, LEAST, "PREFILL_")

    assert re.fullmatch(r"[A-Za-z0-9_-]+", config.worker_id)
    assert config.rank_settings(7).checkpoint == Path("/checkpoint")


def test_ranks_share_the_cores() -> None:
    """And each has at least one, however many ranks there are."""
    config = load(PrefillConfig, {**LEAST, "PREFILL_RANKS": "1000"}, "PREFILL_")

    assert config.rank_settings(7).num_threads == 1


def test_ranks_are_told_their_first_device() -> None:
    """The CPU, unless a GPU is named."""
    on_gpus = load(PrefillConfig, {**LEAST, "PREFILL_DEVICE": "cuda:2"}, "PREFILL_")

    assert load(PrefillConfig, LEAST, "PREFILL_").rank_settings(7).device == "cpu"
    assert on_gpus.rank_settings(7).device == "cuda:2"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WORKER_ID", "a.b"),
        ("RANKS", "0"),
        ("DEVICE", "gpu"),
        ("DEVICE", "cuda"),
        ("INTERLEAVE", "48"),
        ("LEASE_S", "0"),
        ("NUM_BLOCKS", "-1"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match="PREFILL_"):
        load(PrefillConfig, {**LEAST, f"PREFILL_{name}": value}, "PREFILL_")
