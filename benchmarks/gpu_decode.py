"""Decode steps of the GLM-5.3 slice on one GPU: captured against launched one by one, by residency.

KV is random rows, and a random model chooses other positions at every step: the host is asked for
more rows than a trained model asks for. Writes benchmarks/results/gpu_decode.json.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from benchmarks import glm_slice, report
from shared.engine import tiles
from shared.engine.comm import RankGroup
from shared.engine.decode_step import DecodeRow
from shared.engine.gpu.backend import GpuBackend
from shared.engine.gpu.decode_engine import GpuDecodeEngine
from shared.engine.gpu.decode_step import DecodeStep
from shared.engine.gpu.step_graphs import StepGraphs
from shared.engine.gpu.tier import GpuSequence, GpuTier
from shared.engine.kv.format import KvFormat, make_format, page_geometry
from shared.engine.kv.layout import BLOCK_TOKENS
from shared.engine.kv.pinned_pool import pinned_pool
from shared.engine.kv.residency import ResidencyMode, make_policy
from shared.engine.kv.tier_pools import TierPools, TierShape
from shared.engine.model.config import ModelConfig, load_config
from shared.engine.model.loading import load_weights
from shared.engine.model.transformer import Transformer
from shared.engine.open_decode import index_groups
from shared.engine.step import Sampling

_CONTEXTS = {"8k": 8 << 10, "64k": 64 << 10}
_BATCHES = (1, 8, 64)
_RESIDENCIES = (ResidencyMode.ALL_RESIDENT, ResidencyMode.ALL_HOST)
_HOT_ROWS = 4096
_STEPS = 20
_SPARE_BLOCKS = 2  # of each sequence: for what is decoded
_PATTERN_ROWS = 1 << 16  # random rows and keys, again and again

_Step = Callable[[Sequence[DecodeRow[GpuSequence]]], object]


def main() -> int:
    """Measure and write the figures; 2 without a GPU."""
    if not torch.cuda.is_available():
        sys.stderr.write("decode on a GPU is measured, and there is no CUDA device\n")
        return 2
    tiles.use(1)
    torch.manual_seed(0)
    place = glm_slice.directory()
    config, group, device = load_config(place), RankGroup(), torch.device("cuda:0")
    weights = load_weights(place, config, group, GpuBackend(device))
    model = Transformer(config, weights, group)
    figures: dict[str, float] = {}
    shape = _shape(config)
    with pinned_pool(shape.host_bytes, device) as host_memory:
        pools = TierPools(shape, device, host_memory)
        _fill(pools, make_format("fp8_ds_mla", config.attention))
        for residency in _RESIDENCIES:
            figures |= _measured(model, pools, residency)
    report.write("gpu_decode", figures)
    return 0


def _shape(config: ModelConfig) -> TierShape:
    kv_format = make_format("fp8_ds_mla", config.attention)
    num_pages = max(_BATCHES) * (max(_CONTEXTS.values()) // BLOCK_TOKENS + _SPARE_BLOCKS)
    return TierShape(
        num_mla_layers=config.num_kv_layers,
        num_index_layers=len(config.index_layers),
        row_bytes=kv_format.row_bytes,
        index_page_bytes=page_geometry(kv_format).page_bytes,
        num_host_pages=num_pages,
        num_device_pages=num_pages,
    )


def _fill(pools: TierPools, kv_format: KvFormat) -> None:
    rows = kv_format.encode_rows(torch.randn(_PATTERN_ROWS, 576))
    for layer in pools.host_rows:
        for part in layer.split(_PATTERN_ROWS):
            part.copy_(rows[: len(part)])
    keys = kv_format.encode_keys(torch.randn(_PATTERN_ROWS, 128)).to(pools.index_pages.device)
    geometry = page_geometry(kv_format)
    slots = torch.arange(_PATTERN_ROWS, device=keys.device)
    for layer in pools.index_pages:
        for part in layer.split(_PATTERN_ROWS // BLOCK_TOKENS):
            num_keys = len(part) * BLOCK_TOKENS
            geometry.write(part, slots[:num_keys], keys[:num_keys])


def _measured(model: Transformer, pools: TierPools, residency: ResidencyMode) -> dict[str, float]:
    config, shape = model.config, pools.shape
    policy = make_policy(
        residency,
        hot_rows=_HOT_ROWS,
        union_rows=config.attention.index_topk,
        num_device_pages=shape.num_device_pages,
    )
    tier = GpuTier(pools, index_groups(config), policy, max(_BATCHES))
    step = DecodeStep(model, tier, max(_BATCHES))
    begun_s = time.monotonic()
    graphs = StepGraphs(step, max(_CONTEXTS.values()) // BLOCK_TOKENS + _SPARE_BLOCKS)
    name = residency.value.replace("-", "_")
    figures = {f"{name}_capture_s": time.monotonic() - begun_s}
    for label, context in _CONTEXTS.items():
        for batch in _BATCHES:
            report.progress(f"{residency}, {batch} x {context}")
            key = f"{name}_{label}_b{batch}"
            for suffix, value in _case(step, graphs, policy, (batch, context)):
                figures[f"{key}_{suffix}"] = value
    return figures


def _case(
    step: DecodeStep, graphs: StepGraphs, policy: object, case: tuple[int, int]
) -> Iterator[tuple[str, float]]:
    """Milliseconds of a step, tokens on the host included; the host's rows and their GB/s."""
    batch, context = case
    tier, num_blocks = step.tier, context // BLOCK_TOKENS + _SPARE_BLOCKS
    sequences = [
        tier.open(range(number * num_blocks, (number + 1) * num_blocks)) for number in range(batch)
    ]
    hidden = torch.randn(batch, step.model.config.hidden_size, device="cuda").bfloat16()
    rows = [
        DecodeRow(sequence, 17 * number % 1000, context, hidden[number], Sampling())
        for number, sequence in enumerate(sequences)
    ]
    captured = GpuDecodeEngine(step, graphs.run, policy).step
    begun_s = time.monotonic()
    captured(rows)  # brings the pages that are to be resident
    yield "first_step_s", time.monotonic() - begun_s
    before = sum(counters.host_bytes for counters in tier.counters)
    captured_ms = _step_ms(captured, rows)
    fetched = sum(counters.host_bytes for counters in tier.counters) - before
    yield "captured_ms", captured_ms
    yield "launched_ms", _step_ms(GpuDecodeEngine(step, step.run, policy).step, rows)
    yield "host_mb_per_step", fetched / _STEPS / 1e6
    for sequence in sequences:
        tier.close(sequence)


def _step_ms(step: _Step, rows: Sequence[DecodeRow[GpuSequence]]) -> float:
    """Of steps with one row more cached each; every step has another token, so other positions."""
    begun_s = time.monotonic()
    for number in range(_STEPS):
        step(
            [
                DecodeRow(
                    r.sequence,
                    (r.token_id + number) % 1000,
                    r.position + number,
                    r.previous_hidden,
                    r.sampling,
                )
                for r in rows
            ]
        )
    return (time.monotonic() - begun_s) / _STEPS * 1e3


if __name__ == "__main__":
    sys.exit(main())
