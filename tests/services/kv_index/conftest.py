from collections.abc import Iterator
from pathlib import Path

import pytest

from services.local.servers import free_port, redis_command
from tests.local_server import LocalServer


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[LocalServer]:
    port = free_port()
    server = LocalServer(redis_command(port, tmp_path), port, tmp_path)
    server.start()
    yield server
    server.kill()
