"""Gateway and workers must agree on what ends an answer."""

from pathlib import Path

import pytest

from shared.errors import ConfigError
from shared.stop_tokens import stop_token_ids


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        pytest.param('{"eos_token_id": 1}', None, (1,), id="one"),
        pytest.param('{"eos_token_id": [1, 2]}', "{}", (1, 2), id="several"),
        pytest.param('{"eos_token_id": 1}', '{"eos_token_id": [3]}', (3,), id="generation-config"),
    ],
)
def test_generation_config_wins(
    tmp_path: Path, config: str, generation: str | None, expected: tuple[int, ...]
) -> None:
    (tmp_path / "config.json").write_text(config)
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(generation)

    assert stop_token_ids(tmp_path) == expected


@pytest.mark.parametrize("config", ["{}", '{"eos_token_id": []}', '{"eos_token_id": ["a"]}'])
def test_a_checkpoint_without_any_is_refused(tmp_path: Path, config: str) -> None:
    """Its answers would never end by themselves."""
    (tmp_path / "config.json").write_text(config)

    with pytest.raises(ConfigError, match="eos_token_id"):
        stop_token_ids(tmp_path)
