"""Which processor an engine computes on, by the name an operator gives it, and whether it fits."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shared.errors import ConfigError


def find_device(name: str, ordinal: int = 0) -> torch.device:
    """`cpu`, or the CUDA device `cuda:N`, counted `ordinal` further.

    Raises ConfigError for another name, and for a device that is not there.
    """
    if name == "cpu":
        return torch.device("cpu")
    kind, _, number = name.partition(":")
    if kind != "cuda" or not (number.isascii() and number.isdecimal()):
        raise ConfigError(f"no device is called {name!r}: it is cpu or cuda:N")
    if not torch.cuda.is_available():
        raise ConfigError(f"{name} was asked for, and torch sees no CUDA device here")
    place = int(number) + ordinal
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
