import json
import logging
from pathlib import Path

import pytest

from services.router import records
from services.router.journal import Journal
from services.router.records import Inputs
from services.router.view import Rates
from shared.errors import ConfigError
from tests.services.router.fleets import decode, prefill, request


def add(journal: Journal, request_id: str, *known_as: str) -> None:
    bare, digest = records.without_hashes(request(request_id=request_id, known_as=known_as))
    seen = Inputs(bare, digest, [prefill("p0"), decode("d0")], {}, Rates(), 60.0)
    journal.add(1000, seen, records.judge(seen))


def found(journal: Journal, name: str) -> list[str]:
    return [record.inputs.request.request_id for record in journal.find(name)]


def test_a_decision_is_found_by_its_id_and_by_what_clients_know() -> None:
    """Each attempt of a request has an id of its own; the client's id finds them all."""
    journal = Journal("router-a", 10, None)
    add(journal, "a", "chatcmpl-1", "mine")
    add(journal, "a-2", "chatcmpl-1", "mine")
    add(journal, "b", "chatcmpl-2", "mine")

    assert found(journal, "a-2") == ["a-2"]
    assert found(journal, "chatcmpl-1") == ["a", "a-2"]
    assert found(journal, "mine") == ["a", "a-2", "b"]
    assert found(journal, "nobody's") == []
    assert journal.find("a")[0].router_id == "router-a"


def test_the_oldest_are_forgotten_with_their_names() -> None:
    """The memory is bounded, whatever clients call their requests."""
    journal = Journal("router-a", 3, None)
    for number in range(1000):
        add(journal, str(number), f"chatcmpl-{number}", "same", "same")

    assert found(journal, "same") == ["997", "998", "999"]
    assert found(journal, "chatcmpl-3") == []
    assert len(journal._kept) == 3
    assert len(journal._aliases) == 4


def test_a_request_decided_again_is_remembered_once() -> None:
    journal = Journal("router-a", 3, None)
    add(journal, "a", "x")
    add(journal, "a", "x")

    assert found(journal, "x") == ["a"]


def test_nothing_is_remembered_where_nothing_shall_be() -> None:
    """ROUTER_DECISIONS_KEPT=0."""
    journal = Journal("router-a", 0, None)
    add(journal, "a", "x")

    assert journal.find("a") == journal.find("x") == []


async def test_every_decision_is_a_line_of_the_file(tmp_path: Path) -> None:
    """Also those that are no longer remembered; an earlier life's lines stay."""
    file = tmp_path / "new" / "decisions.jsonl"
    for life in range(2):
        journal = Journal(f"router-{life}", 1, file)
        add(journal, "a")
        add(journal, "b")
        await journal.flush()
        await journal.flush()

    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["routerId"] for line in lines] == ["router-0"] * 2 + ["router-1"] * 2
    assert [line["inputs"]["request"]["requestId"] for line in lines] == ["a", "b"] * 2


async def test_a_file_that_cannot_be_written_later_loses_records_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Counted and told once."""
    file = tmp_path / "decisions.jsonl"
    journal = Journal("router-a", 1, file)
    file.unlink()
    file.mkdir()

    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            add(journal, "a")
            await journal.flush()

    assert journal.num_unwritten == 3
    assert caplog.text.count("are not being written") == 1


def test_a_file_that_cannot_be_written_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="decisions cannot be written"):
        Journal("router-a", 1, tmp_path)
