"""What the gateway reads of a checkpoint besides its tokenizer: limits, stops, sampling.

Knows the Hugging Face file names; knows nothing of weights.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.errors import ConfigError
from shared.json_file import read_object
from shared.stop_tokens import stop_token_ids


@dataclass(frozen=True)
class Checkpoint:
    """The settings of a model that shape requests."""

    max_context_tokens: int
    vocab_size: int
    stop_token_ids: tuple[int, ...]
    temperature: float
    top_p: float
    top_k: int


def read_checkpoint(directory: Path) -> Checkpoint:
    """The checkpoint's settings. Raises ConfigError naming the file or field that is missing."""
    config = read_object(directory / "config.json")
    generation_path = directory / "generation_config.json"
    generation = read_object(generation_path) if generation_path.exists() else {}
    is_greedy = generation.get("do_sample") is False
    return Checkpoint(
        max_context_tokens=_integer(config, "max_position_embeddings", directory),
        vocab_size=_integer(config, "vocab_size", directory),
        stop_token_ids=stop_token_ids(directory),
        temperature=0.0 if is_greedy else float(generation.get("temperature", 1.0)),
        top_p=float(generation.get("top_p", 1.0)),
        top_k=int(generation.get("top_k", 0)),
    )


def _integer(config: dict[str, Any], name: str, directory: Path) -> int:
    value = config.get(name)
    if not isinstance(value, int):
        raise ConfigError(f"{directory / 'config.json'} has no integer {name}")
    return value
