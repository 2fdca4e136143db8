"""A service that lacks something says what in one line, and ends: as the process it is."""

import asyncio
import os
import shutil
import sys
from pathlib import Path

import pytest

from services.local.servers import free_port
from tests import demo

ROOT = demo.CHECKPOINT.parents[1]
NOWHERE = Path("/nowhere/checkpoint")
PATIENCE_S = 60.0  # five on an idle machine: torch is imported, and NATS given time to start
CONFIG_EXIT = 2

REQUIRED = {
    "gateway": ("HOST", "PORT", "NATS_URL", "CHECKPOINT"),
    "router": ("NATS_URL", "KV_INDEX_ADDRESS"),
    "kv_index": ("NATS_URL", "REDIS_URL", "GRPC_ADDRESS"),
    "prefill": ("NATS_URL", "CHECKPOINT", "MODEL"),
    "decode": ("NATS_URL", "CHECKPOINT"),
}


def settings(nats_url: str, redis_url: str, checkpoint: Path = demo.CHECKPOINT) -> dict[str, str]:
    """Every setting that some service needs, by the part of its name after the prefix."""
    return {
        "HOST": "127.0.0.1",
        "PORT": "0",
        "NATS_URL": nats_url,
        "REDIS_URL": redis_url,
        "GRPC_ADDRESS": "127.0.0.1:0",
        "KV_INDEX_ADDRESS": f"127.0.0.1:{free_port()}",
        "CHECKPOINT": str(checkpoint),
        "MODEL": "demo-fp8",
    }


async def refusal(service: str, values: dict[str, str], **environ: str) -> str:
    """The one line on which a service that does not start says why."""
    prefix = service.upper()
    given = {f"{prefix}_{name}": values[name] for name in REQUIRED[service] if name in values}
    started = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        f"services.{service}",
        env={**os.environ, **given, **environ},
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        stdout, stderr = await asyncio.wait_for(started.communicate(), PATIENCE_S)
    finally:
        if started.returncode is None:
            started.kill()
            await started.wait()
    assert (started.returncode, stdout) == (CONFIG_EXIT, b"")
    (line,) = stderr.decode().splitlines()
    assert line.startswith(f"{service}: ")
    return line


async def refusals(
    services: tuple[str, ...], values: dict[str, str], **environ: str
) -> dict[str, str]:
    lines = await asyncio.gather(*(refusal(name, values, **environ) for name in services))
    return dict(zip(services, lines, strict=True))


async def test_without_nats_none_starts(redis_url: str) -> None:
    """It names the address where nobody answered."""
    address = f"127.0.0.1:{free_port()}"

    for line in (
        await refusals(tuple(REQUIRED), settings(f"nats://{address}", redis_url))
    ).values():
        assert f"no NATS server at {address}" in line


async def test_without_redis_the_index_does_not_start(nats_url: str) -> None:
    """The router would do without it, but not begin like that unnoticed."""
    address = f"127.0.0.1:{free_port()}"

    line = await refusal("kv_index", settings(nats_url, f"redis://{address}/0"))

    assert f"no Redis at {address}" in line


async def test_without_a_checkpoint_none_that_reads_it_starts(
    nats_url: str, redis_url: str
) -> None:
    values = settings(nats_url, redis_url, NOWHERE)

    for line in (await refusals(("gateway", "prefill", "decode"), values)).values():
        assert str(NOWHERE) in line


@pytest.mark.parametrize(
    ("name", "content", "readers"),
    [
        pytest.param(
            "config.json", b'{"vocab_size": ', ("gateway", "prefill", "decode"), id="config"
        ),
        pytest.param("tokenizer.json", b"{}", ("gateway",), id="tokenizer"),
        pytest.param("chat_template.jinja", b"{% if", ("gateway",), id="template"),
        pytest.param(
            "model-00002-of-00002.safetensors", b"half a sh", ("prefill", "decode"), id="weights"
        ),
    ],
)
async def test_a_broken_checkpoint_is_named(
    nats_url: str,
    redis_url: str,
    tmp_path: Path,
    name: str,
    content: bytes,
    readers: tuple[str, ...],
) -> None:
    """A download that was cut off."""
    broken = tmp_path / "broken"
    shutil.copytree(demo.CHECKPOINT, broken)
    (broken / name).write_bytes(content)

    for line in (await refusals(readers, settings(nats_url, redis_url, broken))).values():
        assert str(broken) in line


async def test_missing_settings_are_all_named(nats_url: str, redis_url: str) -> None:
    """At once, not one a start."""
    for service, line in (await refusals(tuple(REQUIRED), {})).items():
        for name in REQUIRED[service]:
            assert f"{service.upper()}_{name} is missing" in line


async def test_without_nixl_no_worker_starts(nats_url: str, redis_url: str, tmp_path: Path) -> None:
    """There is no other way for KV, and no silent one."""
    package = tmp_path / "nixl_cu13"
    package.mkdir()
    (package / "__init__.py").write_text('raise ImportError("libucp.so.0: no such file")\n')

    lines = await refusals(
        ("prefill", "decode"), settings(nats_url, redis_url), PYTHONPATH=str(tmp_path)
    )

    for line in lines.values():
        assert "NIXL" in line and "libucp.so.0" in line
