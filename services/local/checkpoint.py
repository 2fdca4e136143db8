"""Is this folder a model that the services can serve, as far as is cheap to see?

The services check the rest, when they load it; a wrong path is told before anything has started.
"""

import json
from pathlib import Path
from typing import Any

from shared.errors import ConfigError

_MODEL_TYPE = "glm_moe_dsa"
_FILES = ("tokenizer.json", "chat_template.jinja")


def require_servable(checkpoint: Path) -> None:
    """Raise ConfigError, saying what is wrong with it, if it is not."""
    if not checkpoint.is_dir():
        what = "is no folder" if checkpoint.exists() else "does not exist"
        raise ConfigError(f"the checkpoint {checkpoint} {what}: choose another with --checkpoint")
    model_type = _config(checkpoint / "config.json").get("model_type")
    if model_type != _MODEL_TYPE:
        raise ConfigError(
            f"the checkpoint {checkpoint} is a model of type {model_type!r}: only {_MODEL_TYPE!r}"
            " (GLM-5.3) is served"
        )
    missing = [name for name in _FILES if not (checkpoint / name).is_file()]
    if not any(checkpoint.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        raise ConfigError(f"the checkpoint {checkpoint} has no {' and no '.join(missing)}")


def _config(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the checkpoint's {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"the checkpoint's {path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"the checkpoint's {path} does not hold a JSON object")
    return content
