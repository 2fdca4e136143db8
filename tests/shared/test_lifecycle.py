import asyncio
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from shared.errors import ConfigError
from shared.lifecycle import EXIT_CONFIG, Stopping, health, run

SERVICE = """
import asyncio, sys
from shared.lifecycle import run

async def main(stopping):
    print("ready", flush=True)
    await stopping.wait()
    print("stopping", flush=True)
    if "stuck" in sys.argv:
        await asyncio.Event().wait()

sys.exit(run("test", main))
"""


def start(*arguments: str) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", SERVICE, *arguments], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_service_in_order(number: signal.Signals) -> None:
    with start() as process:
        process.send_signal(number)
        output, _ = process.communicate(timeout=10)

    assert output == "stopping\n"
    assert process.returncode == 0


def test_a_second_signal_cancels_a_stuck_stop() -> None:
    """An operator who asks twice means it."""
    with start("stuck") as process:
        assert process.stdout is not None
        process.terminate()
        assert process.stdout.readline() == "stopping\n"
        process.terminate()

        assert process.wait(timeout=10) == 1


def test_a_config_error_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    """A traceback would hide what the operator has to change."""

    async def main(stopping: Stopping) -> None:
        async with asyncio.TaskGroup():
            raise ConfigError("ROUTER_NATS_URL is missing")

    assert run("router", main) == EXIT_CONFIG
    assert capsys.readouterr().err == "router: ROUTER_NATS_URL is missing\n"


def test_a_bug_is_not_hidden() -> None:
    async def main(stopping: Stopping) -> None:
        raise KeyError("bug")

    with pytest.raises(KeyError):
        run("router", main)


async def get(port: int, path: str, method: str = "GET") -> tuple[int, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)

    def fetch() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    return await asyncio.to_thread(fetch)


async def test_readiness_tells_the_state_and_its_reason() -> None:
    """503 with a reason: a person reads it first, a machine second."""
    state = (False, "no decode worker")
    async with health("127.0.0.1", 0, lambda: state) as port:
        waiting = await get(port, "/readyz")
        state = (True, "ready")
        ready = await get(port, "/readyz")
        alive = await get(port, "/livez")
        unknown = await get(port, "/secrets")
        bodiless = await get(port, "/livez", "HEAD")

    assert waiting == (503, '{"ok": false, "reason": "no decode worker"}')
    assert ready[0] == 200
    assert alive[0] == 200
    assert unknown[0] == 404
    assert bodiless == (200, "")


async def test_metrics_are_told_in_prometheus_own_words() -> None:
    """And only by a service that has some."""
    metrics = {"farspan_kv_index_blocks": 12, "farspan_kv_index_lookups_total": 1e6}
    async with (
        health("127.0.0.1", 0, lambda: (True, ""), lambda: metrics) as port,
        health("127.0.0.1", 0, lambda: (True, "")) as other,
    ):
        told = await get(port, "/metrics")
        assert (await get(other, "/metrics"))[0] == 404

    assert told == (
        200,
        "# TYPE farspan_kv_index_blocks gauge\nfarspan_kv_index_blocks 12\n"
        "# TYPE farspan_kv_index_lookups_total counter\nfarspan_kv_index_lookups_total 1000000\n",
    )


async def test_the_probe_answers_while_the_loop_is_busy() -> None:
    """A long step must not get the process killed."""
    async with health("127.0.0.1", 0, lambda: (True, "ready")) as port:
        answer = asyncio.create_task(get(port, "/livez"))
        await asyncio.sleep(0)
        time.sleep(0.2)  # noqa: ASYNC251  # the busy loop

        assert (await answer)[0] == 200


async def test_a_taken_port_is_a_config_error() -> None:
    async with health("127.0.0.1", 0, lambda: (True, "")) as port:
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
            async with health("127.0.0.1", port, lambda: (True, "")):
                pass
