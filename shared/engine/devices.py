"""Which processor an engine computes on, by the name an operator gives it."""

import torch

from shared.errors import ConfigError


def find_device(name: str, ordinal: int = 0) -> torch.device:
    """`cpu`, or the CUDA device `cuda:N`, counted `ordinal` further.

    Raises ConfigError for another name, and for a device that is not there.
    """
    if name == "cpu":
        return torch.device("cpu")
    kind, _, number = name.partition(":")
    if kind != "cuda" or not number.isdecimal():
        raise ConfigError(f"no device is called {name!r}: it is cpu or cuda:N")
    if not torch.cuda.is_available():
        raise ConfigError(f"{name} was asked for, and torch sees no CUDA device here")
    place = int(number) + ordinal
    if place >= torch.cuda.device_count():
        raise ConfigError(f"no cuda:{place} here: there are {torch.cuda.device_count()} devices")
    return torch.device("cuda", place)
