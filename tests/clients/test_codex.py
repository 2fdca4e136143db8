"""Codex, unchanged, with the service as a model provider of its configuration."""

import json

import pytest

from tests.clients.programs import KEY, MODEL, Desk, npm_package

pytestmark = pytest.mark.clients

LIMIT_S = 900  # its first request has some 13,000 tokens of this model
# The demo model may go on for ever; Codex sets no bound, and takes an answer that ended at the
# service's own for a failure.
ATTEMPTS = 4
CUT_SHORT = "Incomplete response returned, reason: max_output_tokens"
CONFIG = """
model = "{model}"
model_provider = "farspan"
model_context_window = 65536

[model_providers.farspan]
name = "Farspan"
base_url = "{base_url}"
wire_api = "responses"
env_key = "FARSPAN_KEY"
request_max_retries = 0
stream_max_retries = 0
stream_idle_timeout_ms = {idle_ms}

[analytics]
enabled = false
"""


def test_a_one_shot_prompt_is_answered(desk: Desk, base_url: str) -> None:
    config = CONFIG.format(model=MODEL, base_url=base_url, idle_ms=LIMIT_S * 1000)
    (desk.home / ".codex").mkdir()
    (desk.home / ".codex" / "config.toml").write_text(config)

    command = ["node", npm_package("@openai/codex/bin/codex.js"), "exec", "--json"]
    command += ["--skip-git-repo-check", "--ephemeral", "--sandbox", "read-only"]
    command += ["What does river mean?"]
    for _ in range(ATTEMPTS):
        finished = desk.run(command, LIMIT_S, {"FARSPAN_KEY": KEY})
        if CUT_SHORT not in finished.out:
            break
    told = [json.loads(line) for line in finished.require_success().out.splitlines()]

    assert [event["type"] for event in told][-1] == "turn.completed"
    assert told[-1]["usage"]["output_tokens"] > 0
    items = [event["item"] for event in told if event["type"] == "item.completed"]
    assert [item["text"] for item in items if item["type"] == "agent_message"][-1]
