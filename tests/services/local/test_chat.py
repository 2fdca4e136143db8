import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from services.local.chat import Piece, chat, stream
from services.local.plan import ROOT
from shared.errors import ConfigError, FarspanError


class Server(ThreadingHTTPServer):
    """An OpenAI-compatible server that sends prepared lines and remembers requests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[dict[str, Any]] = []
        self.models = json.dumps({"data": [{"id": "demo"}]})
        self.status = 200
        self.lines: list[str] = []
        self.num_deaths = 0  # so many answers break off in the middle

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self._answer(200, self.server.models)

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        self.server.requests.append(json.loads(self.rfile.read(length)))
        if self.server.num_deaths:
            self.server.num_deaths -= 1
            self._die()
        else:
            self._answer(self.server.status, "".join(f"{line}\n\n" for line in self.server.lines))

    def _die(self) -> None:
        """As a killed server does: some of a chunked answer, and no end."""
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        part = f"{delta(content='Half an')}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))

    def _answer(self, status: int, body: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body.encode())))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def delta(**content: str) -> str:
    return "data: " + json.dumps({"choices": [{"delta": content}]})


def pieces(server: Server) -> list[Piece]:
    with httpx.Client(base_url=server.url + "/", trust_env=False) as http:
        return list(stream(http, {"model": "demo", "messages": []}))


def test_an_answer_arrives_in_pieces(server: Server) -> None:
    server.lines = [
        delta(role="assistant"),
        ": keep-alive",
        delta(reasoning_content="hm"),
        delta(content="Yes"),
        'data: {"choices": [], "usage": {}}',
        "data: [DONE]",
    ]

    assert pieces(server) == [Piece("hm", is_thinking=True), Piece("Yes", is_thinking=False)]


def test_an_error_in_the_stream_is_raised_with_its_message(server: Server) -> None:
    server.lines = [delta(content="Y"), 'data: {"error": {"message": "worker lost"}}']

    with pytest.raises(FarspanError, match="worker lost"):
        pieces(server)


def test_a_stream_without_an_end_is_an_error(server: Server) -> None:
    """Half an answer must not look whole."""
    server.lines = [delta(content="Y")]

    with pytest.raises(FarspanError, match="without"):
        pieces(server)


def test_a_refusal_is_raised_with_its_message(server: Server) -> None:
    server.status, server.lines = 429, ['{"error": {"message": "the fleet is full"}}']

    with pytest.raises(FarspanError, match="the fleet is full"):
        pieces(server)


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        pytest.param(502, "<html>Bad gateway</html>", "status 502", id="a proxy's page"),
        pytest.param(500, '{"detail": "no"}', "status 500", id="another shape"),
        pytest.param(200, 'data: {"choices": [{"del', "ended too early", id="half a message"),
    ],
)
def test_an_answer_that_nobody_can_read_is_an_error(
    server: Server, status: int, body: str, said: str
) -> None:
    """A dying server's last words; the conversation goes on after them."""
    server.status, server.lines = status, [body]

    with pytest.raises(FarspanError, match=said):
        pieces(server)


def say(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    typed = iter(lines)

    def read(prompt: str = "") -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)


def test_a_pipe_gets_answers_without_thinking_and_turns_are_remembered(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.lines = [delta(reasoning_content="hm"), delta(content="Yes."), "data: [DONE]"]
    say(monkeypatch, "one", "", "two", "/new", "three", "/quit", "four")

    assert chat(server.url, 50) == 0

    assert capsys.readouterr().out == "Yes.\nYes.\nYes.\n"
    turns = [[turn["content"] for turn in asked["messages"]] for asked in server.requests]
    assert turns == [["one"], ["one", "Yes.", "two"], ["three"]]
    assert server.requests[0]["max_tokens"] == 50


def test_a_failed_turn_is_told_and_forgotten(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The next turn must not carry a question that was never answered."""
    server.status, server.lines = 429, ['{"error": {"message": "the fleet is full"}}']
    say(monkeypatch, "one", "two")

    assert chat(server.url, 50) == 1

    assert "the fleet is full" in capsys.readouterr().err
    assert [len(asked["messages"]) for asked in server.requests] == [1, 1]


def test_a_server_that_dies_amid_an_answer_ends_the_turn_only(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may be back for the next question, which knows nothing of the lost one."""
    server.num_deaths, server.lines = 1, [delta(content="Yes."), "data: [DONE]"]
    say(monkeypatch, "one", "two")

    assert chat(server.url, 50) == 1

    shown = capsys.readouterr()
    assert shown.out == "Half an\nYes.\n"
    (line,) = shown.err.splitlines()
    assert line.startswith("farspan: the connection was lost: ")
    assert [turn["content"] for turn in server.requests[1]["messages"]] == ["two"]


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_a_line_that_is_no_text_is_refused_and_the_next_is_answered(
    server: Server, errors: str
) -> None:
    """Guessing what was meant would send something else; which error Python raises depends on the
    locale.
    """
    server.lines = [delta(content="Yes → no."), "data: [DONE]"]

    done = run_chat(server, b"caf\xe9\ncaf\xc3\xa9\n", f"utf-8:{errors}")

    assert done.returncode == 1
    assert done.stdout.decode() == "Yes → no.\n"
    assert done.stderr.decode() == "farspan: not sent, it is not utf-8 text\n"
    (asked,) = server.requests
    assert asked["messages"] == [{"role": "user", "content": "café"}]


def test_what_a_terminal_cannot_show_does_not_end_the_chat(server: Server) -> None:
    server.lines = [delta(content="Yes → no."), "data: [DONE]"]

    done = run_chat(server, b"caf\xe9\n", "latin-1")

    assert (done.returncode, done.stdout, done.stderr) == (0, b"Yes ? no.\n", b"")
    assert server.requests[0]["messages"][0]["content"] == "café"


def run_chat(server: Server, typed: bytes, encoding: str) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run(
        [sys.executable, "-m", "services.local", "chat", "--url", server.url],
        cwd=ROOT,
        env={**os.environ, "PYTHONIOENCODING": encoding},
        input=typed,
        capture_output=True,
        timeout=30,
    )


def test_a_server_of_something_else_is_a_config_error(server: Server) -> None:
    server.models = "<html>Welcome</html>"

    with pytest.raises(ConfigError, match="not an OpenAI API"):
        chat(server.url, 50)


def test_no_server_is_a_config_error(server: Server) -> None:
    with pytest.raises(ConfigError, match="farspan serve"):
        chat("http://127.0.0.1:9/v1", 50)
