"""Memory is given out holding what was there before: for tests, bytes that are NaN in any type."""

import pytest
import torch


def poison_new_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch.Tensor.new_empty returns holds 0xFF bytes until the test ends."""
    new_empty = torch.Tensor.new_empty

    def poisoned(tensor: torch.Tensor, *args: object, **options: object) -> torch.Tensor:
        made = new_empty(tensor, *args, **options)  # type: ignore[call-overload]
        made.view(torch.uint8).fill_(0xFF)
        return made

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
