"""The processes that are measured: our gateway with its NATS, and LiteLLM's proxy."""

import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from socket import create_connection

from benchmarks.report import ROOT
from services.local.servers import free_port, free_ports, nats_command

_START_S = 60.0
_STOP_S = 10.0


@contextmanager
def nats() -> Iterator[str]:
    """A NATS server inside the block; yields its address."""
    port = free_port()
    with _running(nats_command(port)):
        _wait_until(lambda: _listens(port))
        yield f"nats://127.0.0.1:{port}"


@dataclass(frozen=True)
class Gateway:
    """A gateway that runs."""

    port: int
    health_port: int
    process_id: int

    def wait_until_ready(self) -> None:
        """Return when it has heard of workers."""
        _wait_until(lambda: _answers(f"http://127.0.0.1:{self.health_port}/readyz"))

    def cpu_s(self) -> float:
        """Seconds of CPU that the process has used."""
        fields = Path(f"/proc/{self.process_id}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def gateway(nats_url: str, checkpoint: Path, model: str) -> Iterator[Gateway]:
    """Our gateway as it is deployed, inside the block; it becomes ready once workers speak."""
    port, health_port = free_ports(2)
    settings = {
        "GATEWAY_HOST": "127.0.0.1",
        "GATEWAY_PORT": str(port),
        "GATEWAY_HEALTH_PORT": str(health_port),
        "GATEWAY_NATS_URL": nats_url,
        "GATEWAY_CHECKPOINT": str(checkpoint),
        "GATEWAY_MODEL": model,
    }
    command = [sys.executable, "-m", "services.gateway"]
    with _running(command, {**os.environ, **settings}) as process:
        yield Gateway(port, health_port, process.pid)


@contextmanager
def litellm(backend_port: int, model: str, program: Path) -> Iterator[int]:
    """LiteLLM's proxy before an OpenAI-compatible server, one worker process; yields its port."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(
            f"model_list:\n- model_name: {model}\n  litellm_params:\n"
            f"    model: openai/{model}\n    api_key: none\n"
            f"    api_base: http://127.0.0.1:{backend_port}/v1\n"
        )
        command = [str(program), "--config", str(path), "--host", "127.0.0.1", "--port", str(port)]
        environ = {
            **os.environ,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LITELLM_LOG": "ERROR",
            "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
        }
        with _running([*command, "--num_workers", "1"], environ):
            _wait_until(lambda: _answers(f"http://127.0.0.1:{port}/health/liveliness"))
            yield port


@contextmanager
def _running(
    command: Sequence[str], environ: Mapping[str, str] | None = None
) -> Iterator["subprocess.Popen[bytes]"]:
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, env=environ, cwd=ROOT, stdout=log, stderr=log)
        try:
            yield process
        except BaseException:
            log.seek(0)
            print(log.read().decode(errors="replace")[-3000:])
            raise
        finally:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until(condition: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + _START_S
    while not condition():
        if time.monotonic() > give_up_s:
            raise TimeoutError("a process of the benchmark does not start")
        time.sleep(0.05)


def _listens(port: int) -> bool:
    try:
        with closing(create_connection(("127.0.0.1", port), timeout=1)):
            return True
    except OSError:
        return False


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except (OSError, urllib.error.URLError):
        return False
