"""A chat request's prompt, made by the gateway's own code without a gateway."""

import json
from typing import Any

from services.gateway.intake import take_in
from services.gateway.dialects.openai import ChatRequest, parse
from services.gateway.text.tokenizer import Tokenizer
from shared import block_hash


def prompt_of(tokenizer: Tokenizer, body: dict[str, Any]) -> list[int]:
    """The token ids of a request with these fields."""
    request = parse(ChatRequest, json.dumps({"model": "demo-fp8", **body}).encode())
    intake = take_in(request, tokenizer, b"", max_tokens=1 << 20)
    return block_hash.token_ids(intake.prompt.token_bytes)
