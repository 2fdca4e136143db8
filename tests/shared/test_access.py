from pathlib import Path

import pytest
import trustme

from shared.access import Access, Login, place
from shared.config import load
from shared.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("alice:s:e:cret\n", Login("alice", "s:e:cret")),
        ("token-of-one\n", Login("", "token-of-one")),
    ],
)
def test_a_credentials_file_holds_a_user_or_a_token(
    text: str, expected: Login, tmp_path: Path
) -> None:
    file = tmp_path / "credentials"
    file.write_text(text)

    assert Access(file).login() == expected
    assert Access().login() is None


@pytest.mark.parametrize("text", ["", " \n", "s3cret\nmore"])
def test_a_file_that_cannot_be_credentials_is_named_and_not_shown(
    text: str, tmp_path: Path
) -> None:
    file = tmp_path / "credentials"
    file.write_text(text)

    with pytest.raises(ConfigError, match="credentials file") as refused:
        Access(file).login()
    assert "s3cret" not in str(refused.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="missing"):
        Access(tmp_path / "missing").login()
    with pytest.raises(ConfigError, match="missing"):
        Access(ca_file=tmp_path / "missing").client_context()


def test_a_file_that_is_no_certificate_is_named(tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    file.write_text("nothing")

    with pytest.raises(ConfigError, match=r"ca\.pem"):
        Access(ca_file=file).client_context()


def test_a_certificate_comes_with_its_key(tmp_path: Path) -> None:
    authority = trustme.CA()
    pair = authority.issue_cert("me")
    cert, key, ca = (tmp_path / name for name in ("cert.pem", "key.pem", "ca.pem"))
    pair.cert_chain_pems[0].write_to_path(cert)
    pair.private_key_pem.write_to_path(key)
    authority.cert_pem.write_to_path(ca)

    assert Access(None, ca, cert, key).client_context() is not None
    with pytest.raises(ValueError, match="together"):
        Access(cert_file=cert)


def test_variables_reach_it_through_the_services_prefix() -> None:
    access = load(Access, {"A_NATS_CA_FILE": "/ca"}, "A_NATS_")

    assert access == Access(ca_file=Path("/ca"))


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("nats://user:secret@host:4222", "host:4222"),
        ("redis://user:se/cret@host:1/0", "host:1"),
        ("redis://user:s@cret@host:1/0", "host:1"),
        ("host:4222", "the given URL"),
        ("user:secret", "the given URL"),
        ("tls://host:4222", "host:4222"),
    ],
)
def test_a_place_is_told_without_any_part_of_a_password(url: str, expected: str) -> None:
    assert place(url) == expected
