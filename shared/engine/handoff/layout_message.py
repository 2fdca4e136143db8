"""The layout message that prefill offers and decode compares."""

from pathlib import Path

from shared import farspan_pb2 as pb
from shared.engine.kv.format import KvFormat, page_geometry
from shared.engine.kv.layout import BLOCK_TOKENS, Sharding
from shared.engine.model.config import ModelConfig
from shared.engine.model.weights import fingerprint


def describe_layout(
    checkpoint: Path, config: ModelConfig, kv_format: KvFormat, sharding: Sharding
) -> pb.KvLayout:
    """A worker's layout; equal fingerprints are a condition of every handoff."""
    return pb.KvLayout(
        model_fingerprint=fingerprint(checkpoint, kv_format.name),
        kv_format=kv_format.name,
        block_tokens=BLOCK_TOKENS,
        dcp_size=sharding.size,
        interleave=sharding.interleave,
        num_mla_layers=config.num_kv_layers,
        num_index_layers=len(config.index_layers),
        row_bytes=kv_format.row_bytes,
        index_page_bytes=page_geometry(kv_format).page_bytes,
    )
