"""Typed messages and requests over NATS: the only place that knows NATS.

Delivery is at most once. Messages published while the server is away wait in a bounded buffer; what
is lost is healed by the index or sequence number that every stream carries. The trace context
travels in the headers, so handlers run inside the sender's trace.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import nats.errors
from google.protobuf.message import DecodeError, Message
from nats.aio.client import Client
from nats.aio.msg import Msg

from shared import errors, tasks, telemetry
from shared import farspan_pb2 as pb
from shared.access import ANONYMOUS, Access, place
from shared.errors import BadRequest, ConfigError, FarspanError, TooLong, WorkerLost, from_failure
from shared.nats_access import options_of
from shared.nats_client import SafeClient, Watch
from shared.subjects import MessageT, ReplyT, RequestSubject, Subject

logger = logging.getLogger(__name__)

# How a service's error travels (NATS ADR-32). The body is a Failure; the headers are for people.
ERROR_HEADER = "Nats-Service-Error"
ERROR_CODE_HEADER = "Nats-Service-Error-Code"

_CONNECT_S = 3.0  # a server that is starting answers in 30 ms
_RECONNECT_S = 0.25
_PING_S = 5  # with two pings outstanding, a dead link is noticed in 15 s
_DRAIN_S = 2
_ANSWER_GRACE_S = 5.0
_LARGE_BYTES = 1 << 20
# While the server is away: minutes of tokens, or four million-token prompts.
_BUFFER_BYTES = 16 << 20


@asynccontextmanager
async def connect(url: str, name: str, access: Access = ANONYMOUS) -> AsyncIterator["Bus"]:
    """A bus on the server at `url`; `name` is how the server's monitoring shows this process.

    `tls://` speaks TLS or not at all; credentials stand in the URL or in access. Raises ConfigError
    when no server answers at the start, or not to us. Later the connection is restored for as long
    as it takes. Leaving the block sends what was published.
    """
    watch = Watch()
    options = options_of(url, access)
    client = SafeClient()
    try:
        async with asyncio.timeout(_CONNECT_S):
            await client.connect(
                servers=[url],
                name=name,
                max_reconnect_attempts=-1,
                reconnect_time_wait=_RECONNECT_S,  # type: ignore[arg-type]  # sleeps, any number
                ping_interval=_PING_S,
                max_outstanding_pings=2,
                drain_timeout=_DRAIN_S,
                pending_size=_BUFFER_BYTES,
                error_cb=watch.failed,
                disconnected_cb=watch.disconnected,
                reconnected_cb=watch.reconnected,
                **options,
            )
    except (TimeoutError, ValueError, nats.errors.Error) as error:
        watch.is_closing = True
        await client.close()
        reason = watch.last_error or str(error) or "no answer"
        raise ConfigError(f"no NATS server at {place(url)}: {reason}") from None
    watch.is_started = True
    try:
        yield Bus(client)
    finally:
        watch.is_closing = True
        await _close(client)


class Bus:
    """A connection, shared by a whole process. Use only on the event loop that made it."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._is_dropping = False

    @property
    def is_connected(self) -> bool:
        """Whether the server is reachable now."""
        return self._client.is_connected

    async def answers(self, timeout_s: float) -> bool:
        """Whether the server does, within the time: it has handled all that was sent before.

        Not so after the client's flush(), whose PING overtakes buffered commands.
        """
        try:
            await self._client.request(self._client.new_inbox(), timeout=timeout_s)
        except nats.errors.Error as error:
            return isinstance(error, nats.errors.NoRespondersError)
        return True

    async def publish(self, subject: Subject[MessageT], message: MessageT, **ids: str) -> None:
        """Send to whoever listens now. Raises TooLong above the server's max_payload.

        While the server is away the message is buffered; when the buffer is full it is lost, which
        is logged once per outage.
        """
        name = subject.name(**ids)
        try:
            await self._send(name, message.SerializeToString(), telemetry.inject())
        except WorkerLost as error:
            if not self._is_dropping:
                logger.error("messages are being lost: %s", error)
            self._is_dropping = True
        else:
            self._is_dropping = False

    async def request(
        self,
        subject: RequestSubject[MessageT, ReplyT],
        message: MessageT,
        *,
        timeout_s: float,
        **ids: str,
    ) -> ReplyT:
        """The answer of the one receiver.

        Raises NoAnswer if nobody answers in time, TooLong above the server's max_payload, and the
        error the receiver's handler raised.
        """
        name = subject.name(**ids)
        data = await _serialized(message)
        try:
            # The client's own time limit loses a cancellation that comes with the answer.
            async with asyncio.timeout(timeout_s):
                reply = await self._client.request(name, data, None, headers=telemetry.inject())  # type: ignore[arg-type]
        except nats.errors.NoRespondersError:
            raise errors.NoAnswer(f"nobody listens on {name}") from None
        except TimeoutError:
            raise errors.NoAnswer(f"no answer on {name} within {timeout_s:g} s") from None
        except nats.errors.Error as error:
            raise _as_farspan(error, name, len(data)) from error
        if reply.headers and ERROR_CODE_HEADER in reply.headers:
            raise from_failure(pb.Failure.FromString(reply.data))
        return subject.reply_type.FromString(reply.data)

    @asynccontextmanager
    async def listen(
        self,
        subject: Subject[MessageT],
        handler: Callable[[MessageT], Awaitable[None]],
        **ids: str,
    ) -> AsyncIterator[None]:
        """Inside the block, `handler` gets each message, in order, one after another.

        A handler's exception is logged and the next message follows. Leaving the block drops what
        is still queued and cancels the handler if it is running.
        """

        async def deliver(received: Msg) -> None:
            with telemetry.attached(received.headers or {}):
                try:
                    await handler(subject.message_type.FromString(received.data))
                except DecodeError:
                    logger.warning("unreadable message on %s", received.subject)
                except Exception:
                    logger.exception("the handler of %s failed", received.subject)

        async with self._subscription(subject.name(**ids), "", deliver):
            yield

    @asynccontextmanager
    async def answer(
        self,
        subject: RequestSubject[MessageT, ReplyT],
        handler: Callable[[MessageT], Awaitable[ReplyT]],
        *,
        queue: str = "",
        **ids: str,
    ) -> AsyncIterator[None]:
        """Inside the block, `handler` answers requests, any number at a time.

        Members of one `queue` share the requests. Leaving the block lets running handlers finish
        for a few seconds.
        """
        running: set[asyncio.Task[None]] = set()

        async def deliver(received: Msg) -> None:
            task = asyncio.create_task(self._answer_one(received, subject, handler))
            running.add(task)
            task.add_done_callback(running.discard)

        try:
            async with self._subscription(subject.name(**ids), queue, deliver):
                yield
        finally:
            await tasks.finish(running, _ANSWER_GRACE_S)

    @asynccontextmanager
    async def answer_text(self, name: str, text: Callable[[], str]) -> AsyncIterator[None]:
        """Inside the block, whoever asks on `name` gets this text: for NATS's own conventions."""

        async def deliver(received: Msg) -> None:
            await self._send(received.reply, text().encode(), {})

        async with self._subscription(name, "", deliver):
            yield

    async def _answer_one(
        self,
        received: Msg,
        subject: RequestSubject[MessageT, ReplyT],
        handler: Callable[[MessageT], Awaitable[ReplyT]],
    ) -> None:
        with telemetry.attached(received.headers or {}):
            try:
                answer = await handler(subject.message_type.FromString(received.data))
                await self._send(received.reply, answer.SerializeToString(), {})
                return
            except FarspanError as error:
                failure = error.as_failure()
            except DecodeError:
                failure = BadRequest(f"unreadable message on {received.subject}").as_failure()
            except Exception:
                logger.exception("the handler of %s failed", received.subject)
                failure = FarspanError("internal error").as_failure()
            headers = {
                ERROR_HEADER: failure.message or "no message",
                ERROR_CODE_HEADER: pb.FailureKind.Name(failure.kind),
            }
            try:
                await self._send(received.reply, failure.SerializeToString(), headers)
            except FarspanError as error:
                logger.error("an error answer was lost: %s", error)

    async def _send(self, name: str, data: bytes, headers: dict[str, str]) -> None:
        try:
            await self._client.publish(name, data, headers=headers or None)
        except nats.errors.Error as error:
            raise _as_farspan(error, name, len(data)) from error

    @asynccontextmanager
    async def _subscription(
        self, name: str, queue: str, deliver: Callable[[Msg], Awaitable[None]]
    ) -> AsyncIterator[None]:
        turn = asyncio.Lock()

        async def in_turn(received: Msg) -> None:
            async with turn:
                await deliver(received)

        subscription = await self._client.subscribe(name, queue=queue, cb=in_turn)
        try:
            if self.is_connected:  # else the client repeats its subscriptions on reconnecting
                await self.answers(_CONNECT_S)
            yield
        finally:
            with suppress(nats.errors.Error):  # the connection is closed: so is the subscription
                await subscription.unsubscribe()
            async with turn:  # wait until a handler that was running has ended
                pass


async def _serialized(message: Message) -> bytes:
    """Its bytes; those of a million-token prompt take milliseconds, and others do not wait."""
    if message.ByteSize() < _LARGE_BYTES:
        return message.SerializeToString()
    return await asyncio.to_thread(message.SerializeToString)


def _as_farspan(error: nats.errors.Error, name: str, num_bytes: int) -> FarspanError:
    if isinstance(error, nats.errors.MaxPayloadError):
        return TooLong(f"{num_bytes} bytes are more than the bus carries ({name})")
    return WorkerLost(f"cannot send on {name}: {error}")


async def _close(client: Client) -> None:
    if client.is_connected:
        try:
            await client.drain()
        except nats.errors.Error as error:
            logger.warning("NATS: closing without a flush: %s", error)
    if not client.is_closed:
        await client.close()
