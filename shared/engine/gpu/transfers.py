"""Small numbers on their way to the device; the host never waits for them."""

from contextlib import AbstractContextManager, nullcontext

import numpy as np
import numpy.typing as npt
import torch


def sent(numbers: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """The numbers on the device, in the order of its stream."""
    host = torch.from_numpy(numbers)
    if device.type == "cpu":
        return host.clone()
    # torch's own pinned memory: it is not handed out again before the copy is over.
    return host.pin_memory().to(device, non_blocking=True)


def on_device(device: torch.device) -> AbstractContextManager[None]:
    """Kernels are launched there inside the block."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
