"""Why a request went where it went can be asked, and comes out the same again."""

import secrets
import time
from typing import Any

import httpx
import openai
import pytest

from services.local.__main__ import main
from services.local.stack import Stack
from tests.system.conftest import DEBUG_TOKEN, DECISIONS_FILE


def decision_of(stack: Stack, name: str) -> dict[str, Any]:
    found = httpx.get(
        f"{stack.base_url.removesuffix('/v1')}/debug/decisions/{name}",
        headers={"Authorization": f"Bearer {DEBUG_TOKEN}"},
        timeout=30,
    )
    assert found.status_code == 200, found.text
    (decision,) = found.json()["decisions"]
    assert isinstance(decision, dict)
    return decision


def test_each_turn_of_a_chat_can_be_asked_why_it_went_where_it_went(
    stack: Stack, client: openai.OpenAI, capsys: pytest.CaptureFixture[str]
) -> None:
    """Inputs, scores and reason, by the ids the client has; the second turn goes for its hit."""
    words = f"{secrets.token_hex(8)} " + "What does river mean? " * 60
    messages: list[Any] = [{"role": "user", "content": words}]

    def ask() -> tuple[str, str]:
        answer = client.chat.completions.with_raw_response.create(
            model="demo-fp8", messages=messages, max_tokens=4, extra_body={"priority": 1}
        )
        return answer.parse().id, answer.headers["x-request-id"]

    first = decision_of(stack, ask()[0])
    time.sleep(0.5)  # block events reach the index
    response_id, request_id = ask()
    second = decision_of(stack, response_id)

    assert decision_of(stack, request_id) == second
    assert words not in str(second)
    assert second["inputs"]["request"]["priority"] == 1
    assert {score["role"] for score in second["outcome"]["scores"]} == {
        "ROLE_PREFILL",
        "ROLE_DECODE",
    }
    assert "prefillHitTokens" not in first["outcome"]["placement"]
    placement = second["outcome"]["placement"]
    assert placement["prefillHitTokens"] > 100
    assert f"hit {placement['prefillHitTokens']} tokens" in placement["reason"]

    time.sleep(0.5)
    assert main(["replay-decisions", str(stack.folder / DECISIONS_FILE)]) == 0
    assert "decisions, all the same" in capsys.readouterr().out
