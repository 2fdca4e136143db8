"""Which tokens end an answer by themselves: one reading of a checkpoint for gateway and workers."""

from pathlib import Path

from shared.errors import ConfigError
from shared.json_file import read_object


def stop_token_ids(directory: Path) -> tuple[int, ...]:
    """The checkpoint's eos_token_id; generation_config.json wins, as in transformers.

    Raises ConfigError if neither it nor config.json names one.
    """
    config = read_object(directory / "config.json")
    generation_path = directory / "generation_config.json"
    generation = read_object(generation_path) if generation_path.exists() else {}
    found = generation.get("eos_token_id", config.get("eos_token_id"))
    ids = found if isinstance(found, list) else [found]
    if not ids or not all(isinstance(token_id, int) for token_id in ids):
        raise ConfigError(f"{directory} names no eos_token_id")
    return tuple(ids)
