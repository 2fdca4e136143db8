"""Small numbers on their way to the device; the host never waits for them."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch

from shared.errors import WorkerLost


def sent(numbers: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """The numbers on the device, in the order of its stream."""
    host = torch.from_numpy(numbers)
    if device.type == "cpu":
        return host.clone()
    # torch's own pinned memory: it is not handed out again before the copy is over.
    return host.pin_memory().to(device, non_blocking=True)


@contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Kernels are launched there inside the block.

    WorkerLost for a device that can compute nothing any more: after most of its errors nothing else
    works in this process.
    """
    if device.type == "cpu":
        yield
        return
    try:
        with torch.cuda.device(device):  # a setting of each thread
            yield
    except torch.AcceleratorError as error:
        raise WorkerLost(f"{device} is lost: {error}") from error
