from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import pytest
from redis.exceptions import AuthenticationError

from services.local.servers import free_port, redis_command
from shared.access import Access
from shared.errors import ConfigError
from shared.redis_link import open_redis
from tests.local_server import LocalServer


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """A Redis that knows a password, and a user with another one."""
    conf = tmp_path / "redis.conf"
    conf.write_text("requirepass right\nuser alice on >hers ~* &* +@all\n")
    port = free_port()
    server = LocalServer(redis_command(port, tmp_path, conf), port, tmp_path)
    server.start()
    yield server.address
    server.kill()


@pytest.mark.parametrize("login", ["right", "alice:hers"])
async def test_a_password_or_a_user_comes_from_a_file(
    login: str, address: str, tmp_path: Path
) -> None:
    file = tmp_path / "credentials"
    file.write_text(f"{login}\n")
    async with aclosing(
        open_redis(f"redis://{address}/0", Access(file), connect_timeout_s=2)
    ) as redis:
        assert await redis.ping()


@pytest.mark.parametrize("login", ["wr0ng", "alice:wr0ng", "bob:hers"])
async def test_a_wrong_one_is_refused_without_being_told(
    login: str, address: str, tmp_path: Path
) -> None:
    file = tmp_path / "credentials"
    file.write_text(f"{login}\n")
    async with aclosing(
        open_redis(f"redis://{address}/0", Access(file), connect_timeout_s=2)
    ) as redis:
        with pytest.raises(AuthenticationError) as refused:
            await redis.ping()
    assert "wr0ng" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "files", "told"),
    [
        ("redis://user:s3cret@127.0.0.1:1/0", {"credentials_file": "x"}, "URL and in a file"),
        ("redis://127.0.0.1:1/0", {"cert_file": "x", "key_file": "x"}, "needs rediss://"),
        ("rediss://127.0.0.1:1/0", {"cert_file": "y", "key_file": "x"}, "there is no file"),
        ("redis://user:s3/cret@127.0.0.1:1/0", {}, "cannot be used"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(
    url: str, files: dict[str, str], told: str, tmp_path: Path
) -> None:
    (tmp_path / "x").write_text("a:b")
    access = Access(**{key: tmp_path / name for key, name in files.items()})
    with pytest.raises(ConfigError, match=told) as refused:
        open_redis(url, access, connect_timeout_s=1)
    assert "s3" not in str(refused.value)
