import base64
import hashlib
import json
import time
from pathlib import Path

import nkeys
import pytest

from services.local.servers import free_port, nats_command
from shared.access import Access
from shared.bus import connect
from shared.errors import ConfigError
from shared.nats_access import options_of
from tests.local_server import LocalServer

_OPERATOR, _ACCOUNT, _USER = (
    nkeys.PREFIX_BYTE_OPERATOR,
    nkeys.PREFIX_BYTE_ACCOUNT,
    nkeys.PREFIX_BYTE_USER,
)


def pair(prefix: int, number: int) -> nkeys.KeyPair:
    return nkeys.from_seed(nkeys.encode_seed(bytes([number]) * 32, prefix))


def encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def token(signer: nkeys.KeyPair, subject: nkeys.KeyPair, nats: dict[str, object]) -> str:
    """A claim of NATS's kind."""
    claims = {
        "iat": int(time.time()),
        "iss": signer.public_key.decode(),
        "sub": subject.public_key.decode(),
        "name": "test",
        "nats": {**nats, "version": 2},
    }
    digest = hashlib.new("sha512_256", json.dumps(claims).encode()).digest()
    claims["jti"] = base64.b32encode(digest).rstrip(b"=").decode()
    head = encoded(json.dumps({"typ": "JWT", "alg": "ed25519-nkey"}).encode())
    body = f"{head}.{encoded(json.dumps(claims).encode())}"
    return f"{body}.{encoded(signer.sign(body.encode()))}"


async def test_a_credentials_file_may_hold_a_jwt_and_its_seed(tmp_path: Path) -> None:
    """The form in which NATS's own tools hand them out."""
    operator, account, user = pair(_OPERATOR, 1), pair(_ACCOUNT, 2), pair(_USER, 3)
    everything = {"subs": -1, "data": -1, "payload": -1, "conn": -1, "leaf": -1}
    unlimited = {**everything, "imports": -1, "exports": -1, "wildcards": True}
    operators = token(operator, operator, {"type": "operator"})
    accounts = token(operator, account, {"type": "account", "limits": unlimited})
    users = token(account, user, {"type": "user", "subs": -1, "data": -1, "payload": -1})
    (tmp_path / "operator.jwt").write_text(operators)
    conf = tmp_path / "nats.conf"
    conf.write_text(
        f'operator: "{tmp_path}/operator.jwt"\nresolver: MEMORY\n'
        f'resolver_preload: {{ {account.public_key.decode()}: "{accounts}" }}\n'
    )
    file = tmp_path / "user.creds"
    file.write_text(
        f"-----BEGIN NATS USER JWT-----\n{users}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user.seed.decode()}\n------END USER NKEY SEED------\n"
    )
    port = free_port()
    server = LocalServer(nats_command(port, conf), port, tmp_path)
    try:
        server.start()
        async with connect(f"nats://{server.address}", "known", Access(file)) as bus:
            assert await bus.answers(2.0)
    finally:
        server.kill()


def test_a_jwt_needs_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "user.creds"
    file.write_text("-----BEGIN NATS USER JWT-----\nx\n")
    monkeypatch.setattr("shared.nats_access.find_spec", lambda name: None)

    with pytest.raises(ConfigError, match="nkeys"):
        options_of("nats://127.0.0.1:1", Access(file))
