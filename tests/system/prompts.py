"""A chat request's prompt, made by the gateway's own code without a gateway."""

import json
from typing import Any

from services.gateway.dialects.chat import read
from services.gateway.intake import Limits, take_in
from services.gateway.text.tokenizer import Tokenizer
from shared import block_hash


def prompt_of(tokenizer: Tokenizer, body: dict[str, Any]) -> list[int]:
    """The token ids of a request with these fields."""
    ask = read(json.dumps({"model": "demo-fp8", **body}).encode()).ask()
    intake = take_in(ask, tokenizer, "", b"", Limits(1 << 20, 1 << 20, 16))
    return block_hash.token_ids(intake.prompts[0].token_bytes)
