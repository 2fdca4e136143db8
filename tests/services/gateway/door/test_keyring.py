import logging
from pathlib import Path

import pytest

from services.gateway.door.keyring import Keyring
from services.gateway.door.keys import new_key
from shared.errors import ConfigError


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    first, text = new_key("alice", "research")
    file.write_text(text)
    keyring = Keyring(file)
    second, more = new_key("bob", "research")

    assert keyring.identify([first])
    assert keyring.identify([second]) is None
    file.write_text(more)
    keyring.renew()

    assert keyring.identify([first]) is None
    assert keyring.identify([second])


@pytest.mark.parametrize("content", ["[[keys]", None, b"\xff"])
def test_a_broken_file_keeps_the_old_keys_and_is_told(
    content: str | bytes | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A half-written file must not shut everybody out, and not let anybody in."""
    file = tmp_path / "keys.toml"
    key, text = new_key("alice", "research")
    file.write_text(text)
    keyring = Keyring(file)
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content.encode() if isinstance(content, str) else content)

    with caplog.at_level(logging.ERROR):
        keyring.renew()
        keyring.renew()

    assert keyring.identify([key])
    assert len(caplog.records) == 1, "told once for each change"
    assert "keys.toml" in caplog.text


def test_the_start_needs_a_file_that_is_understood(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"keys\.toml"):
        Keyring(tmp_path / "keys.toml")
    (tmp_path / "keys.toml").write_text("[")
    with pytest.raises(ConfigError, match=r"keys\.toml: it is not valid TOML"):
        Keyring(tmp_path / "keys.toml")
