import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from starlette.routing import BaseRoute, Mount, Route

from services.gateway.config import GatewayConfig
from services.gateway.door.doorkeeper import PROBES
from services.gateway.door.keys import new_key
from services.gateway.door.opened import opened
from shared.errors import ConfigError
from shared.logs import JsonLines
from tests.services.gateway.stage import MODEL, Stage, eventually, staged

ALICE, ALICE_ENTRY = new_key("alice", "red")
BOB, BOB_ENTRY = new_key("bob", "blue")
CAROL, CAROL_ENTRY = new_key("carol", "red")
ROOT, ROOT_ENTRY = new_key("root", "staff")
PROMPT = list(range(100, 300))


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    file = tmp_path / "keys.toml"
    file.write_text(
        f"{ALICE_ENTRY}max_priority = 0\n{BOB_ENTRY}prompt_tokens_per_minute = 250\n"
        f"max_in_flight = 1\n{CAROL_ENTRY}\n{ROOT_ENTRY}operator = true\n"
    )
    return file


def bearing(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def complete(stage: Stage, key: str, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "prompt": PROMPT, **fields}
    return await stage.http.post("/v1/completions", json=body, headers=bearing(key))


def paths(routes: list[BaseRoute]) -> Iterator[tuple[str, str]]:
    """Every route and method of the application, with its parameters filled in."""
    for route in routes:
        if isinstance(route, Mount):
            yield "GET", f"{route.path}/index.html"
        elif isinstance(route, Route):
            path = route.path.replace("{", "").replace("}", "").replace(":path", "")
            for method in route.methods or ():
                yield method, path
        else:
            raise AssertionError(f"a route of a kind that is not tested: {route}")


async def test_no_route_but_the_probes_answers_without_a_key(nats_url: str, keys: Path) -> None:
    """The application's own list is walked, so that a new route is not forgotten."""
    async with staged(nats_url, is_empty=True, api_keys_file=keys) as stage:
        found = sorted(set(paths(stage.serving.app.routes)))
        assert len(found) > 15, "the list is the application's"
        for method, path in [*found, ("GET", "/nowhere"), ("POST", "/v1"), ("TRACE", "/")]:
            response = await stage.http.request(method, path)
            is_probe = path in PROBES and method in ("GET", "HEAD")
            assert (response.status_code == 401) is not is_probe, (method, path)
            if is_probe or method == "HEAD":
                continue
            assert response.headers["x-request-id"]
            assert response.json()["error"]["type"] == "authentication_error"


async def test_two_tenants_share_no_blocks_and_one_tenants_keys_do(
    nats_url: str, keys: Path
) -> None:
    async with staged(nats_url, api_keys_file=keys) as stage:
        for key in (ALICE, CAROL, BOB):
            stage.plan("One.")
            assert (await complete(stage, key)).status_code == 200
        alice, carol, bob = (submit.block_hashes for submit in stage.fleet.submits)

    assert alice == carol
    assert not {alice[at : at + 16] for at in range(0, 48, 16)} & {
        bob[at : at + 16] for at in range(0, 48, 16)
    }


async def test_a_keys_tokens_and_priority_are_bounded_before_work_is_done(
    nats_url: str, keys: Path
) -> None:
    async with staged(nats_url, api_keys_file=keys) as stage:
        stage.plan("One.")
        first = await complete(stage, BOB)
        second = await complete(stage, BOB)
        claimed = await complete(stage, ALICE, priority=1)
        num_placed = len(stage.fleet.places)

    assert first.status_code == 200
    assert first.headers["x-ratelimit-remaining-tokens"] == "50"
    assert second.status_code == 429
    assert 30 <= int(second.headers["retry-after"]) <= 36
    assert second.json()["error"]["code"] == "rate_limit_exceeded"
    assert claimed.status_code == 403
    assert num_placed == 1


async def test_no_more_than_max_queued_wait_for_a_first_token(nats_url: str) -> None:
    """Who has his first token waits no longer, so another may."""
    async with staged(nats_url, max_queued=1) as stage:
        stage.plan("One two three.", hold_at=0)
        waiting = asyncio.create_task(stage.complete())
        await eventually(lambda: len(stage.fleet.submits) == 1)
        refused = await stage.complete()
        stage.fleet.release()
        first = await waiting
        second = await stage.complete()

    assert (refused.status_code, first.status_code, second.status_code) == (429, 200, 200)
    assert refused.headers["retry-after"] == "1"


async def test_no_more_than_a_key_or_the_gateway_may_have_are_inside(
    nats_url: str, keys: Path
) -> None:
    async with staged(nats_url, api_keys_file=keys, max_in_flight=2) as stage:
        stage.plan("One two three.", hold_at=0)
        held = [asyncio.create_task(complete(stage, BOB, prompt="Once"))]
        await eventually(lambda: len(stage.fleet.submits) == 1)
        of_the_key = await complete(stage, BOB, prompt="Once")
        held.append(asyncio.create_task(complete(stage, ALICE, prompt="Once")))
        await eventually(lambda: len(stage.fleet.submits) == 2)
        of_all = await complete(stage, CAROL, prompt="Once")
        probe = await stage.http.get("/livez")
        stage.fleet.release()
        served = [response.status_code for response in await asyncio.gather(*held)]

    assert (of_the_key.status_code, of_all.status_code) == (429, 429)
    assert (probe.status_code, served) == (200, [200, 200])


async def test_only_operators_read_what_is_about_others(nats_url: str, keys: Path) -> None:
    async with staged(nats_url, is_empty=True, api_keys_file=keys, debug_token="t0ken") as stage:
        for path, expected in (("/metrics", 200), ("/debug/decisions/x", 404)):
            root = await stage.http.get(path, headers=bearing(ROOT))
            alice = await stage.http.get(path, headers=bearing(ALICE))
            assert (root.status_code, alice.status_code) == (expected, 403), path
        token = await stage.http.get("/debug/decisions/x", headers=bearing("t0ken"))
        assert token.json()["error"]["code"] == "decision_not_found"


async def test_a_key_that_is_taken_out_of_the_file_opens_nothing_soon(
    nats_url: str, keys: Path
) -> None:
    async with staged(nats_url, is_empty=True, api_keys_file=keys) as stage:
        path = "/v1/models"
        assert (await stage.http.get(path, headers=bearing(ALICE))).status_code == 200
        keys.write_text(BOB_ENTRY)
        for _ in range(30):
            if (await stage.http.get(path, headers=bearing(ALICE))).status_code == 401:
                break
            await asyncio.sleep(0.1)
        assert (await stage.http.get(path, headers=bearing(ALICE))).status_code == 401
        assert (await stage.http.get(path, headers=bearing(BOB))).status_code == 200


async def test_what_a_client_sends_adds_no_header_and_no_log_line(
    nats_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    forged = 'x\r\nset-cookie: a=b\r\n\r\n{"level": "ERROR"}'
    caplog.set_level(logging.INFO)
    async with staged(nats_url) as stage:
        stage.plan("One.")
        answers = [
            await stage.complete(model=forged),
            await stage.complete(user=forged, metadata={"k": forged}, cache_salt=forged),
            await stage.http.get(f"/v1/models/{quote(forged, safe='')}"),
            await stage.http.get(f"/{quote(forged, safe='')}/"),
            await stage.http.get("/livez", headers={"x-request-id": "a%0d%0ab c"}),
        ]

    line = JsonLines("gateway", dict)
    assert all("set-cookie" not in answer.headers for answer in answers)
    assert answers[-1].headers["x-request-id"] != "a%0d%0ab c"
    for record in caplog.records:
        assert line.format(record).isprintable()
        assert json.loads(line.format(record))["level"] == record.levelname


def config(tmp_path: Path, **changes: Any) -> GatewayConfig:
    values = {"host": "0.0.0.0", "port": 0, "nats_url": "nats://127.0.0.1:1"}
    return GatewayConfig(**{**values, "checkpoint": tmp_path, **changes})


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "gateway"])
def test_an_open_gateway_that_others_reach_must_be_meant(host: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="api_keys_file, or allow_anonymous"):
        config(tmp_path, host=host)

    assert config(tmp_path, host=host, allow_anonymous=True).is_open
    assert not config(tmp_path, host=host, api_keys_file=tmp_path).is_open


@pytest.mark.parametrize(
    "changes",
    [
        {"allow_anonymous": True, "api_keys_file": Path("keys")},
        {"allow_anonymous": True, "tls_cert_file": Path("cert")},
        {"allow_anonymous": True, "max_in_flight": 0},
    ],
)
def test_settings_that_cannot_be_meant_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        config(tmp_path, **changes)


async def test_a_file_of_keys_that_is_missing_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"keys\.toml"):
        async with opened(config(tmp_path, api_keys_file=tmp_path / "keys.toml"), {}):
            pass
