"""Speed of products with block-FP8 matrices at GLM-5.3's shapes, beside torch's in bf16.

Few rows: bytes of the matrices that are read, over time, against copy bandwidth. Many rows:
arithmetic, of each row once, against the bf16 matrix rate. Ours includes splitting the rows, and
for experts taking them from their tokens, or applying the gates; torch's is the product alone.
A figure is its slowest case.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from benchmarks.kernel_speed.rates import Rates, Row, graph_time_ms
from shared.engine.kernels.grouped_fp8 import grouped_fp8
from shared.engine.kernels.split_rows import split_gated, split_rows

_HIDDEN, _INNER = 6144, 2048
_LOCAL_EXPERTS, _EXPERTS, _CHOICES = 16, 256, 8  # 16 ranks
_DECODE_TOKENS, _PREFILL_TOKENS = 64, 8192
_EXPERT_SHAPES = {"gate and up": (2 * _INNER, _HIDDEN), "down": (_HIDDEN, _INNER)}
_DENSE_SHAPES = {"q_b": (16384, 2048), "o_proj": (_HIDDEN, 16384), "kv_a": (576, _HIDDEN)}
_NUM_CALLS = 100


def measure(rates: Rates) -> Iterator[Row]:
    """Experts of one of 16 ranks, and matrices that every rank has, for decode and for prefill."""
    for figure, bar, tokens in (
        ("experts_decode", 0.6, _DECODE_TOKENS),
        ("experts_prefill", 0.5, _PREFILL_TOKENS),
    ):
        rows = [
            row._replace(bar=bar)
            for name in _EXPERT_SHAPES
            for row in _experts(rates, name, tokens)
        ]
        slowest = min(rows[::2], key=lambda row: row.ratio)
        yield from (row._replace(figure=figure) if row is slowest else row for row in rows)
    for tokens in (1, _DECODE_TOKENS, _PREFILL_TOKENS):
        for name in _DENSE_SHAPES:
            yield from _dense(rates, name, tokens)


def _experts(rates: Rates, name: str, tokens: int) -> Iterator[Row]:
    """Ours, then torch's; each of a rank's experts has as many rows as chance gives it."""
    shape, num_places = _EXPERT_SHAPES[name], tokens * _CHOICES
    random = torch.Generator().manual_seed(1)
    expert, order = torch.randint(0, _EXPERTS, (num_places,), generator=random).sort()
    sizes = expert.bincount(minlength=_EXPERTS)[:_LOCAL_EXPERTS]
    ends, order = sizes.cumsum(0).int().cuda(), order.cuda()
    weight, scales = _matrices(_LOCAL_EXPERTS, *shape)
    hidden, gate_up = _normal(tokens, _HIDDEN), _normal(num_places, 2 * _INNER)
    out = _normal(num_places, shape[0])

    def ours() -> None:
        rows = (
            split_gated(gate_up, ends[-1:])
            if name == "down"
            else split_rows(hidden, order // _CHOICES, ends[-1:])
        )
        grouped_fp8(rows, weight, scales, ends, out, order if name == "down" else None)

    num_rows, num_read = int(sizes.sum()), int((sizes > 0).sum())
    text = f"{name}, {tokens:,} tokens: {num_rows:,} rows, {num_read} experts"
    work = (num_read, num_rows) if tokens == _DECODE_TOKENS else (0, num_rows)
    yield _row(rates, "grouped_fp8", text, ours, (work[0], work[1], shape))
    dense, rows = _normal(_LOCAL_EXPERTS, *shape).transpose(1, 2), _normal(num_places, shape[1])
    yield _row(
        rates,
        "torch's grouped_mm, bf16",
        text,
        lambda: F.grouped_mm(rows, dense, offs=ends),
        (2 * work[0], work[1], shape),
    )


def _dense(rates: Rates, name: str, tokens: int) -> Iterator[Row]:
    """Ours, then torch's."""
    shape = _DENSE_SHAPES[name]
    weight, scales = _matrices(1, -(-shape[0] // 128) * 128, shape[1])
    rows, out, dense = _normal(tokens, shape[1]), _normal(tokens, shape[0]), _normal(*shape)
    ends = torch.tensor([tokens], dtype=torch.int32, device="cuda")
    num_read = 1 if tokens <= _DECODE_TOKENS else 0
    for kernel, call, bytes_each in (
        ("grouped_fp8", lambda: grouped_fp8(split_rows(rows), weight, scales, ends, out), 1),
        ("torch's linear, bf16", lambda: F.linear(rows, dense), 2),
    ):
        text = f"{name}, {tokens:,} rows"
        yield _row(rates, kernel, text, call, (num_read * bytes_each, tokens, shape))


def _row(
    rates: Rates,
    kernel: str,
    shape: str,
    call: Callable[[], object],
    work: tuple[int, int, tuple[int, int]],  # bytes read of each value, or 0; rows; a matrix
) -> Row:
    num_read, num_rows, (height, inner) = work
    milliseconds = graph_time_ms(call, _NUM_CALLS)
    if num_read:
        speed = num_read * height * inner / milliseconds * 1e3
        rate, ratio = f"{speed / 1e12:.2f} TB/s", speed / rates.copy_bytes_per_s
    else:
        speed = 2 * num_rows * height * inner / milliseconds * 1e3
        rate, ratio = f"{speed / 1e12:.0f} TFLOP/s", speed / rates.bf16_flop_per_s
    return Row("", kernel, shape, milliseconds, rate, ratio, 0.0)


def _matrices(groups: int, height: int, inner: int) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.randn(groups, height, inner, device="cuda").mul(64).to(torch.float8_e4m3fn)
    return codes, torch.rand(groups, height // 128, inner // 128, device="cuda") * 1e-3


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")
