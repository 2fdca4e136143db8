import json
import logging

import pytest

from shared import logs


def test_an_exception_stays_on_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A collector reads line by line; a traceback over many lines would be torn."""
    with logs.to_stderr("router", dict):
        try:
            raise KeyError("inner")
        except KeyError:
            logging.getLogger("x").exception("failed")

    line = json.loads(capsys.readouterr().err)
    assert "KeyError: 'inner'" in line["exception"]
    assert (line["message"], line["level"], line["logger"]) == ("failed", "ERROR", "x")


def test_fields_are_asked_for_at_each_line(capsys: pytest.CaptureFixture[str]) -> None:
    fields: dict[str, str] = {}
    with logs.to_stderr("router", lambda: fields):
        logging.getLogger("x").info("one")
        fields["trace_id"] = "t"
        logging.getLogger("x").info("two")

    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert "trace_id" not in first
    assert second["trace_id"] == "t"


def test_afterwards_the_root_logger_is_as_before(capsys: pytest.CaptureFixture[str]) -> None:
    """Tests configure many services in one process."""
    root = logging.getLogger()
    before = (root.level, list(root.handlers))

    with logs.to_stderr("router", dict):
        pass

    assert (root.level, list(root.handlers)) == before
    assert capsys.readouterr().err == ""
