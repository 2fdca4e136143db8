"""The process of one prefill rank: its part of the model, its pools, one step after another.

Lives as long as the coordinator's end of the pipe. Any failure ends the process, and with it the
worker: what a rank holds cannot be replaced while the others go on.
"""

import hashlib
import signal
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from shared import logs
from shared.engine import compute_threads
from shared.engine.attention_ops import AttentionOps, CpuAttentionOps
from shared.engine.comm import RankGroup
from shared.engine.devices import find_device, fitting
from shared.engine.handoff.agent import require_nixl
from shared.engine.handoff.exporter import KvExporter
from shared.engine.handoff.layout_message import describe_layout
from shared.engine.kv.format import KvFormat, make_format
from shared.engine.kv.layout import Sharding
from shared.engine.kv.pool import BlockPool
from shared.engine.model.backend import Backend, CpuBackend
from shared.engine.model.config import AttentionConfig, load_config
from shared.engine.model.loading import load_weights
from shared.engine.model.transformer import Transformer
from shared.engine.prefill_engine import PrefillEngine
from shared.engine.prefill_kv import KvContext
from shared.engine.rank_messages import RankReady, RankRefused, RankReply, RankSettings
from shared.engine.step import PrefillStep
from shared.errors import ConfigError

# A rank that is gone is noticed at once by its closed connection; this is for one that hangs.
_COLLECTIVE_S = 600


def serve(settings: RankSettings, rank: int, rendezvous: Path, calls: Connection) -> None:
    """Run steps until the coordinator says so, or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the coordinator decides when a Ctrl-C ends us
    # On a GPU one: what several threads launch would run on streams of its own.
    compute_threads.settle(settings.num_threads if settings.device == "cpu" else 1)
    # New names for two collectives, unknown to the torch versions that GPU images carry.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    with logs.to_stderr(f"prefill rank {rank} of {settings.owner}", dict), ExitStack() as stack:
        try:
            device = find_device(settings.device, rank)
            if device.type == "cuda":
                torch.cuda.set_device(device)
            group = stack.enter_context(_group(settings, rank, device, rendezvous))
            with fitting(f"the rank on {device}"):
                engine, exporter, ready = _load(settings, group, device)
        except ConfigError as error:
            calls.send(RankRefused(str(error)))
            return
        stack.enter_context(exporter)
        with suppress(EOFError):  # end of the pipe: the coordinator is gone
            calls.send(ready)
            while (step := calls.recv()) is not None:
                calls.send(_run(engine, step, rank, device))


@contextmanager
def _group(
    settings: RankSettings, rank: int, device: torch.device, rendezvous: Path
) -> Iterator[RankGroup]:
    if settings.num_ranks > 1:
        dist.init_process_group(
            "gloo" if device.type == "cpu" else "nccl",
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=settings.num_ranks,
            timeout=timedelta(seconds=_COLLECTIVE_S),
        )
    yield RankGroup(rank, settings.num_ranks)
    if settings.num_ranks > 1:
        dist.destroy_process_group()


def _load(
    settings: RankSettings, group: RankGroup, device: torch.device
) -> tuple[PrefillEngine, KvExporter, RankReady]:
    require_nixl()
    config = load_config(settings.checkpoint)
    kv_format = make_format(settings.kv_format, config.attention)
    try:
        sharding = Sharding(settings.num_ranks, settings.interleave)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    backend, ops = _arithmetic(device, kv_format, config.attention)
    weights = load_weights(settings.checkpoint, config, group, backend)
    pool = BlockPool(config, kv_format, settings.num_blocks, settings.epoch, device=device)
    context = KvContext(pool, ops, config.attention.kv_lora_rank, sharding, group)
    engine = PrefillEngine(Transformer(config, weights, group), context)
    owner = f"{settings.owner}-{group.rank}"
    exporter = KvExporter(owner, pool.rows, pool.index_pages, pool.generations)
    layout = describe_layout(settings.checkpoint, config, kv_format, sharding)
    ready = RankReady(
        regions=exporter.regions().SerializeToString(),
        layout=layout.SerializeToString(),
    )
    return engine, exporter, ready


def _arithmetic(
    device: torch.device, kv_format: KvFormat, attention: AttentionConfig
) -> tuple[Backend, AttentionOps]:
    if device.type == "cpu":
        return CpuBackend(), CpuAttentionOps(kv_format, attention)
    from shared.engine.gpu.attention_ops import GpuAttentionOps  # these load Triton
    from shared.engine.gpu.backend import GpuBackend

    return GpuBackend(device), GpuAttentionOps(kv_format, attention)


def _run(engine: PrefillEngine, step: PrefillStep, rank: int, device: torch.device) -> RankReply:
    result = engine.run(step)
    if device.type == "cuda":
        # After the reply decode may read the blocks, and its reads wait for none of our streams.
        torch.cuda.synchronize(device)
    digest = hashlib.blake2b(step.digest(), digest_size=8)
    for request_id, drawn in result.sampled.items():
        digest.update(f"{request_id} {drawn.token_id}".encode())
    return RankReply(digest.digest(), result if rank == 0 else None)
