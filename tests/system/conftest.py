"""One running stack for the tests of this folder: the five services with the bundled checkpoint."""

import sys
from collections.abc import AsyncIterator, Iterator

import openai
import pytest
import pytest_asyncio

from services.local.plan import Options
from services.local.stack import Stack

DEBUG_TOKEN = "let-me-see"
DECISIONS_FILE = "decisions.jsonl"


def _report(line: str) -> None:
    sys.stderr.write(f"{line}\n")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """What `make serve` runs, on free ports, with FP8 weights and FP8 KV."""
    folder = tmp_path_factory.mktemp("stack")
    settings = {
        "ROUTER_INDEX_TIMEOUT_S": "5",  # a busy machine is no absent index
        "ROUTER_REDIS_TIMEOUT_S": "5",
        "ROUTER_DECISIONS_FILE": str(folder / DECISIONS_FILE),
        "GATEWAY_DEBUG_TOKEN": DEBUG_TOKEN,
    }
    options = Options(port=0, run_folder=folder, settings=settings)
    async with Stack(options, _report) as running:
        yield running


@pytest.fixture(scope="session")
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    """The official client, unchanged; a retry would hide a failure."""
    with openai.OpenAI(base_url=stack.base_url, api_key="none", max_retries=0) as made:
        yield made


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def small_stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """A stack with room for 2,048 tokens and steps of 128: requests wait, evict and are split."""
    folder = tmp_path_factory.mktemp("small_stack")
    settings = {
        "PREFILL_NUM_BLOCKS": "32",
        "PREFILL_CHUNK_TOKENS": "128",
        "DECODE_HOST_POOL_MIB": "12",
        "DECODE_DEVICE_POOL_MIB": "6",
        "DECODE_INDEX_POOL_MIB": "2",
        "DECODE_HOT_ROWS": "320",
    }
    options = Options(port=0, run_folder=folder, settings=settings)
    async with Stack(options, _report) as running:
        yield running
