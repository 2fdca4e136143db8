from datetime import UTC, datetime

import pytest

from services.gateway.door.keys import identify, parse
from services.local.__main__ import main


def test_what_is_printed_is_an_entry_and_the_key_that_it_knows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["new-key", "alice", "--tenant", "research"]) == 0

    printed, told = capsys.readouterr()
    (key,) = (word for word in told.split() if word.startswith("fs-"))
    assert key not in printed, "it can be appended to the file as it is"
    caller = identify(parse(printed), [key], datetime.now(UTC))
    assert caller is not None
    assert (caller.name, caller.tenant) == ("alice", "research")


def test_a_name_that_would_break_the_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new-key", 'a"']) == 2
    assert "not made of" in capsys.readouterr().err
