"""The model card's own engine (checkpoints/eval.py), keeping what the FP8 KV format would keep.

Independent of shared/engine: its model, its cache and its rounding are others' code. Slow, but a
context of 32,768 tokens is possible, which tests/oracles/slow_reference.py could not do.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from tests.oracles.slow_quantiser import nearest, scales_of
from tests.oracles.transformers_oracle import dequantised_state

Round = Callable[[torch.Tensor], torch.Tensor]
_E4M3, _BF16 = (3, -6), (7, -126)  # mantissa bits, least exponent
_TILE = 128
_CHUNK_TOKENS = 128  # 32 heads of scores of 128 x 32,768 in fp32 are 0.5 GB


class CardEngine:
    """One sequence that is continued from its first tokens."""

    def __init__(self, checkpoint: Path, max_tokens: int) -> None:
        folder = str(checkpoint.parent)
        if folder not in sys.path:
            sys.path.insert(0, folder)  # the scripts import each other by bare name
        import eval as card
        import train_demo

        self._model = _load(train_demo, checkpoint)
        self._engine = card.Engine(self._model, max_tokens)
        latent_rank = train_demo.C["r"]
        engine = self._engine
        engine.lat = [_Rows(rows, lambda x: _round_row(x, latent_rank)) for rows in engine.lat]
        engine.ik = [None if rows is None else _Rows(rows, _round_vector) for rows in engine.ik]
        for layer in self._model.ls:
            if layer.at.idx is not None:
                layer.at.idx.q = _rounding(layer.at.idx.q)

    def prefill(self, token_ids: Sequence[int]) -> None:
        """Compute the sequence's first tokens."""
        self._engine.prefill(torch.tensor(token_ids), _CHUNK_TOKENS)

    @torch.inference_mode()
    def would_answer(self, prompt: list[int], answer: list[int], num_cached: int) -> list[int]:
        """The greedy token after each of the prompt and the answer's leading parts."""
        fresh = torch.tensor([*prompt, *answer][num_cached:])
        hidden = self._engine.forward(fresh, num_cached)[-len(answer) - 1 :]
        return (hidden.float() @ self._model.head.weight.float().T).argmax(-1).tolist()


class _Rows:
    """A cache that rounds what is written to it."""

    def __init__(self, rows: torch.Tensor, rounded: Round) -> None:
        self._rows = rows
        self._rounded = rounded

    def __setitem__(self, place: slice, values: torch.Tensor) -> None:
        self._rows[place] = self._rounded(values)

    def __getitem__(self, place) -> torch.Tensor:
        return self._rows[place]


def _rounding(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *arguments: _round_vector(function(*arguments))


def _round_row(rows: torch.Tensor, latent_rank: int) -> torch.Tensor:
    """Latent tiles as e4m3 under a scale each, the rotary part as bf16."""
    latent = _round_vector(rows[:, :latent_rank].unflatten(1, (-1, _TILE))).flatten(1)
    rope = torch.from_numpy(nearest(rows[:, latent_rank:].double().numpy(), *_BF16))
    return torch.cat((latent, rope.to(rows.dtype)), 1)


def _round_vector(values: torch.Tensor) -> torch.Tensor:
    """The last dimension as e4m3 under one scale."""
    exact = values.double().numpy()
    scales = scales_of(exact)
    rounded = nearest(exact / scales, *_E4M3) * scales
    return torch.from_numpy(np.ascontiguousarray(rounded)).to(values.dtype)


def _load(train_demo, checkpoint: Path) -> torch.nn.Module:
    model = train_demo.Model().eval()
    state = dequantised_state(checkpoint)
    with torch.no_grad():
        for name, view in train_demo.hf_views(model.state_dict()).items():
            view.copy_(state[name])
    return model
