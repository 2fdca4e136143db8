import pytest

from shared.device_name import cuda_ordinal, later_device


def test_names_tell_the_cpu_and_the_number_of_a_gpu() -> None:
    assert cuda_ordinal("cpu") is None
    assert cuda_ordinal("cuda:12") == 12


@pytest.mark.parametrize(
    "name", ["", "gpu", "cuda", "cuda:", "cuda:x", "CUDA:0", "cuda:-1", "cpu:0"]
)
def test_any_other_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="it is cpu or cuda:N"):
        cuda_ordinal(name)


def test_gpus_are_counted_on_and_the_cpu_is_shared() -> None:
    assert later_device("cuda:1", 3) == "cuda:4"
    assert later_device("cpu", 3) == "cpu"
