"""One running stack for the tests of this folder: the five services with the bundled checkpoint."""

import sys
from collections.abc import AsyncIterator, Iterator

import openai
import pytest
import pytest_asyncio

from services.local.plan import Options
from services.local.stack import Stack


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """What `make serve` runs, on free ports, with FP8 weights and FP8 KV."""
    folder = tmp_path_factory.mktemp("stack")
    async with Stack(Options(port=0, run_folder=folder), sys.stderr.write) as running:
        yield running


@pytest.fixture(scope="session")
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    """The official client, unchanged; a retry would hide a failure."""
    with openai.OpenAI(base_url=stack.base_url, api_key="none", max_retries=0) as made:
        yield made
