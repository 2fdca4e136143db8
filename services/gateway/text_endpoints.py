"""The endpoints that need no worker: texts to tokens, tokens to texts, and how many there are."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from services.gateway.ask import Json
from services.gateway.config import GatewayConfig
from services.gateway.dialects.messages import read_count
from services.gateway.dialects.messages_replies import anthropic_error
from services.gateway.dialects.texting import read_detokenize, read_tokenize
from services.gateway.door.doorkeeper import CALLER
from services.gateway.door.keys import Caller
from services.gateway.exchange import Resources
from services.gateway.failures import HttpFailure, as_http, openai_error, unknown_model
from services.gateway.intake import Limits, prompt_token_ids
from services.gateway.text.tokenizer import Tokenizer
from services.gateway.wire import ClientGone, read_body, until_gone
from services.gateway.workshop import Workshop
from shared.errors import FarspanError
from shared.json_file import read_object


class Texting:
    """What the endpoints answer. Blocking: texts may be long."""

    def __init__(
        self, config: GatewayConfig, tokenizer: Tokenizer, max_model_len: Callable[[], int]
    ) -> None:
        """`max_model_len` tells what can be served now, in tokens."""
        self._config = config
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._limits = Limits(
            max_tokens=tokenizer.checkpoint.max_context_tokens,
            max_prompt_tokens=config.max_prompt_tokens,
            default_new_tokens=config.default_max_tokens,
        )

    def count(self, body: bytes, tenant: str) -> Json:
        """POST /v1/messages/count_tokens. Raises BadRequest."""
        request = read_count(body)
        self._check_model(request.model)
        ids = prompt_token_ids(request.chat(), self._tokenizer, tenant, self._limits)
        return {"input_tokens": len(ids)}

    def tokenize(self, body: bytes, tenant: str) -> Json:
        """POST /tokenize. Raises BadRequest."""
        request = read_tokenize(body)
        self._check_model(request.model)
        ids = prompt_token_ids(request.asked(), self._tokenizer, tenant, self._limits)
        names = None
        if request.return_token_strs:
            names = [self._tokenizer.token_text(each) for each in ids]
        return {
            "count": len(ids),
            "max_model_len": self._max_model_len(),
            "tokens": ids,
            "token_strs": names,
        }

    def detokenize(self, body: bytes, tenant: str) -> Json:
        """POST /detokenize. Raises BadRequest."""
        request = read_detokenize(body)
        self._check_model(request.model)
        return {"prompt": self._tokenizer.decode(request.tokens, skips_special=False)}

    def info(self) -> Json:
        """GET /tokenizer_info: the checkpoint's tokenizer_config.json and chat template."""
        path = self._config.checkpoint / "tokenizer_config.json"
        settings = read_object(path) if path.exists() else {}
        template = (self._config.checkpoint / "chat_template.jinja").read_text(encoding="utf-8")
        told = {name: _plain(value) for name, value in settings.items()}
        return {"tokenizer_class": "PreTrainedTokenizerFast", **told, "chat_template": template}

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._config.model_name:
            raise unknown_model(name)


@dataclass(frozen=True)
class TextEndpoint:
    """One of them as an ASGI application."""

    max_body_bytes: int
    workshop: Workshop
    answer: Callable[[bytes, str], Json]  # to a body, for a tenant
    error: Callable[[HttpFailure], Json]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request to its end."""
        try:
            body = await read_body(receive, self.max_body_bytes)
            caller: Caller = scope.get("state", {}).get(CALLER, Caller())
            tenant = caller.tenant
            told = await until_gone(
                self.workshop.run(tenant, len(body), self.answer, body, tenant), receive
            )
            response = JSONResponse(told)
        except ClientGone:
            return
        except FarspanError as error:
            failure = as_http(error)
            headers = dict(failure.headers)
            response = JSONResponse(self.error(failure), failure.status, headers)
        await response(scope, receive, send)


def max_model_len(resources: Resources) -> int:
    """The most tokens of a prompt and its answer. Without workers what the model could do."""
    held = resources.limits(resources.line.clock()).max_tokens
    return held or resources.tokenizer.checkpoint.max_context_tokens


def add_text_routes(app: FastAPI, resources: Resources) -> None:
    """The routes. Raises ConfigError for a tokenizer_config.json that cannot be read."""
    texting = Texting(resources.config, resources.tokenizer, lambda: max_model_len(resources))
    info = texting.info()
    max_body_bytes = resources.config.max_body_bytes
    count = TextEndpoint(max_body_bytes, resources.workshop, texting.count, anthropic_error)
    tokenize = TextEndpoint(max_body_bytes, resources.workshop, texting.tokenize, openai_error)
    detokenize = TextEndpoint(max_body_bytes, resources.workshop, texting.detokenize, openai_error)
    app.router.routes.append(Route("/v1/messages/count_tokens", count, methods=["POST"]))

    async def tokenizer_info() -> JSONResponse:
        return JSONResponse(info)

    for prefix in ("", "/v1"):
        app.router.routes += [
            Route(f"{prefix}/tokenize", tokenize, methods=["POST"]),
            Route(f"{prefix}/detokenize", detokenize, methods=["POST"]),
        ]
        app.add_api_route(f"{prefix}/tokenizer_info", tokenizer_info, methods=["GET", "HEAD"])


def _plain(value: Any) -> Any:
    """A special token as its text, also where the file tells more of it."""
    return value["content"] if isinstance(value, dict) and "content" in value else value
