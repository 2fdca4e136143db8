from pathlib import Path

from services.local.servers import NATS_CONF, free_ports, nats_command, redis_command


def test_ports_differ() -> None:
    assert len(set(free_ports(20))) == 20


def test_free_ports_are_none_that_a_connection_may_take() -> None:
    """A service did not start when another one's connection had its port."""
    outgoing = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()

    assert max(free_ports(50)) < int(outgoing[0])


def test_servers_listen_on_this_machine_only(tmp_path: Path) -> None:
    """Neither has a password: nobody else may reach them."""
    assert "127.0.0.1" in nats_command(1)
    assert "127.0.0.1" in redis_command(1, tmp_path)
    assert NATS_CONF.exists()
