"""Traces and logs: the only place that knows OpenTelemetry.

Every process calls `configure` once. Spans go to a JSON-lines file, to an OTLP/HTTP collector, to
both, or nowhere; a request never waits for a collector and never fails with one.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from opentelemetry import context, trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    SimpleSpanProcessor,
    SpanExporter,
    SpanExportResult,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from shared import logs

AttributeValue = str | bool | int | float | Sequence[str] | Sequence[int] | Sequence[float]
Kind = Literal["internal", "server", "client"]

_KINDS = {
    "internal": trace.SpanKind.INTERNAL,
    "server": trace.SpanKind.SERVER,
    "client": trace.SpanKind.CLIENT,
}
_OTLP_TIMEOUT_S = 2.0  # a collector that is slower than this loses spans, not requests
_W3C = TraceContextTextMapPropagator()


class Span:
    """A span in progress."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span

    def set(self, **attributes: AttributeValue | None) -> None:
        """Add attributes; those that are None are left out."""
        self._span.set_attributes(_present(attributes))

    def fail(self) -> None:
        """Mark it as failed, where no exception leaves its block to do so."""
        self._span.set_status(trace.StatusCode.ERROR)

    def headers(self) -> dict[str, str]:
        """The W3C trace context that makes the receiver's spans children of this one."""
        return _headers(trace.set_span_in_context(self._span))

    def end(self) -> None:
        """Finish a span from `start`; ending twice is harmless."""
        if self._span.is_recording():
            self._span.end()


class SpanFile(SpanExporter):
    """Finished spans as JSON lines, in a file that several processes may share.

    A line has trace_id, span_id, parent_id, name, service, start_ns, end_ns, failed, attributes.
    Each is one appending write, so lines of different processes do not mix.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Write the spans' lines."""
        for span in spans:
            os.write(self._fd, (json.dumps(_line(span), ensure_ascii=False) + "\n").encode())
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Close the file."""
        os.close(self._fd)


class _Process:
    """What `configure` has set up in this process: like its loggers, there is one."""

    tracer: trace.Tracer = trace.NoOpTracer()


@contextmanager
def configure(
    service: str, *, trace_file: Path | None = None, otlp_endpoint: str = ""
) -> Iterator[None]:
    """Logs to stderr, spans to the places given; when the block ends, all spans are out."""
    provider = TracerProvider(resource=Resource({"service.name": service}), shutdown_on_exit=False)
    if trace_file is not None:
        provider.add_span_processor(SimpleSpanProcessor(SpanFile(trace_file)))
    if otlp_endpoint:
        exporter = OTLPSpanExporter(endpoint=otlp_endpoint, timeout=_OTLP_TIMEOUT_S)
        provider.add_span_processor(BatchSpanProcessor(exporter))
    before = _Process.tracer
    _Process.tracer = provider.get_tracer("farspan")
    try:
        with logs.to_stderr(service, _log_fields):
            yield
    finally:
        _Process.tracer = before
        provider.shutdown()


@contextmanager
def span(
    name: str, *, span_kind: Kind = "internal", **attributes: AttributeValue | None
) -> Iterator[Span]:
    """A child of the current context's span, current itself inside the block.

    An exception that leaves the block marks the span as failed.
    """
    started = start(name, span_kind=span_kind, **attributes)
    try:
        with current(started):
            yield started
    finally:
        started.end()


def start(name: str, *, span_kind: Kind = "internal", **attributes: AttributeValue | None) -> Span:
    """A span that begins here and ends with its `end()`, perhaps in another task or thread."""
    return Span(
        _Process.tracer.start_span(name, kind=_KINDS[span_kind], attributes=_present(attributes))
    )


@contextmanager
def current(started: Span) -> Iterator[None]:
    """Inside the block `started` is the parent of new spans; it is not ended."""
    with trace.use_span(started._span, end_on_exit=False):
        yield


def inject() -> dict[str, str]:
    """The current trace context as W3C headers; empty outside any span."""
    return _headers(context.get_current())


@contextmanager
def attached(headers: Mapping[str, str]) -> Iterator[None]:
    """Inside the block, spans are children of the sender's span that `headers` carry."""
    token = context.attach(_W3C.extract(dict(headers), context=context.Context()))
    try:
        yield
    finally:
        context.detach(token)


def _headers(source: context.Context) -> dict[str, str]:
    carrier: dict[str, str] = {}
    _W3C.inject(carrier, context=source)
    return carrier


def _present(attributes: Mapping[str, AttributeValue | None]) -> dict[str, AttributeValue]:
    return {name: value for name, value in attributes.items() if value is not None}


def _log_fields() -> dict[str, str]:
    """Ties a log line to its trace."""
    span_context = trace.get_current_span().get_span_context()
    if not span_context.is_valid:
        return {}
    return {
        "trace_id": trace.format_trace_id(span_context.trace_id),
        "span_id": trace.format_span_id(span_context.span_id),
    }


def _line(span: ReadableSpan) -> dict[str, object]:
    identity = span.get_span_context()
    if identity is None:
        raise TypeError(f"span {span.name} was never started")
    return {
        "trace_id": trace.format_trace_id(identity.trace_id),
        "span_id": trace.format_span_id(identity.span_id),
        "parent_id": trace.format_span_id(span.parent.span_id) if span.parent else None,
        "name": span.name,
        "service": span.resource.attributes["service.name"],
        "start_ns": span.start_time,
        "end_ns": span.end_time,
        "failed": span.status.status_code is trace.StatusCode.ERROR,
        "attributes": dict(span.attributes or {}),
    }
