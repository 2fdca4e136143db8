"""One running stack with the bundled checkpoint, and the clients of .clients to run against it."""

import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from services.local.plan import Options
from services.local.stack import Stack
from tests.clients import programs

# A first request of 50 KB takes this CPU minutes: no client's patience may end first.
DEADLINE_S = 900
HUB_NAME_FOLDER = "models--local--demo"  # known to programs as local/demo


def _report(line: str) -> None:
    sys.stderr.write(f"{line}\n")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """What `make serve` runs, on free ports, for who has the key."""
    folder = tmp_path_factory.mktemp("stack")
    settings = {
        "GATEWAY_API_KEYS_FILE": str(programs.keys_file(folder)),
        "ROUTER_INDEX_TIMEOUT_S": "5",  # a busy machine is no absent index
        "ROUTER_REDIS_TIMEOUT_S": "5",
        "GATEWAY_DEADLINE_S": str(DEADLINE_S),
    }
    async with Stack(Options(port=0, run_folder=folder, settings=settings), _report) as running:
        yield running


@pytest.fixture(scope="session")
def base_url(stack: Stack) -> str:
    """Where OpenAI's clients begin."""
    return stack.base_url


@pytest.fixture(scope="session")
def root_url(stack: Stack) -> str:
    """Where Anthropic's clients begin."""
    return stack.base_url.removesuffix("/v1")


@pytest.fixture
def desk(tmp_path: Path) -> programs.Desk:
    """A home and a folder of its own for one program."""
    return programs.Desk(tmp_path)


@pytest.fixture
def hub_environ(desk: programs.Desk) -> dict[str, str]:
    """The checkpoint's tokenizer in the layout of a model hub's cache, as programs want it that
    take no folder, and the variables that keep them from asking the hub.
    """
    revision = "0" * 40
    cache = desk.home / ".cache" / "huggingface" / "hub" / HUB_NAME_FOLDER
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text(revision)
    snapshot = cache / "snapshots" / revision
    shutil.copytree(programs.CHECKPOINT, snapshot, ignore=shutil.ignore_patterns("*.safetensors*"))
    return {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
