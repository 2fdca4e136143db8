"""Which processor an engine computes on, by the name an operator gives it, and whether it fits."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shared.device_name import cuda_ordinal
from shared.errors import ConfigError


def find_device(name: str, ordinal: int = 0) -> torch.device:
    """`cpu`, or the CUDA device `cuda:N`, counted `ordinal` further.

    Raises ConfigError for another name, and for a device that is not there.
    """
    try:
        first = cuda_ordinal(name)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if first is None:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(f"{name} was asked for, and torch sees no CUDA device here")
    place = first + ordinal
    if place >= torch.cuda.device_count():
        raise ConfigError(f"no cuda:{place} here: there are {torch.cuda.device_count()} devices")
    return torch.device("cuda", place)


@contextmanager
def fitting(what: str) -> Iterator[None]:
    """ConfigError for memory, of a device or of the host, that cannot be had inside the block."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # torch tells a host's refusal, and that of pinned memory, by its text alone.
        told = str(error)
        if isinstance(error, RuntimeError) and not any(
            words in told for words in ("out of memory", "can't allocate memory")
        ):
            raise
        raise ConfigError(f"{what} does not fit: {told.splitlines()[0]}") from error
