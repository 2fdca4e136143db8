import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from services.gateway.config import GatewayConfig
from services.gateway.door.doorkeeper import CALLER, PROBES, Doorkeeper, Rules
from services.gateway.door.keyring import Keyring
from services.gateway.door.keys import new_key
from services.gateway.door.limits import Bounds, Turnstile
from services.gateway.listener import listening

KEY, ENTRY = new_key("alice", "research")
OPERATOR, OPERATOR_ENTRY = new_key("root", "staff")
OLD, OLD_ENTRY = new_key("old", "research")
OFF, OFF_ENTRY = new_key("off", "research")
LIMITED, LIMITED_ENTRY = new_key("limited", "research")
FILE = (
    f"{ENTRY}{OPERATOR_ENTRY}operator = true\n{OLD_ENTRY}expires = 2020-01-01T00:00:00Z\n"
    f"{OFF_ENTRY}disabled = true\n{LIMITED_ENTRY}requests_per_minute = 2\n"
)
MAX_BYTES = 1 << 20


async def who(request: Request) -> JSONResponse:
    caller = request.scope["state"][CALLER]
    return JSONResponse(
        {"name": caller.name, "tenant": caller.tenant, "operator": caller.is_operator}
    )


async def size(request: Request) -> JSONResponse:
    return JSONResponse({"bytes": len(await request.body())})


async def alive(_: Request) -> JSONResponse:
    return JSONResponse({})


ROUTES = [
    Route("/who", who, methods=["GET", "POST"]),
    Route("/debug/decisions/x", who),
    Route("/size", size, methods=["POST"]),
    *(Route(path, alive) for path in PROBES),
]


def door(tmp_path: Path, **changes: Any) -> tuple[Starlette, Turnstile]:
    file = tmp_path / "keys.toml"
    file.write_text(FILE)
    rules = {
        "keyring": Keyring(file),
        "has_own_host_only": False,
        "max_body_bytes": MAX_BYTES,
        "body_timeout_s": 5.0,
        **changes,
    }
    turnstile = Turnstile(Bounds(8, 8))
    keeper = Middleware(Doorkeeper, rules=Rules(**rules), turnstile=turnstile)
    return Starlette(routes=ROUTES, middleware=[keeper]), turnstile


@pytest.fixture
async def http(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(door(tmp_path)[0])
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway.example") as http:
        yield http


def basic(key: str) -> str:
    return "Basic " + base64.b64encode(f"anyone:{key}".encode()).decode()


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {KEY}"},
        {"authorization": f"bearer  {KEY} "},
        {"x-api-key": KEY},
        {"authorization": basic(KEY)},
        {"authorization": "Bearer wrong", "x-api-key": KEY},
    ],
    ids=["bearer", "lower-case", "x-api-key", "basic", "one-of-two"],
)
async def test_a_key_opens_the_door_however_it_is_borne(
    headers: dict[str, str], http: httpx.AsyncClient
) -> None:
    response = await http.get("/who", headers=headers)

    assert response.json() == {"name": "alice", "tenant": "research", "operator": False}


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": f"Bearer {OLD}"},
        {"authorization": f"Bearer {OFF}"},
        {"authorization": f"Digest {KEY}"},
        {"authorization": KEY},
        {"authorization": "Basic !!!"},
        {"authorization": "Basic /w=="},
        {"authorization": "Bearer "},
        {"x-api-key": ""},
        {"x-api-key": KEY[:-1]},
        {"cookie": f"key={KEY}"},
    ],
    ids=str,
)
@pytest.mark.parametrize("path", ["/who", "/nowhere", "/", "/livez/", "//livez", "/debug/x"])
async def test_nobody_else_comes_in_not_even_to_what_is_not_there(
    path: str, headers: dict[str, str], http: httpx.AsyncClient
) -> None:
    for method in ("GET", "POST", "OPTIONS"):
        response = await http.request(method, path, headers=headers)

        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert "Basic" in response.headers["www-authenticate"]
        assert not any(key in response.text for key in (KEY, OLD, OFF))


async def test_a_key_in_the_address_is_none(http: httpx.AsyncClient) -> None:
    """Addresses stand in logs."""
    assert (await http.get("/who", params={"api_key": KEY})).status_code == 401


@pytest.mark.parametrize("path", sorted(PROBES))
async def test_probes_need_no_key(path: str, http: httpx.AsyncClient) -> None:
    assert (await http.get(path)).status_code == 200
    assert (await http.post(path)).status_code == 401


@pytest.mark.parametrize("token", ["t0ken", ""])
async def test_debug_pages_open_to_their_token_and_nothing_else_does(
    token: str, tmp_path: Path
) -> None:
    keeper, _ = door(tmp_path, debug_token=token)
    transport = httpx.ASGITransport(keeper)
    bearing = {"authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://g.example") as http:
        debug = await http.get("/debug/decisions/x", headers=bearing)
        other = await http.get("/who", headers=bearing)
        keyed = await http.get("/debug/decisions/x", headers={"x-api-key": OPERATOR})

    assert debug.status_code == (200 if token else 401)
    assert other.status_code == 401
    assert keyed.json()["operator"] is True


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "http://gateway.example"}, 200),
        ({"origin": "https://known.example"}, 200),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://gateway.example:81"}, 403),
    ],
)
async def test_a_page_of_another_site_drives_nothing(
    headers: dict[str, str], status: int, tmp_path: Path
) -> None:
    keeper, _ = door(tmp_path, host_names=("known.example",))
    transport = httpx.ASGITransport(keeper)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway.example") as http:
        response = await http.post("/who", headers={**headers, "x-api-key": KEY})

        assert response.status_code == status
        assert not [name for name in response.headers if name.startswith("access-control")]


@pytest.mark.parametrize(("host", "status"), [("127.0.0.1:8000", 200), ("rebound.example", 403)])
async def test_a_name_that_was_pointed_here_reaches_no_open_gateway(
    host: str, status: int, tmp_path: Path
) -> None:
    """A page of rebound.example is of one site with what it asks: only the name tells."""
    keeper, _ = door(tmp_path, keyring=None, has_own_host_only=True)
    transport = httpx.ASGITransport(keeper)
    async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}") as http:
        response = await http.post("/who", headers={"origin": f"http://{host}"})

    assert response.status_code == status


async def test_what_is_left_to_a_key_is_told_and_then_it_waits(http: httpx.AsyncClient) -> None:
    bearing = {"x-api-key": LIMITED}
    left = [
        (await http.post("/who", headers=bearing)).headers["x-ratelimit-remaining-requests"]
        for _ in range(2)
    ]
    refused = await http.post("/who", headers=bearing)

    assert left == ["1", "0"]
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    assert refused.headers["x-ratelimit-limit-requests"] == "2"


async def test_an_apis_paths_are_refused_in_its_own_words(tmp_path: Path) -> None:
    def told(failure: Any) -> dict[str, object]:
        return {"type": "error", "status": failure.status}

    keeper, _ = door(tmp_path, error_shapes={"/v1/messages": told})
    transport = httpx.ASGITransport(keeper)
    async with httpx.AsyncClient(transport=transport, base_url="http://g.example") as http:
        response = await http.post("/v1/messages")

    assert response.json() == {"type": "error", "status": 401}


async def test_every_visit_ends(tmp_path: Path) -> None:
    keeper, turnstile = door(tmp_path)
    transport = httpx.ASGITransport(keeper, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://g.example") as http:
        for path in ("/who", "/nowhere", "/size"):
            await http.post(path, headers={"x-api-key": KEY}, content=b"x")

    assert turnstile.num_in_flight == 0


@asynccontextmanager
async def listening_door(
    tmp_path: Path, **changes: Any
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to a door on a real socket."""
    config = GatewayConfig(host="127.0.0.1", port=0, nats_url="", checkpoint=tmp_path, drain_s=1.0)
    keeper, turnstile = door(tmp_path, **changes)
    async with listening(keeper, config) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        yield reader, writer
        writer.close()
    assert turnstile.num_in_flight == 0


def post(*lines: str) -> bytes:
    head = ["POST /size HTTP/1.1", "Host: g", f"x-api-key: {KEY}", *lines]
    return "\r\n".join([*head, "", ""]).encode()


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes, dict[str, Any]]:
    async with asyncio.timeout(5):
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        return int(head.split()[1]), head.lower(), json.loads(await reader.readexactly(length))


async def test_an_announced_length_is_refused_before_a_byte_of_it(tmp_path: Path) -> None:
    async with listening_door(tmp_path) as (reader, writer):
        writer.write(post(f"Content-Length: {MAX_BYTES + 1}"))
        status, head, body = await answer(reader)

        assert status == 413
        assert b"connection: close" in head
        assert body["error"]["code"] == "request_too_large"


@pytest.mark.parametrize("zeros", [10, 4290, 9000])
async def test_a_length_may_begin_with_zeros(tmp_path: Path, zeros: int) -> None:
    """Python reads no number of more than 4,300 digits; that is no reason for a 500."""
    async with listening_door(tmp_path) as (reader, writer):
        writer.write(post(f"Content-Length: {'0' * zeros}{MAX_BYTES + 1}"))
        status, _, _ = await answer(reader)

        assert status == 413


async def test_who_asked_first_whether_to_send_may_keep_its_body(tmp_path: Path) -> None:
    """What comes next on the connection could be either, so nothing does."""
    async with listening_door(tmp_path) as (reader, writer):
        head = post("Content-Length: 10", "Expect: 100-continue")
        writer.write(head.replace(KEY.encode(), b"wrong"))
        status, told, _ = await answer(reader)

        assert status == 401
        assert b"connection: close" in told
        async with asyncio.timeout(5):
            assert await reader.read(1) == b""


async def test_an_upload_beyond_the_limit_is_cut_and_its_sender_can_read_why(
    tmp_path: Path,
) -> None:
    """It goes on sending, and gets rid of little more than the limit and what buffers hold."""
    async with listening_door(tmp_path) as (reader, writer):
        writer.write(post("Transfer-Encoding: chunked"))
        num_sent, piece = 0, b"10000\r\n" + bytes(65536) + b"\r\n"

        async def send_for_ever() -> None:
            nonlocal num_sent
            while True:
                writer.write(piece)
                await writer.drain()
                num_sent += 65536

        sending = asyncio.create_task(send_for_ever())
        status, _, _ = await answer(reader)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            async with asyncio.timeout(5):
                await asyncio.gather(sending, reader.readexactly(1))
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)

    assert status == 413
    assert num_sent < MAX_BYTES + 2 * MAX_BYTES + (16 << 20), "limit, what lingers, the kernel's"


async def test_a_body_that_dribbles_has_an_end(tmp_path: Path) -> None:
    async with listening_door(tmp_path, body_timeout_s=0.3) as (reader, writer):
        writer.write(post("Content-Length: 1000"))

        async def dribble() -> None:
            while True:
                writer.write(b"x")
                await asyncio.sleep(0.05)

        dribbling = asyncio.create_task(dribble())
        status, _, body = await answer(reader)
        dribbling.cancel()

    assert status == 408
    assert body["error"]["code"] == "request_timeout"


async def test_a_body_within_the_limits_arrives_and_the_connection_lives_on(
    tmp_path: Path,
) -> None:
    async with listening_door(tmp_path) as (reader, writer):
        for num_bytes in (MAX_BYTES, 1):
            writer.write(post(f"Content-Length: {num_bytes}") + bytes(num_bytes))
            status, head, body = await answer(reader)

            assert (status, body) == (200, {"bytes": num_bytes})
            assert b"connection: close" not in head
