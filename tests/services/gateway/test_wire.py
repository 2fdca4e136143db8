"""Events on the wire, and how it is seen that a client lags."""

import asyncio
import json

import pytest
from starlette.types import Message

from services.gateway.dialects.dialect import Event
from services.gateway.wire import Response, dump, encoded


class Client:
    """Takes what is sent, as slowly as it likes."""

    def __init__(self, pause_s: float = 0.0) -> None:
        self.pause_s = pause_s
        self.bodies: list[bytes] = []

    async def send(self, message: Message) -> None:
        if self.pause_s:
            await asyncio.sleep(self.pause_s)
        self.bodies.append(message.get("body", b""))


def test_an_event_has_a_name_where_its_api_names_events() -> None:
    """Text stays readable, and no line break of a text can end an event."""
    assert encoded(Event({"a": "한\n\n"})) == 'data: {"a":"한\\n\\n"}\n\n'.encode()
    assert encoded(Event({"a": 1}, "ping")) == b'event: ping\ndata: {"a":1}\n\n'


def test_what_is_not_utf8_is_still_told() -> None:
    """A client's words in an error may hold half a character."""
    assert json.loads(dump({"a": "\ud800"})) == {"a": "\ud800"}


async def test_events_of_one_wake_are_one_write() -> None:
    """A write costs more than an event."""
    client = Client()
    response = Response(client.send, b": alive\n\n")
    await response.begin_stream()

    await response.events([Event({"n": 1}), Event({"n": 2})])

    assert client.bodies[1:] == [b'data: {"n":1}\n\ndata: {"n":2}\n\n']
    assert not response.is_lagging


async def test_a_client_lags_from_a_write_that_waited_until_one_that_did_not() -> None:
    """Then its tokens may share an event."""
    client = Client(0.02)
    response = Response(client.send, b": alive\n\n")
    await response.begin_stream()
    await response.events([Event({})])
    assert response.is_lagging

    client.pause_s = 0.0
    await response.events([Event({})])
    assert not response.is_lagging


async def test_a_silent_stream_says_its_api_s_own_sign_of_life(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And a response that is no stream says nothing before its end."""
    monkeypatch.setattr("services.gateway.wire._KEEP_ALIVE_S", 0.0)
    client = Client()
    response = Response(client.send, b"event: ping\n\n")
    await response.keep_alive()
    assert client.bodies == []

    await response.begin_stream()
    await response.keep_alive()

    assert client.bodies[-1] == b"event: ping\n\n"
