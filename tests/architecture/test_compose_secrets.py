"""What compose makes of its secret, with the servers that are here: no Docker engine is needed."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from redis import Redis
from redis.exceptions import AuthenticationError

from services.gateway.door.keys import parse
from services.local.servers import NATS_CONF, free_port, nats_command, redis_command
from shared.access import Access
from shared.bus import connect
from shared.errors import ConfigError
from tests.local_server import LocalServer

FOLDER = Path(__file__).parents[2] / "compose"
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text())
SERVERS = {"NATS_URL": "NATS", "REDIS_URL": "REDIS", "KV_INDEX_ADDRESS": "KV_INDEX"}


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that containers mount, one below the limits of NATS as there."""
    folder = tmp_path_factory.mktemp("root")
    (folder / "nats.conf").write_text(NATS_CONF.read_text())
    made = folder / "secret"
    made.mkdir()
    for _ in range(2):
        subprocess.run(["/bin/sh", str(FOLDER / "make_secret.sh"), str(made)], check=True)
    return made


@pytest.fixture
def servers(secret: Path, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """NATS and Redis as compose runs them."""
    nats_port, redis_port = free_port(), free_port()
    conf = secret / "nats-here.conf"
    monitoring = f'http: "127.0.0.1:{free_port()}"'
    conf.write_text(
        (secret / "nats.conf").read_text().replace('http: "127.0.0.1:8222"', monitoring)
    )
    nats = LocalServer(nats_command(nats_port, conf), nats_port, tmp_path)
    redis = LocalServer(
        redis_command(redis_port, tmp_path, secret / "redis.conf"), redis_port, tmp_path
    )
    try:
        nats.start()
        redis.start()
        yield nats.address, redis.address
    finally:
        nats.kill()
        redis.kill()


async def test_who_has_the_secret_comes_in_and_nobody_else(
    servers: tuple[str, str], secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nats, redis = servers
    host, _, port = redis.partition(":")
    text = (secret / "secret").read_text().strip()

    async with connect(f"nats://{nats}", "known", Access(secret / "secret")) as bus:
        assert await bus.answers(2.0)
    with Redis(host, int(port), password=text) as known:
        assert known.ping()

    monkeypatch.setattr("shared.bus._CONNECT_S", 0.5)
    with pytest.raises(ConfigError, match="Authorization"):
        async with connect(f"nats://{nats}", "stranger"):
            pass
    with Redis(host, int(port)) as stranger, pytest.raises(AuthenticationError):
        stranger.ping()


def test_a_secret_is_long_and_made_once(secret: Path) -> None:
    assert len((secret / "secret").read_text().strip()) == 43
    assert (secret / "secret").read_text().strip() in (secret / "redis.conf").read_text()


@pytest.mark.parametrize("name", ["kv_index", "router", "prefill", "decode", "gateway"])
def test_every_service_shows_the_secret_to_every_server(name: str) -> None:
    service: dict[str, Any] = COMPOSE["services"][name]
    environ, prefix = service["environment"], f"{name.upper()}_"
    wanted = {server for key, server in SERVERS.items() if prefix + key in environ}

    assert wanted
    for server in wanted:
        assert environ[f"{prefix}{server}_CREDENTIALS_FILE"] == "/secret/secret"
    assert "secret:/secret:ro" in service["volumes"]


def test_nobody_may_call_before_a_key_was_added() -> None:
    gateway = COMPOSE["services"]["gateway"]

    assert gateway["environment"]["GATEWAY_API_KEYS_FILE"] == "/run/secrets/api_keys"
    assert gateway["secrets"] == ["api_keys"]
    assert COMPOSE["secrets"]["api_keys"]["file"].endswith(":-./api_keys.toml}")
    assert parse((FOLDER / "api_keys.toml").read_text()) == ()
