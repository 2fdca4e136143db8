"""The JSON files of a checkpoint."""

import json
from pathlib import Path
from typing import Any

from shared.errors import ConfigError


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ConfigError naming the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} does not hold a JSON object")
    return content
