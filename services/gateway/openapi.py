"""The OpenAPI document: every route of the gateway, with the shapes that requests are checked by.

Made from the shapes themselves, so it cannot say anything else than they do.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from services.gateway.dialects.chat import ChatRequest
from services.gateway.dialects.completions import CompletionRequest
from services.gateway.dialects.messages import CountRequest, MessagesRequest
from services.gateway.dialects.responses import ResponsesRequest
from services.gateway.dialects.texting import DetokenizeRequest, TokenizeRequest

Json = dict[str, Any]

GENERATING: Mapping[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
}
COUNTING: Mapping[str, type[BaseModel]] = {
    "/v1/messages/count_tokens": CountRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/v1/tokenize": TokenizeRequest,
    "/v1/detokenize": DetokenizeRequest,
}
READING: Mapping[str, str] = {
    "/v1/models": "The model that is served.",
    "/tokenizer_info": "The tokenizer's settings and the chat template.",
    "/v1/tokenizer_info": "The tokenizer's settings and the chat template.",
    "/farspan/fleet": "The workers and their pools.",
    "/livez": "Whether the process lives.",
    "/readyz": "Whether requests can be served, and why not.",
    "/startupz": "As /readyz.",
    "/health": "As /readyz.",
}
_FAILURES = {
    "400": "The request is wrong; the error says where.",
    "401": "No known API key.",
    "403": "This page of the browser may not ask.",
    "404": "There is no such thing.",
    "408": "The body came too slowly.",
    "413": "The body is too large.",
    "429": "Too much for now; Retry-After says when.",
    "500": "Our fault.",
    "503": "Nobody can serve it now.",
    "504": "The deadline passed.",
}


@cache
def document(title: str) -> Json:
    """The document, for a gateway that serves this model."""
    shapes = sorted({*GENERATING.values(), *COUNTING.values()}, key=lambda shape: shape.__name__)
    _, schemas = models_json_schema(
        [(shape, "validation") for shape in shapes], ref_template="#/components/schemas/{model}"
    )
    definitions = {**schemas["$defs"], "Error": _error()}
    paths: Json = {
        path: {"post": _post(path, shape, streams=True)} for path, shape in GENERATING.items()
    }
    paths |= {path: {"post": _post(path, shape)} for path, shape in COUNTING.items()}
    paths |= {path: {"get": _get(path, words)} for path, words in READING.items()}
    return {
        "openapi": "3.1.0",
        "info": {"title": f"Farspan, serving {title}", "version": "v1"},
        "paths": paths,
        "components": {
            "schemas": definitions,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{"bearer": []}, {"key": []}],
    }


def _post(path: str, shape: type[BaseModel], *, streams: bool = False) -> Json:
    reference = {"$ref": f"#/components/schemas/{shape.__name__}"}
    content: Json = {"application/json": {"schema": {"type": "object"}}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {
        "operationId": path.strip("/").replace("/", "_"),
        "summary": (shape.__doc__ or "").splitlines()[0],
        "requestBody": {"required": True, "content": {"application/json": {"schema": reference}}},
        "responses": {"200": {"description": "The answer.", "content": content}, **_failures()},
    }


def _get(path: str, words: str) -> Json:
    content = {"application/json": {"schema": {"type": "object"}}}
    return {
        "operationId": path.strip("/").replace("/", "_"),
        "summary": words,
        "responses": {"200": {"description": words, "content": content}, **_failures()},
    }


def _failures() -> Json:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {
        status: {"description": words, "content": content} for status, words in _FAILURES.items()
    }


def _error() -> Json:
    """OpenAI's error object, or Anthropic's: both have these."""
    inner = {
        "type": "object",
        "properties": {"message": {"type": "string"}, "type": {"type": "string"}},
        "required": ["message", "type"],
    }
    return {"type": "object", "properties": {"error": inner}, "required": ["error"]}
