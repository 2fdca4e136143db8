"""The npm packages openai and @anthropic-ai/sdk, unchanged."""

from pathlib import Path
from typing import Any

import pytest

from tests.clients.programs import CLIENTS, KEY, MODEL, Desk

pytestmark = pytest.mark.clients

LIMIT_S = 300
HERE = Path(__file__).parent


def told(desk: Desk, script: str, url: str) -> Any:
    command: list[str | Path] = ["node", HERE / script, CLIENTS / "npm", url, KEY, MODEL]
    return desk.run(command, LIMIT_S).require_success().json


def test_openais_client_is_told_the_same_in_both_ways(desk: Desk, base_url: str) -> None:
    """Chat and responses, whole and streamed, the models, and an error it has a class for."""
    heard = told(desk, "openai_sdk.mjs", base_url)

    assert heard["models"] == [MODEL]
    assert heard["whole"] == heard["streamed"]
    assert heard["whole"]["tokens"] > 0
    assert heard["response"]["status"] == "completed"
    assert heard["response_streamed"] == heard["response"] | {"last": "response.completed"}
    assert heard["refusal"] == {"name": "NotFoundError", "status": 404, "code": "model_not_found"}


def test_anthropics_client_is_told_the_same_in_both_ways(desk: Desk, root_url: str) -> None:
    """Messages, whole and streamed, tokens counted as billed, and an error it has a class for."""
    heard = told(desk, "anthropic_sdk.mjs", root_url)

    assert heard["whole"] == heard["streamed"]
    assert heard["whole"]["reason"] == "end_turn"
    assert heard["whole"]["tokens"] > 0
    assert heard["counted"] == heard["billed"]
    assert heard["refusal"] == {"name": "NotFoundError", "status": 404, "type": "not_found_error"}
