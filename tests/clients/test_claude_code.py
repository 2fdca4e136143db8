"""Claude Code, unchanged, told only where the service is."""

import pytest

from tests.clients.programs import KEY, MODEL, Desk, npm_package

pytestmark = pytest.mark.clients

LIMIT_S = 900  # its first request has some 16,000 tokens of this model
# The demo model may go on for ever. Claude Code has it continue three times, then fails.
MAX_OUTPUT_TOKENS = 1024
ATTEMPTS = 2
CUT_SHORT = "output token maximum"
PROGRAM = "@anthropic-ai/claude-code-linux-x64/claude"


def test_a_one_shot_prompt_is_answered(desk: Desk, root_url: str) -> None:
    environ = {
        "ANTHROPIC_BASE_URL": root_url,
        "ANTHROPIC_AUTH_TOKEN": KEY,
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(MAX_OUTPUT_TOKENS),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_RETRIES": "0",
        "API_TIMEOUT_MS": str(LIMIT_S * 1000),
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_TELEMETRY": "1",
    }

    command = [npm_package(PROGRAM), "-p", "What does river mean?"]
    command += ["--output-format", "json"]
    for _ in range(ATTEMPTS):
        finished = desk.run(command, LIMIT_S, environ)
        if CUT_SHORT not in finished.out:
            break
    told = finished.require_success().json

    assert told["is_error"] is False
    assert told["result"]
    assert told["usage"]["output_tokens"] > 0
