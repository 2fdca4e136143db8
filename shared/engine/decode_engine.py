"""One decode rank: a batch of newest tokens in, their KV in the tiers and the next tokens out.

Knows tensors and tiers; knows nothing of requests' lives, other services or the network. Made by
`open_decode_engine`; used by the step thread only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from shared.engine.comm import RankGroup
from shared.engine.decode_kv import DecodeKv, QueryRow
from shared.engine.kv.fetch_plan import IndexGroup
from shared.engine.kv.format import KvFormat, make_format, page_geometry
from shared.engine.kv.host_tier import HostTier, StepRange, TieredSequence
from shared.engine.kv.layout import BLOCK_TOKENS
from shared.engine.kv.residency import ResidencyMode, ResidencyPolicy, make_policy
from shared.engine.kv.tier_pools import TierPools, TierShape
from shared.engine.model.backend import CpuBackend
from shared.engine.model.config import ModelConfig, load_config
from shared.engine.model.loading import load_weights
from shared.engine.model.transformer import StepRows, Transformer
from shared.engine.sampler import sample
from shared.engine.step import Sampling
from shared.engine.tiles import torch_alone
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


@dataclass(frozen=True)
class DecodeRow:
    """One sequence's part of a step."""

    sequence: TieredSequence
    token_id: int  # the newest token, not cached yet
    position: int  # its position, > 0
    previous_hidden: torch.Tensor  # [hidden] fp32, post-norm, of the token before it
    sampling: Sampling


@dataclass(frozen=True)
class DecodeOutput:
    """What a sequence's part of a step gave."""

    token_id: int
    hidden: torch.Tensor  # [hidden] fp32: the next step's previous_hidden


@dataclass(frozen=True)
class PoolSizes:
    """Pages each pool has room for; the tier uses as many host pages as both pools allow."""

    host_pages: int
    device_pages: int
    index_pages: int


class DecodeEngine:
    """Steps over batches of sequences."""

    def __init__(
        self, model: Transformer, tier: HostTier, kv_format: KvFormat, policy: ResidencyPolicy
    ) -> None:
        self.config: ModelConfig = model.config
        self.tier = tier
        self.policy = policy
        self._model = model
        self._format = kv_format

    @torch.inference_mode()
    def step(self, rows: Sequence[DecodeRow]) -> list[DecodeOutput]:
        """Cache each row's token in all layers, the MTP layer included, and draw the next.

        Raises FloatingPointError for logits that are not finite and RuntimeError for rows that were
        read but not fetched; no token of the step may then be used.
        """
        torch_alone()
        self.tier.prepare([StepRange(r.sequence, r.position, r.position + 1) for r in rows])
        queries = [QueryRow(row.sequence, row.position) for row in rows]
        token_ids = torch.tensor([row.token_id for row in rows])
        positions = torch.tensor([row.position for row in rows])
        hidden = self._model.forward(
            token_ids, StepRows(positions, len(rows), 0), self._kv(queries, 0)
        )
        self._model.write_mtp(
            token_ids,
            torch.stack([row.previous_hidden for row in rows]),
            StepRows(positions - 1, len(rows), 0),
            self._kv(queries, 1),
        )
        drawn = sample(self._model.logits(hidden), [row.sampling for row in rows])
        for row in rows:
            self.tier.confirm(row.sequence)
        return [DecodeOutput(token, row) for token, row in zip(drawn, hidden, strict=True)]

    def _kv(self, queries: Sequence[QueryRow], first_position: int) -> DecodeKv:
        return DecodeKv(
            queries, self.tier, self._format, self.config, first_position=first_position
        )


def hidden_from_bytes(data: bytes, hidden_size: int) -> torch.Tensor:
    """A handed-over hidden state, fp32; ValueError if it has another width."""
    hidden = torch.frombuffer(bytearray(data), dtype=torch.float32)
    if hidden.shape[0] != hidden_size:
        raise ValueError(f"a hidden state of {hidden.shape[0]} elements, not {hidden_size}")
    return hidden


def open_decode_engine(settings: DecodeEngineSettings) -> DecodeEngine:
    """Load the model and make the pools. ConfigError for what cannot work together."""
    config = load_config(settings.checkpoint)
    kv_format = make_format(settings.kv_format, config.attention)
    sizes = pool_sizes(settings, config, kv_format)
    group = RankGroup()
    model = Transformer(
        config, load_weights(settings.checkpoint, config, group, CpuBackend()), group
    )
    policy = make_policy(
        settings.residency,
        hot_rows=settings.hot_rows,
        union_rows=config.attention.index_topk,
        num_device_pages=sizes.device_pages,
    )
    pools = TierPools(
        TierShape(
            num_mla_layers=config.num_kv_layers,
            num_index_layers=len(config.index_layers),
            row_bytes=kv_format.row_bytes,
            index_page_bytes=page_geometry(kv_format).page_bytes,
            num_host_pages=min(sizes.host_pages, sizes.index_pages),
            num_device_pages=sizes.device_pages,
        )
    )
    groups = [IndexGroup(layers[0], layers[1:]) for layers in config.index_groups]
    return DecodeEngine(model, HostTier(pools, groups, policy), kv_format, policy)


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
