"""Real servers for every test: containers where a Docker engine answers, else local binaries."""

import functools
import gc
import socket
import subprocess
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from services.local.servers import NATS_CONF, free_port, nats_command, redis_command
from tests import triton_interpreter  # noqa: F401  # before any test loads triton

_START_S = 10.0


@pytest.fixture(scope="session")
def nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A NATS server with the limits of compose/nats.conf, for the whole run."""
    if _has_docker():
        from testcontainers.core.container import DockerContainer

        container = DockerContainer("nats:2.11-alpine").with_command("--config /nats.conf")
        container.with_volume_mapping(str(NATS_CONF), "/nats.conf", "ro").with_exposed_ports(4222)
        with container:
            host, port = container.get_container_host_ip(), container.get_exposed_port(4222)
            _wait_for(host, int(port))
            yield f"nats://{host}:{port}"
        return
    port = free_port()
    with _process(nats_command(port), port, tmp_path_factory.mktemp("nats")):
        yield f"nats://127.0.0.1:{port}"


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Redis-compatible server, for the whole run; a test uses keys of its own."""
    if _has_docker():
        from testcontainers.core.container import DockerContainer

        with DockerContainer("redis:7-alpine").with_exposed_ports(6379) as container:
            host, port = container.get_container_host_ip(), container.get_exposed_port(6379)
            _wait_for(host, int(port))
            yield f"redis://{host}:{port}/0"
        return
    port = free_port()
    folder = tmp_path_factory.mktemp("redis")
    with _process(redis_command(port, folder), port, folder):
        yield f"redis://127.0.0.1:{port}/0"


@functools.cache
def _has_docker() -> bool:
    """Whether an engine answers: a client binary alone says nothing."""
    import docker
    from docker.errors import DockerException

    with warnings.catch_warnings(category=ResourceWarning, action="ignore"):
        try:
            client = docker.from_env(timeout=2)
            client.ping()
            client.close()
        except DockerException:
            return False
        finally:
            gc.collect()  # the library leaves its socket open when nobody answers
    return True


@contextmanager
def _process(command: list[str], port: int, folder: Path) -> Iterator[None]:
    log = folder / "server.log"
    with log.open("wb") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        _wait_for("127.0.0.1", port)
        yield
    except TimeoutError as error:
        raise RuntimeError(f"{command[0]} did not start:\n{log.read_text()}") from error
    finally:
        server.kill()
        server.wait()


def _wait_for(host: str, port: int) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        try:
            socket.create_connection((host, port), timeout=1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"nobody listens on {host}:{port}") from None
            time.sleep(0.01)
