"""The document tells of every route, with the shapes that requests are checked by."""

from typing import Any

from services.gateway.openapi import document
from tests.services.gateway.stage import Stage

UNTOLD = {"/", "/metrics", "/openapi.json"}  # a page, and texts that are not JSON or are this


def references(node: Any) -> set[str]:
    if isinstance(node, list):
        return set().union(*map(references, node))
    if not isinstance(node, dict):
        return set()
    own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
    return own.union(*map(references, node.values()))


def test_every_reference_leads_somewhere() -> None:
    """Tools that generate clients stop at the first that does not."""
    told = document("demo")
    defined = {f"#/components/schemas/{name}" for name in told["components"]["schemas"]}

    assert references(told) <= defined


async def test_every_route_with_a_fixed_path_is_told(stage: Stage) -> None:
    """What is not in the document is not tested with it."""
    told = (await stage.http.get("/openapi.json")).json()["paths"]
    served = {
        route.path
        for route in stage.serving.app.routes
        if "{" not in route.path and not route.path.startswith("/farspan/page")
    }

    assert served - UNTOLD == set(told)


async def test_a_told_route_answers(stage: Stage) -> None:
    """With the method that is told."""
    told = (await stage.http.get("/openapi.json")).json()["paths"]

    for path, methods in told.items():
        (method,) = methods
        answer = await stage.http.request(method, path)
        assert answer.status_code not in (404, 405, 500), path
