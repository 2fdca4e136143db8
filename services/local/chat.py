"""`farspan chat`: a conversation in the terminal, streamed; or over a pipe, one line a turn.

Thinking is shown dimmed on a terminal and left out of a pipe. /new forgets the conversation, /quit
ends.
"""

import io
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TextIO

import httpx

from shared.errors import ConfigError, FarspanError

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_TIMEOUT = httpx.Timeout(10.0, read=600.0)  # a long prompt is silent until its first token


@dataclass(frozen=True)
class Piece:
    """A part of an answer as it arrives."""

    text: str
    is_thinking: bool


def chat(base_url: str, max_tokens: int, api_key: str = "") -> int:
    """Talk until /quit or the end of the input; the exit code says whether every turn went well."""
    with httpx.Client(
        base_url=base_url.rstrip("/") + "/",
        timeout=_TIMEOUT,
        trust_env=False,
        headers={"authorization": f"Bearer {api_key}"} if api_key else {},
    ) as http:
        model = _model(http, base_url)
        _survive_other_text()
        is_terminal = sys.stdin.isatty()
        if is_terminal:
            print(f"{model} at {base_url}. /new forgets, /quit ends, Ctrl-C stops an answer.")
        messages: list[dict[str, str]] = []
        exit_code = 0
        for line in _lines(is_terminal):
            if line == "/quit":
                break
            if line == "/new":
                messages.clear()
                continue
            if not _is_text(line):
                sys.stderr.write(f"farspan: not sent, it is not {sys.stdin.encoding} text\n")
                exit_code = 1
                continue
            messages.append({"role": "user", "content": line})
            request = {"model": model, "messages": messages, "max_tokens": max_tokens}
            try:
                answer = _show(stream(http, request), sys.stdout)
            except FarspanError as error:
                sys.stderr.write(f"farspan: {error}\n")
                messages.pop()
                exit_code = 1
                continue
            messages.append({"role": "assistant", "content": answer})
    return exit_code


def stream(http: httpx.Client, request: dict[str, Any]) -> Iterator[Piece]:
    """The pieces of one answer. Raises FarspanError with the server's message if it fails."""
    body = {**request, "stream": True}
    try:
        with http.stream("POST", "chat/completions", json=body) as response:
            if not response.is_success:
                raise FarspanError(_refusal(response.status_code, response.read()))
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    return
                if line.startswith("data: "):
                    yield from _pieces(line.removeprefix("data: "))
    except httpx.TransportError as error:
        raise FarspanError(f"the connection was lost: {error}") from error
    raise FarspanError("the answer ended too early, without [DONE]")


def _pieces(data: str) -> Iterator[Piece]:
    try:
        chunk = json.loads(data)
    except ValueError as error:
        raise FarspanError("the answer ended too early: half a message came") from error
    if "error" in chunk:
        raise FarspanError(_message(chunk))
    for choice in chunk["choices"]:
        delta = choice["delta"]
        if delta.get("reasoning_content"):
            yield Piece(delta["reasoning_content"], is_thinking=True)
        if delta.get("content"):
            yield Piece(delta["content"], is_thinking=False)


def _show(pieces: Iterator[Piece], output: TextIO) -> str:
    """Write the pieces as they come; the answer without its thinking. Ctrl-C keeps what came."""
    is_terminal = output.isatty()
    answer: list[str] = []
    was_thinking = False
    try:
        for piece in pieces:
            if piece.is_thinking and not is_terminal:
                continue
            if piece.is_thinking != was_thinking:
                output.write(_DIM if piece.is_thinking else _PLAIN + "\n")
                was_thinking = piece.is_thinking
            output.write(piece.text)
            output.flush()
            if not piece.is_thinking:
                answer.append(piece.text)
    except KeyboardInterrupt:
        pass
    finally:
        output.write((_PLAIN if was_thinking else "") + "\n")
        output.flush()
    return "".join(answer)


def _lines(is_terminal: bool) -> Iterator[str]:
    """What the person types, without blank lines."""
    if is_terminal:
        import readline  # noqa: F401  # gives input() its history and editing
    while True:
        try:
            line = input("> " if is_terminal else "").strip()
        except (EOFError, KeyboardInterrupt):
            if is_terminal:
                print()
            return
        if line:
            yield line


def _survive_other_text() -> None:
    """Read what the terminal's encoding does not know, to refuse it; show "?" for what it lacks."""
    for file, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace")):
        if isinstance(file, io.TextIOWrapper):
            file.reconfigure(errors=errors)


def _is_text(line: str) -> bool:
    try:
        line.encode()
    except UnicodeEncodeError:  # undecodable bytes stand in it as lone surrogates
        return False
    return True


def _model(http: httpx.Client, base_url: str) -> str:
    try:
        answer = http.get("models")
        answer.raise_for_status()
    except httpx.HTTPError as error:
        raise ConfigError(
            f"nobody serves at {base_url} ({error}): start `farspan serve`"
        ) from error
    try:
        return str(answer.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"what serves at {base_url} names no model: not an OpenAI API") from error


def _refusal(status: int, body: bytes) -> str:
    """The server's message; a proxy before it may answer with anything."""
    try:
        return _message(json.loads(body))
    except (ValueError, LookupError, TypeError):
        return f"the server answered with status {status}"


def _message(body: dict[str, Any]) -> str:
    return str(body["error"]["message"])
