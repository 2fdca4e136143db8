import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from services.local.chat import Piece, chat, stream
from shared.errors import ConfigError, FarspanError


class Server(ThreadingHTTPServer):
    """An OpenAI-compatible server that sends prepared lines and remembers requests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[dict[str, Any]] = []
        self.status = 200
        self.lines: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self._answer(200, json.dumps({"data": [{"id": "demo"}]}))

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        self.server.requests.append(json.loads(self.rfile.read(length)))
        self._answer(self.server.status, "".join(f"{line}\n\n" for line in self.server.lines))

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


def test_no_server_is_a_config_error(server: Server) -> None:
    with pytest.raises(ConfigError, match="farspan serve"):
        chat("http://127.0.0.1:9/v1", 50)
