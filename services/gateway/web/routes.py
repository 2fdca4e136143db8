"""Routes of the page and of what it reads. Its files lie in `page`; there is no build step."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from os import stat_result
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import PathLike, StaticFiles
from starlette.types import Scope

from services.gateway.failures import HttpFailure, openai_error
from services.gateway.fleet import Fleet
from services.gateway.timelines import Timelines

FLEET_PATH = "/farspan/fleet"
TIMELINE_PATH = "/farspan/requests/{request_id}/timeline"
_READ = ["GET", "HEAD"]
_PAGE = Path(__file__).parent / "page"
# Nothing from elsewhere, nothing inline, and no site may frame the page.
_PAGE_HEADERS = {
    "content-security-policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
        " object-src 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cache-control": "no-cache",  # asked for again each time, and answered 304
}


@dataclass(frozen=True)
class Observed:
    """What the page may read."""

    fleet: Fleet
    timelines: Timelines
    clock: Callable[[], float]  # the fleet's, in seconds
    tenant_of: Callable[[Request], str]


def add_page(app: FastAPI, observed: Observed) -> None:
    """Serve the page at `/`, its files, the fleet and timelines."""
    files = _Files(directory=_PAGE)

    async def page(request: Request) -> Response:
        return await files.get_response("index.html", request.scope)

    async def fleet(_: Request) -> JSONResponse:
        workers = observed.fleet.view(observed.clock())
        return _fresh({"workers": [asdict(worker) for worker in workers]})

    async def timeline(request: Request) -> JSONResponse:
        name = request.path_params["request_id"]
        found = observed.timelines.find(name, observed.tenant_of(request))
        if found is None:
            message = "no request of this id is remembered here"
            failure = HttpFailure(404, message, code="request_not_found")
            return JSONResponse(openai_error(failure), failure.status)
        return _fresh(found.as_json())

    app.router.routes += [
        Route("/", page, methods=_READ),
        Route(FLEET_PATH, fleet, methods=_READ),
        Route(TIMELINE_PATH, timeline, methods=_READ),
        Mount("/farspan/page", files),
    ]


class _Files(StaticFiles):
    def file_response(
        self, full_path: PathLike, stat_result: stat_result, scope: Scope, status_code: int = 200
    ) -> Response:
        """A file, or that it has not changed."""
        response = super().file_response(full_path, stat_result, scope, status_code)
        response.headers.update(_PAGE_HEADERS)
        return response


def _fresh(document: dict[str, Any]) -> JSONResponse:
    """A document that is another one a moment later."""
    return JSONResponse(document, headers={"cache-control": "no-store"})
