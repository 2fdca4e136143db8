"""What the gateway reads of a checkpoint besides its tokenizer: limits, stops, sampling.

Knows the Hugging Face file names; knows nothing of weights.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.errors import ConfigError
from shared.json_file import read_object


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
        stop_token_ids=_stop_token_ids(generation, config, directory),
        temperature=0.0 if is_greedy else float(generation.get("temperature", 1.0)),
        top_p=float(generation.get("top_p", 1.0)),
        top_k=int(generation.get("top_k", 0)),
    )


def _integer(config: dict[str, Any], name: str, directory: Path) -> int:
    value = config.get(name)
    if not isinstance(value, int):
        raise ConfigError(f"{directory / 'config.json'} has no integer {name}")
    return value


def _stop_token_ids(
    generation: dict[str, Any], config: dict[str, Any], directory: Path
) -> tuple[int, ...]:
    """generation_config.json wins, as in transformers."""
    found = generation.get("eos_token_id", config.get("eos_token_id"))
    ids = found if isinstance(found, list) else [found]
    if not ids or not all(isinstance(token_id, int) for token_id in ids):
        raise ConfigError(f"{directory} names no eos_token_id")
    return tuple(ids)
