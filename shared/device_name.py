"""The names that settings give to processors: `cpu`, and `cuda:N`. Without torch, so that every
process can check one at once.
"""

import re

_NAME = re.compile(r"cpu|cuda:([0-9]+)")


def cuda_ordinal(name: str) -> int | None:
    """N of `cuda:N`, None of `cpu`; ValueError for another name."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"no device is called {name!r}: it is cpu or cuda:N")
    return None if match[1] is None else int(match[1])


def later_device(first: str, num_taken: int) -> str:
    """The device behind num_taken others; all share the CPU. ValueError as cuda_ordinal."""
    ordinal = cuda_ordinal(first)
    return first if ordinal is None else f"cuda:{ordinal + num_taken}"
