import json
from pathlib import Path

import pytest

from services.local.checkpoint import require_servable
from services.local.plan import Options
from shared.errors import ConfigError


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder with all that is looked at."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "glm_moe_dsa"}))
    for name in ("tokenizer.json", "chat_template.jinja", "model-00001-of-00001.safetensors"):
        (tmp_path / name).touch()
    return tmp_path


def refusal(checkpoint: Path) -> str:
    with pytest.raises(ConfigError) as raised:
        require_servable(checkpoint)
    (line,) = str(raised.value).splitlines()
    assert str(checkpoint) in line
    return line


def test_the_bundled_checkpoint_can_be_served() -> None:
    require_servable(Options().checkpoint)


def test_a_path_that_leads_nowhere_is_refused(tmp_path: Path) -> None:
    """A typing error, most of the time."""
    assert "does not exist" in refusal(tmp_path / "nothing")

    (tmp_path / "file").touch()
    assert "is no folder" in refusal(tmp_path / "file")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        pytest.param(None, "config.json: No such file", id="none"),
        pytest.param(b'{"model_type": ', "config.json is not valid JSON", id="cut off"),
        pytest.param(b"\xff\xfe", "config.json is not valid JSON", id="not text"),
        pytest.param(b"[]", "config.json does not hold a JSON object", id="no object"),
        pytest.param(b'{"model_type": "llama"}', "of type 'llama'", id="another model"),
        pytest.param(b"{}", "of type None", id="no model"),
    ],
)
def test_a_config_that_is_not_ours_is_refused(
    checkpoint: Path, content: bytes | None, said: str
) -> None:
    path = checkpoint / "config.json"
    path.unlink() if content is None else path.write_bytes(content)

    assert said in refusal(checkpoint)


def test_missing_files_are_all_named(checkpoint: Path) -> None:
    """A download that was cut off."""
    (checkpoint / "tokenizer.json").unlink()
    (checkpoint / "model-00001-of-00001.safetensors").unlink()

    assert refusal(checkpoint).endswith("has no tokenizer.json and no *.safetensors")
