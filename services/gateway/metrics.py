"""The gateway's own figures, in the form that Prometheus reads.

Every count comes from the ledger or from an exchange's one ending; labels come from us alone.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from services.gateway.ledger import Usage

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)


class Metrics:
    """One gateway's figures."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        requests = ("operation", "outcome")
        self._requests = self._counter("requests", "Requests by how they ended.", requests)
        self._seconds = self._histogram("request_seconds", "From body to end, whatever the end.")
        self._first_token = self._histogram("time_to_first_token_seconds", "From body to token.")
        self._prompt = self._counter("prompt_tokens", "Prompt tokens of answered requests.")
        self._cached = self._counter("cached_tokens", "Of them found cached.", ("tier",))
        self._completion = self._counter("completion_tokens", "Generated tokens that were told.")
        self._reasoning = self._counter("reasoning_tokens", "Of them reasoning.")
        self.in_flight = Gauge(
            "farspan_gateway_requests_in_flight",
            "Requests between their body and their end.",
            registry=self._registry,
        )

    def ended(self, operation: str, outcome: str, seconds: float) -> None:
        """A request has ended: "ok", "client_left", or what it failed with."""
        self._requests.labels(operation, outcome).inc()
        self._seconds.observe(seconds)

    def first_token(self, seconds: float) -> None:
        """A request's first token has come so long after its body."""
        self._first_token.observe(seconds)

    def served(self, usage: Usage) -> None:
        """A request was answered at this cost."""
        self._prompt.inc(usage.prompt_tokens)
        self._cached.labels("device").inc(usage.cached_tokens)
        self._completion.inc(usage.completion_tokens)
        self._reasoning.inc(usage.reasoning_tokens)

    def text(self) -> bytes:
        """All figures."""
        return generate_latest(self._registry)

    def _counter(self, name: str, meaning: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"farspan_gateway_{name}", meaning, labels, registry=self._registry)

    def _histogram(self, name: str, meaning: str) -> Histogram:
        full_name = f"farspan_gateway_{name}"
        return Histogram(full_name, meaning, buckets=_SECONDS, registry=self._registry)
