"""Where an engine computes, and what does not fit there."""

import pytest
import torch

from shared.engine.devices import find_device, fitting
from shared.errors import ConfigError


@pytest.mark.parametrize(
    "name", ["gpu", "cuda", "cuda:", "cuda:x", "CUDA:0", "cuda:-1", "cuda:\u0663", ""]
)
def test_a_name_that_no_device_has_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"cpu or cuda:N"):
        find_device(name)


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no CUDA device|no cuda:9999"):
        find_device("cuda:9999")


def test_the_cpu_is_always_there() -> None:
    assert find_device("cpu", ordinal=3) == torch.device("cpu")


def test_memory_that_is_refused_is_a_wrong_setting() -> None:
    with pytest.raises(ConfigError, match="the pool does not fit"), fitting("the pool"):
        torch.empty(1 << 60, dtype=torch.uint8)
    with pytest.raises(ConfigError, match="the pool does not fit"), fitting("the pool"):
        raise MemoryError("no")


def test_any_other_error_stays_what_it_is() -> None:
    with pytest.raises(RuntimeError, match="shapes differ"), fitting("the pool"):
        raise RuntimeError("shapes differ")
