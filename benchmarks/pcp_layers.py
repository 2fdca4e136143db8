"""One layer's time behind long contexts: on one GPU, and on two that share queries, KV and experts.

A chunk of 8,192 new tokens, what a worker computes at once when prompts are long: each of 256
experts gets 256 rows. The attention part is the indexer's scores, the choice, attention, and the
gather of the other rank's KV; the layer is everything. Layers are the slice's (glm_slice.py): an
owner of an indexer and a follower, both with experts. Cached rows and keys are random, so chosen
positions lie all over the context.

Rank 0 of two is measured alone as well: half of the queries and experts, all of the KV. What the
other rank would send is a copy of its own there, so the time is of the compute of one of two ranks,
and has no exchange in it.
"""

import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks import glm_slice, report
from benchmarks.kernel_speed.rates import time_ms
from shared.engine import tiles
from shared.engine.comm import RankGroup
from shared.engine.gpu.attention_ops import GpuAttentionOps
from shared.engine.gpu.backend import GpuBackend
from shared.engine.kv.format import Fp8Format
from shared.engine.kv.layout import BLOCK_TOKENS, Sharding
from shared.engine.kv.pool import BlockPool
from shared.engine.model.config import ModelConfig, load_config
from shared.engine.model.layers import Rope, project_kv, project_queries, rms_norm
from shared.engine.model.loading import load_weights
from shared.engine.model.transformer import Transformer
from shared.engine.prefill_kv import KvContext, PrefillKv, StepLayout
from shared.engine.step import Chunk

_CONTEXTS = {"8k": 8 << 10, "64k": 64 << 10, "256k": 256 << 10, "1m": 1 << 20}  # cached tokens
_CHUNK = 8192
_LAYERS = {"owner": 1, "follower": 2}
_CALLS = {"8k": 20, "64k": 20, "256k": 10, "1m": 5}
_BLOCKS_AT_ONCE = 512  # encoded while a pool is filled
_INTERLEAVE = BLOCK_TOKENS

Figures = dict[str, float]


class FirstOfTwo(RankGroup):
    """Rank 0 of two without the other: what that would send is a copy of its own."""

    def __init__(self) -> None:
        super().__init__(0, 2)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """See RankGroup."""
        return torch.cat((tensor, tensor))

    def sum_to_owner(self, tensor: torch.Tensor) -> torch.Tensor:
        """See RankGroup."""
        return tensor[: len(tensor) // 2]

    def sum_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """See RankGroup."""
        return tensor


@dataclass(frozen=True)
class _Step:
    """A chunk behind a context, ready to be computed."""

    model: Transformer
    layout: StepLayout
    kv: PrefillKv
    hidden: torch.Tensor  # [own rows, hidden]
    angles: torch.Tensor

    def times(self, num_calls: int) -> Iterator[tuple[str, float]]:
        """Milliseconds of each kind of layer; the owner's come first, as followers need them."""
        config, rows = self.model.config, self.layout.rows(0)
        for kind, layer in _LAYERS.items():
            weights = self.model.weights.layers[layer]
            normed = rms_norm(self.hidden, weights.input_norm, config.rms_norm_eps)
            arguments = (config.attention, normed, self.angles, config.rms_norm_eps)
            self.kv.write(layer, project_kv(weights.attention, *arguments))
            queries = project_queries(weights.attention, *arguments)
            attend = partial(self.kv.attend, layer, queries)
            whole = partial(
                self.model.layer, layer, weights, self.hidden, self.angles, rows, self.kv
            )
            yield f"{kind}_attention", time_ms(attend, num_calls)
            yield f"{kind}_layer", time_ms(whole, num_calls)


def _step(model: Transformer, group: RankGroup, num_cached: int) -> _Step:
    config, device = model.config, model.weights.embedding.device
    kv_format, sharding = Fp8Format(config.attention), Sharding(group.size, _INTERLEAVE)
    num_blocks = -(-(num_cached + _CHUNK) // sharding.effective_block_tokens)
    ops = GpuAttentionOps(kv_format, config.attention)
    pool = BlockPool(config, kv_format, num_blocks, epoch=1, device=device)
    _fill(pool, config, ops)
    ids = np.zeros(_CHUNK, np.uint32)
    chunk = Chunk("text", ids, num_cached, 0, tuple(range(num_blocks)))
    layout = StepLayout((chunk,), sharding, group.rank, device)
    context = KvContext(pool, ops, config.attention.kv_lora_rank, sharding, group)
    rows = layout.rows(0)
    hidden = torch.randn((len(rows.positions), config.hidden_size), device=device)
    rope = Rope(config.attention.rope_dim, config.rope_theta, device)
    angles = rope.angles(rows.positions)
    return _Step(model, layout, PrefillKv(layout, context), hidden.bfloat16(), angles)


def _fill(pool: BlockPool, config: ModelConfig, ops: GpuAttentionOps) -> None:
    """Random rows and keys, in the measured layers."""
    device, attention = pool.rows.device, config.attention
    for first in range(0, len(pool.rows), _BLOCKS_AT_ONCE):
        end = min(first + _BLOCKS_AT_ONCE, len(pool.rows))
        slots = torch.arange(first * BLOCK_TOKENS, end * BLOCK_TOKENS, device=device)
        for layer in _LAYERS.values():
            latent = torch.randn((len(slots), attention.latent_dim), device=device)
            pool.write_rows(layer, slots, ops.encode_rows(latent))
            if config.owns_indexer[layer]:
                keys = torch.randn((len(slots), attention.index_dim), device=device)
                pool.write_keys(layer, slots, ops.encode_keys(keys))


@torch.inference_mode()
def _measure(group: RankGroup, device: torch.device) -> Figures:
    """Milliseconds by what was measured and how long the context is."""
    tiles.use(1)
    torch.manual_seed(group.rank)
    place = glm_slice.directory()
    config = load_config(place)
    weights = load_weights(place, config, group, GpuBackend(device))
    model, found = Transformer(config, weights, group), {}
    for name, num_cached in _CONTEXTS.items():
        report.progress(f"rank {group.rank} of {group.size}, {name}")
        step = _step(model, group, num_cached)
        found |= {f"{what}_{name}": ms for what, ms in step.times(_CALLS[name])}
        del step
        torch.cuda.empty_cache()
    return found


def _run_rank(rank: int, folder: str) -> None:
    torch.cuda.set_device(rank)
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group("nccl", init_method=rendezvous, rank=rank, world_size=2)
    torch.save(_measure(RankGroup(rank, 2), torch.device("cuda", rank)), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def _on_two() -> Figures:
    """The slower rank's times."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_run_rank, (folder,), nprocs=2)
        ranks = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(2)]
    return {key: max(rank[key] for rank in ranks) for key in ranks[0]}


def _table(settings: Mapping[str, Figures]) -> Iterator[str]:
    yield " ".join(f"{word:>24}" for word in ("milliseconds", *settings))
    for key in next(iter(settings.values())):
        yield " ".join([f"{key:>24}", *(f"{found[key]:>24.3f}" for found in settings.values())])


def main() -> int:
    """Measure what this machine's GPUs allow."""
    if not torch.cuda.is_available():
        sys.stderr.write("layers are timed on GPUs, and there is no CUDA device\n")
        return 2
    device = torch.device("cuda", 0)
    measured: dict[str, Callable[[], Figures]] = {"one_gpu": lambda: _measure(RankGroup(), device)}
    if torch.cuda.device_count() >= 2:
        measured["two_gpus"] = _on_two
    measured["one_of_two_alone"] = lambda: _measure(FirstOfTwo(), device)
    settings: dict[str, Figures] = {}
    for name, measure in measured.items():
        settings[name] = measure()
        torch.cuda.empty_cache()
        report.write("pcp_layers", dict(_figures(settings)))
    print("\n".join(_table(settings)), flush=True)
    return 0


def _figures(settings: Mapping[str, Figures]) -> Iterator[tuple[str, float]]:
    for name, found in settings.items():
        for key, milliseconds in found.items():
            yield f"{name}_{key}_ms", milliseconds


if __name__ == "__main__":
    sys.exit(main())
