"""Traces of a running stack, read back from its trace file as trees."""

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Span:
    """A finished span."""

    trace_id: str
    span_id: str
    parent_id: str | None
    name: str
    service: str
    start_ns: int
    end_ns: int
    failed: bool
    attributes: dict[str, Any]


@dataclass(frozen=True)
class Trace:
    """All finished spans of one trace."""

    spans: tuple[Span, ...]

    def named(self, name: str) -> Span:
        (span,) = self.all_named(name)
        return span

    def all_named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]

    def parent_of(self, span: Span) -> Span | None:
        return next((other for other in self.spans if other.span_id == span.parent_id), None)

    def parents(self) -> dict[str, set[str]]:
        """Names of the parents of the spans of each name; "" is a parent outside the stack."""
        found: dict[str, set[str]] = {}
        for span in self.spans:
            parent = self.parent_of(span)
            found.setdefault(span.name, set()).add("" if parent is None else parent.name)
        return found

    @property
    def root(self) -> Span:
        """The one span without a parent in the stack."""
        (root,) = [span for span in self.spans if self.parent_of(span) is None]
        return root

    @property
    def names(self) -> set[str]:
        return {span.name for span in self.spans}

    @property
    def services(self) -> set[str]:
        return {span.service for span in self.spans}


class TraceFile:
    """The spans that a stack's processes append to their common file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def traces(self) -> dict[str, Trace]:
        """Every trace so far, by its id."""
        spans: dict[str, list[Span]] = {}
        for span in self._spans():
            spans.setdefault(span.trace_id, []).append(span)
        return {trace_id: Trace(tuple(found)) for trace_id, found in spans.items()}

    async def trace_id_of(self, response_id: str, within_s: float = 5.0) -> str:
        """The trace of an answer; its root may end just after the answer's last byte."""
        deadline_s = time.monotonic() + within_s
        while True:
            for span in self._spans():
                if span.attributes.get("gen_ai.response.id") == response_id:
                    return span.trace_id
            assert time.monotonic() < deadline_s, f"no span names {response_id}"
            await asyncio.sleep(0.05)

    async def trace(self, trace_id: str, *names: str, within_s: float = 5.0) -> Trace:
        """A trace as soon as these spans have ended: a worker's last may end after the answer."""
        deadline_s = time.monotonic() + within_s
        while True:
            trace = self.traces().get(trace_id, Trace(()))
            missing = set(names) - trace.names
            if not missing:
                return trace
            assert time.monotonic() < deadline_s, f"{missing} are missing beside {trace.names}"
            await asyncio.sleep(0.05)

    def _spans(self) -> Iterator[Span]:
        for line in self._path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):  # else it is just being written
                yield Span(**json.loads(line))
