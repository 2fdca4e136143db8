"""Opens a decode engine: settings, memory and model, for the device at hand."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shared.engine import tiles
from shared.engine.comm import RankGroup
from shared.engine.decode_engine import CpuDecodeEngine
from shared.engine.decode_step import DecodeEngine
from shared.engine.devices import find_device, fitting
from shared.engine.kv.fetch_plan import IndexGroup
from shared.engine.kv.format import KvFormat, make_format, page_geometry
from shared.engine.kv.host_tier import HostTier
from shared.engine.kv.layout import BLOCK_TOKENS
from shared.engine.kv.pinned_pool import pinned_pool
from shared.engine.kv.residency import ResidencyMode, ResidencyPolicy, make_policy
from shared.engine.kv.tier_pools import TierPools, TierShape
from shared.engine.model.backend import CpuBackend
from shared.engine.model.config import ModelConfig, load_config
from shared.engine.model.loading import load_weights
from shared.engine.model.transformer import Transformer
from shared.engine.step import Sampling
from shared.errors import ConfigError

_MIB = 2**20


@dataclass(frozen=True)
class DecodeEngineSettings:
    """What an operator chooses."""

    checkpoint: Path
    kv_format: str
    host_pool_mib: int
    device_pool_mib: int
    index_pool_mib: int
    hot_rows: int  # per sequence that is not fully resident
    residency: ResidencyMode
    device: str = "cpu"  # or cuda:N
    max_sequences: int = 64  # open at once


@dataclass(frozen=True)
class PoolSizes:
    """Pages each pool has room for; the tier uses as many host pages as both pools allow."""

    host_pages: int
    device_pages: int
    index_pages: int


@contextmanager
def open_decode_engine(settings: DecodeEngineSettings) -> Iterator[DecodeEngine[Any]]:
    """The model loaded and the pools made, inside the block.

    Raises ConfigError for what cannot work together, or does not fit.
    """
    config = load_config(settings.checkpoint)
    kv_format = make_format(settings.kv_format, config.attention)
    sizes = pool_sizes(settings, config, kv_format)
    policy = make_policy(
        settings.residency,
        hot_rows=settings.hot_rows,
        union_rows=config.attention.index_topk,
        num_device_pages=sizes.device_pages,
    )
    shape = TierShape(
        num_mla_layers=config.num_kv_layers,
        num_index_layers=len(config.index_layers),
        row_bytes=kv_format.row_bytes,
        index_page_bytes=page_geometry(kv_format).page_bytes,
        num_host_pages=min(sizes.host_pages, sizes.index_pages),
        num_device_pages=sizes.device_pages,
    )
    device = find_device(settings.device)
    if device.type == "cuda":
        with _on_gpu(settings, config, policy, shape, device) as engine:
            yield engine
        return
    group = RankGroup()
    weights = load_weights(settings.checkpoint, config, group, CpuBackend())
    with fitting("decode's pools"):
        pools = TierPools(shape)
    tier = HostTier(pools, index_groups(config), policy)
    yield CpuDecodeEngine(Transformer(config, weights, group), tier, kv_format, policy)


@contextmanager
def _on_gpu(
    settings: DecodeEngineSettings,
    config: ModelConfig,
    policy: ResidencyPolicy,
    shape: TierShape,
    device: torch.device,
) -> Iterator[DecodeEngine[Any]]:
    from shared.engine.gpu.backend import GpuBackend  # these load Triton
    from shared.engine.gpu.decode_engine import GpuDecodeEngine
    from shared.engine.gpu.decode_step import DecodeStep
    from shared.engine.gpu.sampler import draw
    from shared.engine.gpu.step_graphs import StepGraphs
    from shared.engine.gpu.supported import require_supported
    from shared.engine.gpu.tier import GpuTier
    from shared.engine.kernels.hot_tables import MAX_HOT_ROWS

    require_supported(settings.kv_format, config.attention)
    if settings.hot_rows > MAX_HOT_ROWS:
        raise ConfigError(f"on a GPU a sequence has at most {MAX_HOT_ROWS} hot rows")
    tiles.use(1)  # other threads would compute outside the captured stream

    def made(host_memory: torch.Tensor) -> GpuDecodeEngine:
        group = RankGroup()
        weights = load_weights(settings.checkpoint, config, group, GpuBackend(device))
        pools = TierPools(shape, device, host_memory)
        tier = GpuTier(pools, index_groups(config), policy, settings.max_sequences)
        step = DecodeStep(Transformer(config, weights, group), tier, settings.max_sequences)
        max_pages = min(shape.num_host_pages, -(-config.max_position // BLOCK_TOKENS))
        graphs = StepGraphs(step, max_pages)
        draw(step.logits, [Sampling(temperature=1.0)] * settings.max_sequences)
        # What only the first runs needed, a prefill on the same device may want.
        torch.cuda.empty_cache()
        return GpuDecodeEngine(step, graphs.run, policy)

    with ExitStack() as stack:
        with fitting(f"decode on {device}"), torch.cuda.device(device):
            engine = made(stack.enter_context(pinned_pool(shape.host_bytes, device)))
        yield engine


def index_groups(config: ModelConfig) -> list[IndexGroup]:
    """The layers that share a selection."""
    return [IndexGroup(layers[0], layers[1:]) for layers in config.index_groups]


def pool_sizes(
    settings: DecodeEngineSettings, config: ModelConfig, kv_format: KvFormat
) -> PoolSizes:
    """How many pages the configured memory holds; ConfigError if a pool holds none."""
    row_page = config.num_kv_layers * BLOCK_TOKENS * kv_format.row_bytes
    index_page = len(config.index_layers) * page_geometry(kv_format).page_bytes
    sizes = PoolSizes(
        host_pages=settings.host_pool_mib * _MIB // row_page,
        device_pages=settings.device_pool_mib * _MIB // row_page,
        index_pages=settings.index_pool_mib * _MIB // index_page,
    )
    if min(sizes.host_pages, sizes.device_pages, sizes.index_pages) < 1:
        raise ConfigError(f"the decode pools are too small to hold one page each: {sizes}")
    return sizes
