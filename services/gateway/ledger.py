"""What a request has cost, in tokens: the one ledger, for response, metric, span and log.

Pure. A prompt counts once, however many answers and attempts it took.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Usage:
    """Tokens of one request; also of one of its answers, where the prompt may count 0."""

    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, found by prefill in its device pool
    completion_tokens: int = 0
    reasoning_tokens: int = 0  # of the completion

    @property
    def total_tokens(self) -> int:
        """Prompt and completion."""
        return self.prompt_tokens + self.completion_tokens


def total(usages: Iterable[Usage]) -> Usage:
    """The sum."""
    found = list(usages)
    return Usage(
        sum(usage.prompt_tokens for usage in found),
        sum(usage.cached_tokens for usage in found),
        sum(usage.completion_tokens for usage in found),
        sum(usage.reasoning_tokens for usage in found),
    )
