"""Is this folder a model that the services can serve, as far as is cheap to see?

The services check the rest, when they load it; a wrong path is told before anything has started.
"""

from pathlib import Path

from shared.errors import ConfigError
from shared.json_file import read_object

_MODEL_TYPE = "glm_moe_dsa"
_FILES = ("tokenizer.json", "chat_template.jinja")


def require_servable(checkpoint: Path) -> None:
    """Raise ConfigError, saying what is wrong with it, if it is not."""
    if not checkpoint.is_dir():
        what = "is no folder" if checkpoint.exists() else "does not exist"
        raise ConfigError(f"the checkpoint {checkpoint} {what}: choose another with --checkpoint")
    model_type = read_object(checkpoint / "config.json").get("model_type")
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
