"""Schemathesis, on the gateway's own OpenAPI document."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from services.local.stack import Stack
from tests.clients import fuzz

pytestmark = pytest.mark.clients

LEAST_CASES = 5_000


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def short_stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """A stack of its own."""
    async with fuzz.short_stack(tmp_path_factory.mktemp("short_stack")) as running:
        yield running


def test_no_generated_case_is_a_server_error(short_stack: Stack, tmp_path: Path) -> None:
    fuzzed = fuzz.fuzz(short_stack.base_url.removesuffix("/v1"), tmp_path)

    assert fuzzed.server_errors == 0, fuzzed.output[-8000:]
    assert fuzzed.cases >= LEAST_CASES
    answered = {label.rsplit(" ", 1)[0] for label in fuzzed.statuses if label.endswith(" 200")}
    generating = ("chat/completions", "completions", "responses", "messages")
    assert {f"POST /v1/{path}" for path in generating} <= answered
