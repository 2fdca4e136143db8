from pathlib import Path

import pytest

from services.local import own_secret
from services.local.servers import free_port, nats_command, redis_command
from shared.access import Access
from shared.bus import connect
from shared.errors import ConfigError
from tests.local_server import LocalServer


def test_only_its_owner_reads_it_and_it_ends_with_the_stack(tmp_path: Path) -> None:
    places = own_secret.files(tmp_path)
    places.secret.write_text("an older one")
    places.secret.chmod(0o644)
    with own_secret.made(tmp_path) as secret:
        for place in (places.secret, places.nats_conf, places.redis_conf):
            assert place.stat().st_mode & 0o777 == 0o600
            assert secret in place.read_text()
    with own_secret.made(tmp_path) as another:
        assert another != secret

    assert not list(tmp_path.iterdir())


def test_no_command_line_shows_it(tmp_path: Path) -> None:
    places = own_secret.files(tmp_path)
    with own_secret.made(tmp_path) as secret:
        commands = [
            *nats_command(1, places.nats_conf),
            *redis_command(2, tmp_path, places.redis_conf),
        ]
        assert not [word for word in commands if secret in word]


async def test_a_bus_of_ones_own_hears_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the limits of every other one."""
    places, port = own_secret.files(tmp_path), free_port()
    with own_secret.made(tmp_path):
        server = LocalServer(nats_command(port, places.nats_conf), port, tmp_path)
        try:
            server.start()
            async with connect(f"nats://{server.address}", "ours", Access(places.secret)) as bus:
                assert await bus.answers(2.0)
                assert bus._client.max_payload == 64 << 20
            monkeypatch.setattr("shared.bus._CONNECT_S", 0.5)
            with pytest.raises(ConfigError, match="Authorization"):
                async with connect(f"nats://{server.address}", "others"):
                    pass
        finally:
            server.kill()
