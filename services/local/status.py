"""`farspan status`: services by their probes, workers and pools by their heartbeats."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from services.local import own_secret, probe, run_folder
from services.local.run_folder import Running
from shared import farspan_pb2 as pb
from shared import subjects
from shared.access import Access
from shared.bus import connect
from shared.errors import ConfigError

_LISTEN_S = 1.5  # three heartbeats


def status(port: int) -> int:
    """Print what runs; 0 if every service is ready."""
    running = _running(run_folder.of_port(port), f"with its gateway at port {port}")
    if running is None:
        print(f"the stack with its gateway at port {port} is starting or stopping")
        return 1
    access = Access(own_secret.files(run_folder.of_port(port)).secret)
    states, heartbeats = asyncio.run(_ask(running, access))
    print(f"{running.base_url}\n")
    print(table(("service", "state", "probe"), _services(running, states)))
    print()
    print(table(WORKER_COLUMNS, worker_rows(heartbeats)) if heartbeats else "no worker is heard")
    return 0 if all(reason is None for reason in states.values()) else 1


def _running(folder: Path, which: str) -> Running | None:
    """Where to ask; None while there is a stack but nothing to ask yet, or any more."""
    owner = run_folder.owner(folder)
    if owner is None:
        raise ConfigError(f"no stack runs {which}: start `farspan serve`")
    if not owner.is_alive:
        raise ConfigError(f"no stack runs {which}: the last one was killed")
    return run_folder.announced(folder)


async def _ask(
    running: Running, access: Access
) -> tuple[dict[str, str | None], list[pb.Heartbeat]]:
    latest: dict[str, pb.Heartbeat] = {}

    async def hear(heartbeat: pb.Heartbeat) -> None:
        latest[heartbeat.worker.worker_id] = heartbeat

    reasons = asyncio.gather(*map(probe.unready_service, running.probes.values()))
    async with (
        connect(running.nats_url, "farspan-status", access) as bus,
        bus.listen(subjects.HEARTBEAT, hear),
    ):
        await asyncio.sleep(_LISTEN_S)
    states = dict(zip(running.probes, await reasons, strict=True))
    return states, [latest[worker] for worker in sorted(latest)]


def _services(running: Running, states: Mapping[str, str | None]) -> Iterable[Sequence[str]]:
    for name, reason in states.items():
        yield name, "ready" if reason is None else reason, f"127.0.0.1:{running.probes[name]}"
    for name, port in running.servers.items():
        yield name, "", f"127.0.0.1:{port}"


WORKER_COLUMNS = (
    "worker",
    "state",
    "since (UTC)",
    "KV layout",
    "running",
    "waiting",
    "waiting tokens",
    "free blocks",
    "device pages",
    "index pages",
    "tokens/s",
    "hot hits",
    "KV moved",
)


def worker_rows(heartbeats: Iterable[pb.Heartbeat]) -> Iterable[Sequence[str]]:
    """One row for each worker, in the order of WORKER_COLUMNS."""
    for beat in heartbeats:
        load, layout = beat.load, beat.layout
        state = pb.ServiceState.Name(beat.state).removeprefix("SERVICE_STATE_").lower()
        since = datetime.fromtimestamp(beat.worker.epoch / 1e9, UTC)
        yield (
            beat.worker.worker_id,
            state,
            f"{since:%Y-%m-%d %H:%M:%S}",
            f"{layout.kv_format} W={layout.dcp_size} I={layout.interleave}",
            str(load.num_running),
            str(load.num_waiting),
            str(load.waiting_tokens),
            _share(load.free_blocks, load.total_blocks),
            _share(load.free_device_pages, load.total_device_pages),
            _share(load.free_index_pages, load.total_index_pages),
            f"{load.tokens_per_s:.1f}" if load.tokens_per_s else "",
            _rate(load.hot_hits, load.hot_misses),
            f"{load.kv_bytes_moved / 2**20:.1f} MiB" if load.kv_bytes_moved else "",
        )


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Aligned text; a column with nothing in it is left out."""
    lines = [columns, *rows]
    kept = [i for i in range(len(columns)) if any(line[i] for line in lines[1:])]
    widths = {i: max(len(line[i]) for line in lines) for i in kept}
    return "\n".join("  ".join(f"{line[i]:<{widths[i]}}" for i in kept).rstrip() for line in lines)


def _share(free: int, total: int) -> str:
    return f"{free}/{total}" if total else ""


def _rate(hits: int, misses: int) -> str:
    return f"{hits / (hits + misses):.0%}" if hits + misses else ""
