"""OpenAI's usage object and logprobs objects: shared by chat completions and completions."""

from services.gateway.ask import Json
from services.gateway.dialects.sampled import StreamOptions
from services.gateway.ledger import Usage, total
from services.gateway.text.answer import Delta, LikelyToken, TokenLogprob


def usage_object(usage: Usage) -> Json:
    """The API's usage object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


class StreamUsage:
    """What a stream's chunks say of usage: nothing, null before the last, or what it is now."""

    def __init__(self, options: StreamOptions | None) -> None:
        self.is_told = options is not None and bool(options.include_usage)
        self._is_running = self.is_told and bool(options and options.continuous_usage_stats)
        self._now = Usage()

    def begin(self, usage: Usage) -> None:
        """The prompt's."""
        self._now = usage

    def add(self, delta: Delta) -> None:
        """An answer has grown."""
        if self._is_running:
            grown = Usage(0, 0, delta.num_tokens, delta.num_reasoning_tokens)
            self._now = total((self._now, grown))

    def told_in(self, chunk: Json) -> Json:
        """The chunk, with what it says of usage."""
        if self.is_told:
            chunk["usage"] = usage_object(self._now) if self._is_running else None
        return chunk


def chat_logprob(found: TokenLogprob) -> Json:
    """One entry of a chat choice's logprobs.content."""
    return {
        **_likely(LikelyToken(found.token, found.data, found.logprob or 0.0)),
        "top_logprobs": [_likely(other) for other in found.top],
    }


def _likely(token: LikelyToken) -> Json:
    return {"token": token.token, "logprob": token.logprob, "bytes": list(token.data)}
