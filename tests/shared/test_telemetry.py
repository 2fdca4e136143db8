import asyncio
import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from services.local.servers import free_port
from shared import telemetry


def spans_of(path: Path) -> dict[str, dict[str, Any]]:
    return {line["name"]: line for line in map(json.loads, path.read_text().splitlines())}


def test_a_span_is_one_json_line_with_its_parent(tmp_path: Path) -> None:
    """The trace test of the whole system reads this file."""
    path = tmp_path / "traces" / "spans.jsonl"
    with (
        telemetry.configure("router", trace_file=path),
        telemetry.span("outer", span_kind="server", **{"farspan.hit_blocks": 3}) as outer,
    ):
        with telemetry.span("inner", reason="least work", nothing=None):
            pass
        outer.set(done=True)

    spans = spans_of(path)
    assert spans["outer"]["parent_id"] is None
    assert spans["outer"]["service"] == "router"
    assert spans["outer"]["attributes"] == {"farspan.hit_blocks": 3, "done": True}
    assert spans["inner"]["parent_id"] == spans["outer"]["span_id"]
    assert spans["inner"]["trace_id"] == spans["outer"]["trace_id"]
    assert spans["inner"]["attributes"] == {"reason": "least work"}
    assert spans["inner"]["start_ns"] <= spans["inner"]["end_ns"]


def test_a_finished_span_is_in_the_file_at_once(tmp_path: Path) -> None:
    """A killed process must leave the spans it had finished."""
    path = tmp_path / "spans.jsonl"
    with telemetry.configure("router", trace_file=path):
        with telemetry.span("first"):
            pass

        assert set(spans_of(path)) == {"first"}


def test_the_context_crosses_processes_in_w3c_headers(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    with telemetry.configure("gateway", trace_file=path):
        with telemetry.span("sender"):
            headers = telemetry.inject()
        with telemetry.attached(headers), telemetry.span("receiver"):
            pass

    spans = spans_of(path)
    assert set(headers) >= {"traceparent"}
    assert spans["receiver"]["parent_id"] == spans["sender"]["span_id"]
    assert telemetry.inject() == {}


def test_without_headers_a_message_starts_its_own_trace(tmp_path: Path) -> None:
    """A handler must not inherit the context of whoever happened to subscribe."""
    path = tmp_path / "spans.jsonl"
    with (
        telemetry.configure("gateway", trace_file=path),
        telemetry.span("subscriber"),
        telemetry.attached({}),
        telemetry.span("handler"),
    ):
        pass

    assert spans_of(path)["handler"]["parent_id"] is None


def test_a_span_may_end_in_another_thread(tmp_path: Path) -> None:
    """A request waits in the queue on the event loop and leaves it on the step thread."""
    path = tmp_path / "spans.jsonl"
    with telemetry.configure("prefill", trace_file=path):
        queued = telemetry.start("queue")
        with telemetry.current(queued), telemetry.span("child"):
            pass
        thread = threading.Thread(target=queued.end)
        thread.start()
        thread.join()
        queued.end()

    spans = spans_of(path)
    assert spans["child"]["parent_id"] == spans["queue"]["span_id"]


async def test_concurrent_requests_keep_their_own_context(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"

    async def request(name: str) -> None:
        with telemetry.span(name):
            await asyncio.sleep(0)
            with telemetry.span(f"{name}.child"):
                await asyncio.sleep(0)

    with telemetry.configure("gateway", trace_file=path):
        await asyncio.gather(*(request(f"r{i}") for i in range(5)))

    spans = spans_of(path)
    for i in range(5):
        assert spans[f"r{i}.child"]["parent_id"] == spans[f"r{i}"]["span_id"]


def test_a_failure_that_was_answered_marks_the_span_too(tmp_path: Path) -> None:
    """No exception leaves the block of a request that was told what went wrong."""
    path = tmp_path / "spans.jsonl"
    with telemetry.configure("gateway", trace_file=path), telemetry.span("answered") as span:
        span.fail()

    assert spans_of(path)["answered"]["failed"]


def test_an_exception_marks_the_span_as_failed(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    with (
        telemetry.configure("router", trace_file=path),
        pytest.raises(KeyError),
        telemetry.span("bad"),
    ):
        raise KeyError("x")

    assert spans_of(path)["bad"]["failed"]


def test_spans_outside_configure_cost_nothing_and_go_nowhere() -> None:
    """Pure code and tests use spans without a set-up."""
    with telemetry.span("nobody") as span:
        span.set(a=1)

    assert telemetry.inject() == {}


def test_log_lines_are_json_and_name_their_trace(capsys: pytest.CaptureFixture[str]) -> None:
    """A line break in a client's id must not forge a second line."""
    with telemetry.configure("router"), telemetry.span("op") as span:
        logging.getLogger("x").info("id %s", "a\nb")
        trace_id = span.headers()["traceparent"].split("-")[1]

    line = json.loads(capsys.readouterr().err)
    assert line["message"] == "id a\nb"
    assert (line["service"], line["level"]) == ("router", "INFO")
    assert line["trace_id"] == trace_id


def test_a_missing_collector_fails_nothing() -> None:
    """The loss of the collector never fails or delays a request."""
    endpoint = f"http://127.0.0.1:{free_port()}/v1/traces"
    with telemetry.configure("router", otlp_endpoint=endpoint), telemetry.span("op"):
        pass
