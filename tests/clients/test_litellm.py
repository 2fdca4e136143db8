"""LiteLLM, as a library that calls the service and as a proxy before it."""

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anthropic
import httpx
import openai
import pytest

from services.local.servers import free_port
from tests.clients import programs
from tests.clients.programs import KEY, MODEL, Desk

pytestmark = pytest.mark.clients

LIMIT_S = 300
START_S = 120  # it imports for half a minute on two cores
QUIET = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_TELEMETRY": "False"}
MASTER_KEY = f"sk-{secrets.token_hex(32)}"  # it starts with no weak one
QUESTION = "What does river mean?"
CONFIG = """
model_list:
- model_name: {model}
  litellm_params:
    model: openai/{model}
    api_base: {base_url}
    api_key: {key}
litellm_settings:
  num_retries: 0
  request_timeout: 300
"""


def test_the_library_is_told_the_same_in_both_ways(desk: Desk, root_url: str) -> None:
    """OpenAI's API and Anthropic's, whole and streamed, and the responses API."""
    script = Path(__file__).with_name("litellm_calls.py")
    command: list[str | Path] = [programs.python_of("litellm"), script, root_url, KEY, MODEL]

    heard = desk.run(command, LIMIT_S, QUIET).require_success().json

    for provider in ("openai", "anthropic"):
        assert heard[provider]["whole"] == heard[provider]["streamed"]
        assert heard[provider]["whole"]["tokens"] > 0
    assert heard["openai"] == heard["anthropic"]
    assert heard["response"]["status"] == "completed"
    assert heard["response"]["kinds"][-1] == "message"


def test_clients_are_served_through_its_proxy(desk: Desk, base_url: str) -> None:
    """Chat, streamed, as OpenAI's client asks; messages, as Anthropic's does."""
    with proxied(desk, base_url) as url:
        with openai.OpenAI(base_url=f"{url}/v1", api_key=MASTER_KEY, max_retries=0) as client:
            chunks = list(
                client.chat.completions.create(
                    model=MODEL,
                    messages=[{"role": "user", "content": QUESTION}],
                    max_tokens=200,
                    temperature=0,
                    stream=True,
                    stream_options={"include_usage": True},
                )
            )
        with anthropic.Anthropic(base_url=url, auth_token=MASTER_KEY, max_retries=0) as client:
            message = client.messages.create(
                model=MODEL,
                messages=[{"role": "user", "content": QUESTION}],
                max_tokens=200,
                extra_body={"temperature": 0},
            )

    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert [reason for reason in reasons if reason] == ["stop"]
    (usage,) = [chunk.usage for chunk in chunks if chunk.usage]
    assert message.stop_reason == "end_turn"
    assert message.usage.output_tokens == usage.completion_tokens > 0


@contextmanager
def proxied(desk: Desk, base_url: str) -> Iterator[str]:
    """Its proxy before the service, while the block runs."""
    port = free_port()
    config = desk.work / "config.yaml"
    config.write_text(CONFIG.format(model=MODEL, base_url=base_url, key=KEY))
    program = programs.program_of("litellm-proxy", "litellm")
    command = [str(program), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
    log = desk.work / "proxy.log"
    process = desk.start(command, {**QUIET, "LITELLM_MASTER_KEY": MASTER_KEY}, log)
    try:
        url = f"http://127.0.0.1:{port}"
        deadline_s = time.monotonic() + START_S
        while not _answers(f"{url}/health/liveliness"):
            is_late = time.monotonic() > deadline_s
            assert process.poll() is None and not is_late, log.read_text()[-4000:]
            time.sleep(0.5)
        yield url
    finally:
        programs.end(process)
        process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.TransportError:
        return False
