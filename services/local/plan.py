"""What runs on one machine: every process, its settings, and how to see that it is ready.

Pure: options and ports in, process specifications out. Knows the settings' names of all services,
and no service's code.
"""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from services.local import own_secret
from services.local.servers import nats_command, redis_command
from shared.device_name import later_device

ROOT = Path(__file__).parents[2]
HOST = "127.0.0.1"

TRACE_FILE = "traces.jsonl"
# Well before a child is killed: whoever still waits then gets an answer.
DRAIN_S = 5
Settings = Mapping[str, str | int | Path]


@dataclass(frozen=True)
class Options:
    """What a person or a test may choose about a local stack."""

    port: int = 8000  # the gateway's; 0 = any free one
    checkpoint: Path = ROOT / "checkpoints" / "demo-fp8"
    prefill_workers: int = 1
    decode_workers: int = 1
    prefill_ranks: int = 1
    interleave: int = 64
    kv_format: str = "fp8_ds_mla"
    prefill_device: str = "cpu"  # or cuda:N: of the first worker's first rank, others take the next
    decode_device: str = "cpu"  # or cuda:N: of the first worker, others take the next
    trace_file: Path | None = None  # default: traces.jsonl in the run folder
    run_folder: Path | None = None  # default: .run/<port> in the project
    settings: Mapping[str, str] = field(default_factory=dict)  # more variables, for every process


@dataclass(frozen=True)
class Spec:
    """One process to run. Its `port` accepts connections when it lives."""

    name: str
    command: tuple[str, ...]
    environ: Mapping[str, str]
    port: int
    has_probe: bool  # the port serves /readyz


def plan(options: Options, folder: Path, ports: Iterator[int]) -> list[Spec]:
    """Every process of the stack, in the order of its start. `options.port` is decided."""
    nats_port, redis_port, grpc_port = next(ports), next(ports), next(ports)
    nats_url = f"nats://{HOST}:{nats_port}"
    grpc_address = f"{HOST}:{grpc_port}"
    trace_file = options.trace_file or folder / TRACE_FILE
    ours = own_secret.files(folder)
    login: Settings = {"CREDENTIALS_FILE": ours.secret.resolve()}

    def service(name: str, module: str, settings: Settings) -> Spec:
        prefix, port = module.upper(), next(ports)
        common = {
            "NATS_URL": nats_url,
            **_named("NATS", login),
            "HEALTH_PORT": port,
            "TRACE_FILE": trace_file.resolve(),
        }
        return Spec(
            name,
            (sys.executable, "-m", f"services.{module}"),
            {
                **{f"{prefix}_{key}": str(value) for key, value in {**common, **settings}.items()},
                **options.settings,
            },
            port,
            has_probe=True,
        )

    def worker(role: str, number: int, device: str, settings: Settings) -> Spec:
        name = f"{role}-{number}"
        return service(name, role, {**settings, "WORKER_ID": name, "DEVICE": device})

    checkpoint = options.checkpoint.resolve()
    model: Settings = {
        "CHECKPOINT": checkpoint,
        "MODEL": checkpoint.name,
        "DRAIN_S": DRAIN_S,
    }
    decode: Settings = {**model, "KV_FORMAT": options.kv_format}
    ranks: Settings = {"RANKS": options.prefill_ranks, "INTERLEAVE": options.interleave}
    redis_url = f"redis://{HOST}:{redis_port}/0"
    redis: Settings = {"REDIS_URL": redis_url, **_named("REDIS", login)}
    index: Settings = {
        **redis,
        **_named("GRPC", login),
        "REDIS_REQUIRED": "false",  # it is ours, and started again when it dies
        "GRPC_ADDRESS": grpc_address,
    }
    return [
        _server("nats", nats_command(nats_port, ours.nats_conf), nats_port),
        _server("redis", redis_command(redis_port, folder, ours.redis_conf), redis_port),
        service("kv_index", "kv_index", index),
        service(
            "router",
            "router",
            {"KV_INDEX_ADDRESS": grpc_address, **_named("KV_INDEX", login), **redis},
        ),
        *(
            worker(
                "prefill",
                number,
                later_device(options.prefill_device, number * options.prefill_ranks),
                {**decode, **ranks},
            )
            for number in range(options.prefill_workers)
        ),
        *(
            worker("decode", number, later_device(options.decode_device, number), decode)
            for number in range(options.decode_workers)
        ),
        service("gateway", "gateway", {"HOST": HOST, "PORT": options.port, **model}),
    ]


def _server(name: str, command: Sequence[str], port: int) -> Spec:
    return Spec(name, tuple(command), {}, port, has_probe=False)


def _named(server: str, settings: Settings) -> Settings:
    """The settings of how one server is reached."""
    return {f"{server}_{key}": value for key, value in settings.items()}


def environment(spec: Spec) -> dict[str, str]:
    """The whole environment of a process: ours where we decide, else the caller's, else defaults.

    KV moves over loopback and shared memory, so UCX and gloo need not look for other networks.
    """
    defaults = {"UCX_NET_DEVICES": "lo", "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}
    return {**defaults, **os.environ, **spec.environ}
