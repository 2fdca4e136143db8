"""The page's files and what it reads, over ASGI."""

import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from services.gateway.door.keys import new_key
from services.gateway.fleet import Fleet
from services.gateway.timelines import Timeline, Timelines
from services.gateway.web import routes
from services.gateway.web.routes import Observed, add_page
from shared import farspan_pb2 as pb
from tests.services.gateway.stage import MODEL, Stage, staged

PAGE = Path(routes.__file__).parent / "page"
FILES = sorted(path.name for path in PAGE.iterdir())
TYPES = {".html": "text/html", ".css": "text/css", ".svg": "image/svg+xml", ".js": "javascript"}


@pytest.fixture
def fleet() -> Fleet:
    return Fleet("m", 3.0)


@pytest.fixture
def timelines() -> Timelines:
    return Timelines()


@pytest.fixture
async def http(fleet: Fleet, timelines: Timelines) -> AsyncIterator[httpx.AsyncClient]:
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    tenant_of = lambda request: request.headers.get("tenant", "")  # noqa: E731  # the door decides that elsewhere
    add_page(app, Observed(fleet, timelines, lambda: 100.0, tenant_of))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        yield client


async def test_the_page_is_at_the_root(http: httpx.AsyncClient) -> None:
    """As what it is, and asked for again each time: an upgrade shows at once."""
    answer = await http.get("/")

    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert "<title>Farspan</title>" in answer.text


@pytest.mark.parametrize("path", ["/", "/farspan/fleet", "/farspan/page/main.js"])
async def test_head_is_answered_without_a_body(http: httpx.AsyncClient, path: str) -> None:
    """Command-line agents ask HEAD / to see whether anybody is there."""
    answer = await http.head(path)

    assert answer.status_code == 200
    assert answer.content == b""
    assert int(answer.headers["content-length"]) > 0


@pytest.mark.parametrize("name", FILES)
async def test_each_file_has_its_type_and_the_policy(http: httpx.AsyncClient, name: str) -> None:
    """Browsers run no module of another type; the policy lets nothing in from elsewhere."""
    answer = await http.get(f"/farspan/page/{name}")

    assert answer.status_code == 200
    assert TYPES[Path(name).suffix] in answer.headers["content-type"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    policy = answer.headers["content-security-policy"].split("; ")
    assert policy[0] == "default-src 'self'"
    assert "frame-ancestors 'none'" in policy
    assert not any("unsafe" in rule or "script-src" in rule for rule in policy)


async def test_an_unchanged_file_is_not_sent_again(http: httpx.AsyncClient) -> None:
    """The answer keeps the policy."""
    for path in ("/", "/farspan/page/main.js"):
        etag = (await http.get(path)).headers["etag"]
        answer = await http.get(path, headers={"if-none-match": etag})

        assert answer.status_code == 304
        assert answer.content == b""
        assert answer.headers["etag"] == etag
        assert "content-security-policy" in answer.headers


@pytest.mark.parametrize(
    "path", ["nothing.js", "../routes.py", "..%2froutes.py", "%2fetc%2fpasswd", "", "x%00y"]
)
async def test_nothing_else_is_served(http: httpx.AsyncClient, path: str) -> None:
    """The folder beside the page holds code."""
    answer = await http.get(f"/farspan/page/{path}", follow_redirects=True)

    assert answer.status_code == 404


async def test_nothing_is_posted_to_the_page(http: httpx.AsyncClient) -> None:
    """It is for reading."""
    for path in ("/", "/farspan/page/main.js", "/farspan/fleet"):
        assert (await http.post(path)).status_code == 405


def test_the_page_names_nothing_outside_itself() -> None:
    """It works on a machine without a network, and without inline code or markup from strings."""
    for path in PAGE.iterdir():
        text = path.read_text().replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert "http://" not in text
        assert "https://" not in text
        assert "//" not in re.sub(r"^\s*//.*|\s// .*", "", text, flags=re.M)
        for word in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval("):
            assert word not in text
    page = (PAGE / "index.html").read_text()
    assert not re.search(r"<script(?![^>]* src=)|<style|\sstyle=|\son\w+=", page)


def test_each_file_that_the_page_names_is_there() -> None:
    """A module that is missing leaves a white page."""
    page = (PAGE / "index.html").read_text()
    named = {name for name in re.findall(r'"farspan/page/([^"]+)"', page)}
    for path in PAGE.glob("*.js"):
        named |= set(re.findall(r'from "\./([^"]+)"', path.read_text()))

    assert named | {"index.html"} == set(FILES)


async def test_the_fleet_is_told(http: httpx.AsyncClient, fleet: Fleet) -> None:
    """Plain figures of each worker."""
    load = pb.Load(num_running=1, num_waiting=2, waiting_tokens=300, free_blocks=5, total_blocks=9)
    fleet.hear(
        pb.Heartbeat(
            worker=pb.WorkerRef(worker_id="p0", epoch=1),
            role=pb.ROLE_PREFILL,
            state=pb.SERVICE_STATE_READY,
            model="m",
            load=load,
        ),
        99.5,
    )

    answer = await http.get("/farspan/fleet")

    assert answer.headers["cache-control"] == "no-store"
    assert answer.json() == {
        "workers": [
            {
                "id": "p0",
                "role": "prefill",
                "state": "ready",
                "model": "m",
                "heard_s_ago": 0.5,
                "running": 1,
                "waiting": 2,
                "waiting_tokens": 300,
                "tokens_per_s": 0.0,
                "pools": [{"name": "blocks", "free": 5, "total": 9}],
            }
        ]
    }


async def test_a_timeline_is_told_to_its_tenant_only(
    http: httpx.AsyncClient, timelines: Timelines
) -> None:
    """To others it is as unknown as an id that nobody used."""
    timelines.add(Timeline("r1", "mine", begin_unix_us=7))
    path = "/farspan/requests/r1/timeline"

    mine = await http.get(path, headers={"tenant": "mine"})
    theirs = await http.get(path, headers={"tenant": "theirs"})
    unknown = await http.get("/farspan/requests/r2/timeline", headers={"tenant": "mine"})

    assert mine.status_code == 200
    assert (mine.json()["id"], mine.json()["begin_unix_us"]) == ("r1", 7)
    assert theirs.status_code == unknown.status_code == 404
    assert theirs.json() == unknown.json()
    assert theirs.json()["error"]["code"] == "request_not_found"


async def test_an_answered_request_has_a_timeline(stage: Stage) -> None:
    """Under the id that its response carries, with what both workers told."""
    plan = stage.plan("One two.", cached_tokens=1)
    plan.prefill_stages = (pb.Stage(name="prefill.chunk", begin_unix_us=1, end_unix_us=2),)
    plan.decode_stages = (pb.Stage(name="decode.generate", begin_unix_us=3, end_unix_us=4),)

    answer = await stage.complete()
    told = await stage.http.get(f"/farspan/requests/{answer.headers['x-request-id']}/timeline")
    same = await stage.http.get(f"/farspan/requests/{answer.json()['id']}/timeline")

    timeline = told.json()
    assert timeline == same.json()
    assert timeline["attempts"] == 1
    assert timeline["usage"]["completion_tokens"] == len(plan.answer)
    assert timeline["usage"]["cached_tokens"] == 1
    assert timeline["begin_unix_us"] < timeline["first_token_unix_us"] <= timeline["end_unix_us"]
    assert [(one["name"], one["worker"], one["attempt"]) for one in timeline["stages"]] == [
        ("prefill.chunk", "p0", 1),
        ("decode.generate", "d0", 1),
    ]


async def test_a_key_of_another_tenant_reads_no_timeline(nats_url: str, tmp_path: Path) -> None:
    """Through the whole door: not even with the id in hand."""
    made = [new_key(name, name) for name in ("mine", "theirs")]
    file = tmp_path / "keys.toml"
    file.write_text("".join(entry for _, entry in made))
    mine, theirs = ({"authorization": f"Bearer {key}"} for key, _ in made)
    async with staged(nats_url, api_keys_file=file) as stage:
        stage.plan("One.")
        answer = await stage.http.post(
            "/v1/completions", json={"model": MODEL, "prompt": "Once"}, headers=mine
        )
        path = f"/farspan/requests/{answer.json()['id']}/timeline"

        statuses = [(await stage.http.get(path, headers=key)).status_code for key in (mine, theirs)]

    assert statuses == [200, 404]
