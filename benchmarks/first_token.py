"""A client that measures when the first token arrives, over one kept connection."""

import json
import time
from collections.abc import Sequence
from typing import Self

import httpx


class FirstTokenClient:
    """Streams completions of token-id prompts from an OpenAI-compatible server."""

    def __init__(self, base_url: str, model: str) -> None:
        self._model = model
        self._client = httpx.AsyncClient(base_url=base_url, timeout=60)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._client.aclose()

    async def first_token_s(self, prompt: Sequence[int]) -> float:
        """From the request to the event with the first text; the answer is read to its end."""
        body = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": 4,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        first_s = None
        begin = time.perf_counter()
        async with self._client.stream("POST", "completions", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if first_s is None and _has_text(line):
                    first_s = time.perf_counter() - begin
        if first_s is None:
            raise RuntimeError("the server sent no text")
        return first_s


def _has_text(line: str) -> bool:
    if not line.startswith("data: {"):
        return False
    event = json.loads(line.removeprefix("data: "))
    if "error" in event:
        raise RuntimeError(f"the server answered {event['error']}")
    return any(choice["text"] for choice in event["choices"])
