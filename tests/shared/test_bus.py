import asyncio
import json
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme
from nats.aio.msg import Msg

from services.local.servers import free_port, nats_command
from shared import farspan_pb2 as pb
from shared import subjects, telemetry
from shared.access import Access
from shared.bus import Bus, connect
from shared.errors import BadRequest, ConfigError, FarspanError, Overloaded, TooLong, WorkerLost
from tests.local_server import LocalServer, own_nats


@pytest.fixture
async def bus(nats_url: str) -> AsyncIterator[Bus]:
    async with connect(nats_url, "test") as bus:
        yield bus


@pytest.fixture
async def peer(nats_url: str) -> AsyncIterator[Bus]:
    async with connect(nats_url, "peer") as bus:
        yield bus


async def collect(queue: "asyncio.Queue[str]", count: int) -> list[str]:
    async with asyncio.timeout(5):
        return [await queue.get() for _ in range(count)]


async def test_a_server_that_stands_still_does_not_answer(tmp_path: Path) -> None:
    """Its connections stay open."""
    with own_nats(tmp_path) as server:
        async with connect(f"nats://{server.address}", "test") as link:
            before = await link.answers(1.0)
            server.pause()
            during = await link.answers(0.2)
            server.go_on()
            after = await link.answers(2.0)

    assert (before, during, after) == (True, False, True)


async def test_messages_arrive_in_order_one_after_another(bus: Bus, peer: Bus) -> None:
    """Block events and tokens carry sequence numbers: handling must not reorder them."""
    seen: asyncio.Queue[str] = asyncio.Queue()

    async def handler(message: pb.Cancel) -> None:
        await asyncio.sleep(0.01 if message.request_id == "0" else 0)
        seen.put_nowait(message.request_id)

    async with bus.listen(subjects.CANCEL, handler, worker="w1"):
        for i in range(50):
            await peer.publish(subjects.CANCEL, pb.Cancel(request_id=str(i)), worker="w1")
        await peer.publish(subjects.CANCEL, pb.Cancel(request_id="x"), worker="w2")

        assert await collect(seen, 50) == [str(i) for i in range(50)]
    assert seen.empty()


async def test_a_cancellation_that_comes_with_the_answer_is_not_lost(bus: Bus) -> None:
    """A task that was cancelled must end: whoever cancelled it waits for that."""
    asking = asyncio.create_task(bus.request(subjects.PLACE, pb.PlaceRequest(), timeout_s=5))
    async with asyncio.timeout(5):
        while not bus._client._resp_map:  # noqa: ASYNC110  # no event to wait for
            await asyncio.sleep(0)
    (answer,) = bus._client._resp_map.values()

    answer.set_result(Msg(bus._client))
    asking.cancel()

    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_a_failing_or_unreadable_message_does_not_stop_the_next(
    bus: Bus, peer: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    """One bad message must not silence a worker."""
    seen: asyncio.Queue[str] = asyncio.Queue()

    async def handler(message: pb.Cancel) -> None:
        if message.request_id == "bad":
            raise ValueError("boom")
        seen.put_nowait(message.request_id)

    unreadable = subjects.Subject(subjects.CANCEL.template, pb.PrefixQuery)
    async with bus.listen(subjects.CANCEL, handler, worker="w1"):
        await peer.publish(subjects.CANCEL, pb.Cancel(request_id="bad"), worker="w1")
        await peer.publish(unreadable, pb.PrefixQuery(block_hashes=b"\xff"), worker="w1")
        await peer.publish(subjects.CANCEL, pb.Cancel(request_id="good"), worker="w1")

        assert await collect(seen, 1) == ["good"]
    assert "boom" in caplog.text
    assert "unreadable message" in caplog.text


async def test_a_request_gets_its_answer(bus: Bus, peer: Bus) -> None:
    async def handler(request: pb.PlaceRequest) -> pb.PlaceReply:
        return pb.PlaceReply(placement=pb.Placement(reason=f"for {request.request_id}"))

    async with peer.answer(subjects.PLACE, handler, queue="router"):
        reply = await bus.request(subjects.PLACE, pb.PlaceRequest(request_id="r1"), timeout_s=5)

    assert reply.placement.reason == "for r1"


async def test_answers_run_side_by_side(bus: Bus, peer: Bus) -> None:
    """One slow request must not hold up the others."""
    both_are_here = asyncio.Barrier(2)

    async def handler(request: pb.PlaceRequest) -> pb.PlaceReply:
        await both_are_here.wait()
        return pb.PlaceReply()

    async with peer.answer(subjects.PLACE, handler):
        requests = [
            bus.request(subjects.PLACE, pb.PlaceRequest(request_id=name), timeout_s=5)
            for name in ("a", "b")
        ]
        assert len(await asyncio.gather(*requests)) == 2


async def test_a_queue_shares_the_requests(bus: Bus, peer: Bus) -> None:
    answered: list[str] = []

    async def first(request: pb.PlaceRequest) -> pb.PlaceReply:
        answered.append("first")
        return pb.PlaceReply()

    async def second(request: pb.PlaceRequest) -> pb.PlaceReply:
        answered.append("second")
        return pb.PlaceReply()

    async with (
        bus.answer(subjects.PLACE, first, queue="q"),
        peer.answer(subjects.PLACE, second, queue="q"),
    ):
        for _ in range(40):
            await bus.request(subjects.PLACE, pb.PlaceRequest(), timeout_s=5)

    assert len(answered) == 40
    assert set(answered) == {"first", "second"}


async def test_the_handlers_error_is_raised_at_the_sender(bus: Bus, peer: Bus) -> None:
    """Whose fault a failure is decides who retries, so the kind and the advice must survive."""

    async def handler(request: pb.PlaceRequest) -> pb.PlaceReply:
        error = Overloaded("no room: größer\nno") if request.model else BadRequest("no model")
        error.retry_after_ms = 1234
        raise error

    async with peer.answer(subjects.PLACE, handler):
        with pytest.raises(Overloaded, match="no room: größer\nno") as overloaded:
            await bus.request(subjects.PLACE, pb.PlaceRequest(model="m"), timeout_s=5)
        with pytest.raises(BadRequest, match="no model"):
            await bus.request(subjects.PLACE, pb.PlaceRequest(), timeout_s=5)

    assert overloaded.value.retry_after_ms == 1234


async def test_a_bug_in_a_handler_is_logged_and_answered_as_internal(
    bus: Bus, peer: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    """The sender learns that it failed, and nothing of the inside."""

    async def handler(request: pb.PlaceRequest) -> pb.PlaceReply:
        raise KeyError("inner detail")

    async with peer.answer(subjects.PLACE, handler):
        with pytest.raises(FarspanError, match="internal error") as caught:
            await bus.request(subjects.PLACE, pb.PlaceRequest(), timeout_s=5)

    assert caught.value.kind == pb.FAILURE_KIND_INTERNAL
    assert "inner detail" not in str(caught.value)
    assert "inner detail" in caplog.text


async def test_nobody_listening_is_known_at_once(bus: Bus) -> None:
    """A dead worker must not cost its senders their time-out."""
    started = time.monotonic()

    with pytest.raises(WorkerLost, match="nobody listens"):
        await bus.request(subjects.SUBMIT, pb.Submit(), timeout_s=30, worker="gone")

    assert time.monotonic() - started < 5


async def test_a_late_answer_is_a_lost_worker(bus: Bus, peer: Bus) -> None:
    release = asyncio.Event()

    async def handler(request: pb.PlaceRequest) -> pb.PlaceReply:
        await release.wait()
        return pb.PlaceReply()

    async with peer.answer(subjects.PLACE, handler):
        with pytest.raises(WorkerLost, match=r"within 0\.05 s"):
            await bus.request(subjects.PLACE, pb.PlaceRequest(), timeout_s=0.05)
        release.set()


async def test_leaving_answer_lets_running_handlers_finish(bus: Bus, peer: Bus) -> None:
    """Drain: requests taken are answered, new ones go elsewhere."""
    started = asyncio.Event()
    release = asyncio.Event()

    async def handler(request: pb.PlaceRequest) -> pb.PlaceReply:
        started.set()
        await release.wait()
        return pb.PlaceReply(placement=pb.Placement(reason="finished"))

    async def leave() -> None:
        async with peer.answer(subjects.PLACE, handler):
            await started.wait()
            asyncio.get_running_loop().call_later(0.05, release.set)

    async with asyncio.TaskGroup() as tasks:
        leaving = tasks.create_task(leave())
        while not started.is_set():
            try:
                reply = await bus.request(subjects.PLACE, pb.PlaceRequest(), timeout_s=5)
            except WorkerLost:
                continue
        await leaving

    assert reply.placement.reason == "finished"


async def test_the_trace_crosses_the_bus(bus: Bus, peer: Bus, tmp_path: Path) -> None:
    """One request is one trace; the handler runs inside the sender's span."""
    path = tmp_path / "spans.jsonl"

    async def handler(request: pb.PlaceRequest) -> pb.PlaceReply:
        with telemetry.span("router.place"):
            return pb.PlaceReply()

    with telemetry.configure("test", trace_file=path):
        async with peer.answer(subjects.PLACE, handler):
            with telemetry.span("gateway.place"):
                await bus.request(subjects.PLACE, pb.PlaceRequest(), timeout_s=5)

    spans = {line["name"]: line for line in map(json.loads, path.read_text().splitlines())}
    assert spans["router.place"]["parent_id"] == spans["gateway.place"]["span_id"]


async def test_a_million_token_prompt_fits_and_more_than_the_bus_carries_is_refused(
    bus: Bus, peer: Bus
) -> None:
    """compose/nats.conf raises the limit; what passes even that is the client's fault."""

    async def handler(request: pb.Submit) -> pb.SubmitReply:
        return pb.SubmitReply(accepted=pb.Accepted())

    async with peer.answer(subjects.SUBMIT, handler, worker="w1"):
        prompt = pb.Submit(token_ids=bytes(4 << 20))
        reply = await bus.request(subjects.SUBMIT, prompt, timeout_s=20, worker="w1")
        with pytest.raises(TooLong):
            huge = pb.Submit(token_ids=bytes(65 << 20))
            await bus.request(subjects.SUBMIT, huge, timeout_s=20, worker="w1")

    assert reply.HasField("accepted")


async def test_a_missing_server_is_a_config_error_without_the_password() -> None:
    port = free_port()

    with pytest.raises(ConfigError, match=f"no NATS server at 127.0.0.1:{port}") as error:
        async with connect(f"nats://user:secret@127.0.0.1:{port}", "test"):
            pass

    assert "secret" not in str(error.value)


async def test_a_server_restart_loses_no_subscription(tmp_path: Path) -> None:
    """The client reconnects for as long as it takes, and buffered messages arrive then."""
    port = free_port()
    seen: asyncio.Queue[str] = asyncio.Queue()

    async def handler(message: pb.Cancel) -> None:
        seen.put_nowait(message.request_id)

    server = await _start(port)
    try:
        url = f"nats://127.0.0.1:{port}"
        async with connect(url, "a") as bus, bus.listen(subjects.CANCEL, handler, worker="w"):
            server.kill()
            server.wait()
            await _until_lost(bus)
            await bus.publish(subjects.CANCEL, pb.Cancel(request_id="buffered"), worker="w")
            server = await _start(port)

            assert await collect(seen, 1) == ["buffered"]
            assert bus.is_connected
    finally:
        server.kill()
        server.wait()


async def test_leaving_while_the_server_is_away_does_not_hang() -> None:
    """A service must be able to stop during an outage."""
    port = free_port()
    server = await _start(port)

    async with asyncio.timeout(10):
        async with connect(f"nats://127.0.0.1:{port}", "a") as bus:
            server.kill()
            server.wait()
            await _until_lost(bus)


async def _until_lost(bus: Bus) -> None:
    async with asyncio.timeout(5):
        while bus.is_connected:  # noqa: ASYNC110  # the bus has no event for it: services poll it
            await asyncio.sleep(0.01)


async def _start(port: int) -> "subprocess.Popen[bytes]":
    server = subprocess.Popen(nats_command(port), stderr=subprocess.DEVNULL)
    async with asyncio.timeout(10):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.01)
            else:
                writer.close()
                await writer.wait_closed()
                return server


@dataclass(frozen=True)
class Secured:
    """A server that knows one user and speaks TLS alone."""

    address: str
    folder: Path

    def access(self, login: str, **files: Path) -> Access:
        """What a client has that knows `login`."""
        file = self.folder / "credentials"
        file.write_text(f"{login}\n")
        return Access(file, self.folder / "ca.pem", **files)


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[Secured]:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    for name in ("127.0.0.1", "client"):
        pair = authority.issue_cert(name)
        pair.cert_chain_pems[0].write_to_path(tmp_path / f"{name}.pem")
        pair.private_key_pem.write_to_path(tmp_path / f"{name}.key")
    port = free_port()
    conf = tmp_path / "nats.conf"
    conf.write_text(
        'authorization {users: [{user: "farspan", password: "right"}]}\n'
        f'tls {{cert_file: "{tmp_path}/127.0.0.1.pem", key_file: "{tmp_path}/127.0.0.1.key",'
        f' ca_file: "{tmp_path}/ca.pem", verify: true}}\n'
    )
    server = LocalServer(nats_command(port, conf), port, tmp_path)
    server.start()
    yield Secured(server.address, tmp_path)
    server.kill()


async def test_a_bus_may_ask_for_user_certificate_and_ca(secured: Secured) -> None:
    files = {"cert_file": secured.folder / "client.pem", "key_file": secured.folder / "client.key"}
    url = f"tls://{secured.address}"
    async with connect(url, "known", secured.access("farspan:right", **files)) as bus:
        assert await bus.answers(2.0)


CLOSED = "no answer|closed|[Ee]of|EOF|pipe|reset"


@pytest.mark.parametrize(
    ("login", "has_certificate", "told"),
    [
        # The server says why and closes at once: which of the two is seen first is chance.
        pytest.param("farspan:wr0ng", True, f"Authorization|{CLOSED}", id="a-wrong-password"),
        pytest.param("farspan:wr0ng", False, f"[Cc]ert|{CLOSED}", id="no-certificate"),
    ],
)
async def test_who_is_not_known_is_told_so_without_the_password(
    secured: Secured,
    login: str,
    has_certificate: bool,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shared.bus._CONNECT_S", 1.0)
    names = {"cert_file": "client.pem", "key_file": "client.key"} if has_certificate else {}
    access = secured.access(login, **{key: secured.folder / name for key, name in names.items()})
    with pytest.raises(ConfigError, match=told) as refused:
        async with connect(f"tls://{secured.address}", "stranger", access):
            pass
    assert "wr0ng" not in str(refused.value)


async def test_a_server_without_tls_is_told_nothing(
    nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who stands between could else ask for the password in the clear."""
    monkeypatch.setattr("shared.bus._CONNECT_S", 1.0)
    (tmp_path / "credentials").write_text("farspan:right")
    with pytest.raises(ConfigError, match="does not speak TLS"):
        async with connect(
            nats_url.replace("nats://", "tls://"), "careful", Access(tmp_path / "credentials")
        ):
            pass


async def test_a_token_opens_the_bus_too(tmp_path: Path) -> None:
    port = free_port()
    conf = tmp_path / "nats.conf"
    conf.write_text('authorization {token: "0f-one"}')
    file = tmp_path / "credentials"
    file.write_text("0f-one\n")
    server = LocalServer(nats_command(port, conf), port, tmp_path)
    try:
        server.start()
        async with connect(f"nats://{server.address}", "known", Access(file)) as bus:
            assert await bus.answers(2.0)
        async with connect(f"nats://0f-one@{server.address}", "known") as bus:
            assert await bus.answers(2.0)
    finally:
        server.kill()


@pytest.mark.parametrize(
    ("url", "files", "told"),
    [
        ("nats://127.0.0.1:1", {"ca_file": "ca"}, "needs tls://"),
        ("nats://user:s3cret@127.0.0.1:1", {"credentials_file": "ca"}, "URL and in a file"),
        ("nats://user:s3/cret@127.0.0.1:1", {}, "cannot be used"),
    ],
)
async def test_settings_that_contradict_each_other_are_refused(
    url: str, files: dict[str, str], told: str, tmp_path: Path
) -> None:
    (tmp_path / "ca").write_text("x:y")
    access = Access(**{key: tmp_path / name for key, name in files.items()})
    with pytest.raises(ConfigError, match=told) as refused:
        async with connect(url, "nobody", access):
            pass
    assert "s3" not in str(refused.value)
