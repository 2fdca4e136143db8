"""The heavy parts of a decode rank: model, pools and NIXL agent, made before it may say READY."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from services.decode.config import DecodeConfig
from shared import farspan_pb2 as pb
from shared.engine.decode_step import DecodeEngine
from shared.engine.devices import fitting
from shared.engine.handoff.agent import require_nixl
from shared.engine.handoff.importer import KvImporter
from shared.engine.handoff.landing import Landing
from shared.engine.handoff.layout_message import describe_layout
from shared.engine.kv.format import make_format
from shared.engine.kv.layout import BLOCK_TOKENS, Sharding
from shared.engine.kv.residency import ResidencyMode
from shared.engine.open_decode import DecodeEngineSettings, open_decode_engine

NUM_LANES = 4  # pulls at once; one loopback or RDMA link is full with fewer


@dataclass(frozen=True)
class Parts:
    """What the rank computes and receives with."""

    engine: DecodeEngine[Any]
    layout: pb.KvLayout
    importer: KvImporter
    landing: Landing


@contextmanager
def open_parts(config: DecodeConfig) -> Iterator[Parts]:
    """Everything loaded and allocated inside the block; entering takes seconds.

    ConfigError for what does not fit.
    """
    require_nixl()
    settings = DecodeEngineSettings(
        checkpoint=config.checkpoint,
        kv_format=config.kv_format,
        host_pool_mib=config.host_pool_mib,
        device_pool_mib=config.device_pool_mib,
        index_pool_mib=config.index_pool_mib,
        hot_rows=config.hot_rows,
        residency=ResidencyMode(config.residency),
        device=config.device,
        max_sequences=config.max_concurrent,
    )
    with open_decode_engine(settings) as engine:
        kv_format = make_format(config.kv_format, engine.config.attention)
        alone = Sharding(1, BLOCK_TOKENS)  # pages lie here in token order, whoever sends them
        layout = describe_layout(config.checkpoint, engine.config, kv_format, alone)
        with fitting("the staging memory"):
            importer = KvImporter(
                config.worker_id,
                layout,
                staging_bytes=config.staging_mib << 20,
                num_lanes=NUM_LANES,
                device=engine.tier.pools.index_pages.device,
            )
        yield Parts(engine, layout, importer, Landing(engine.tier.pools))
