"""An API's answers as its clients put them together: from a stream's events, and from a whole.

What a client has at the end: texts, thoughts, calls, why it ended, usage, logprobs. Random ids and
times are left out.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from services.gateway.dialects.dialect import Event

Json = dict[str, Any]
_RANDOM = {"id", "call_id", "created", "created_at", "completed_at", "encrypted_content"}


@dataclass(frozen=True)
class View:
    """How one API's clients read."""

    streamed: Callable[[Sequence[Event]], Any]
    whole: Callable[[Json], Any]


def _chat_stream(events: Sequence[Event]) -> Any:
    message: Json = {"content": "", "reasoning_content": "", "tool_calls": []}
    found: Json = {"message": message, "logprobs": [], "finish_reason": None, "usage": None}
    for event in events:
        found["usage"] = event.data.get("usage") or found["usage"]
        for choice in event.data["choices"]:
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                message[name] += delta.get(name) or ""
            message["tool_calls"] += [_plain(call) for call in delta.get("tool_calls") or ()]
            found["logprobs"] += (choice["logprobs"] or {}).get("content") or []
            found["finish_reason"] = choice["finish_reason"] or found["finish_reason"]
    return found


def _chat_whole(response: Json) -> Any:
    (choice,) = response["choices"]
    message = choice["message"]
    calls = message.get("tool_calls") or []
    return {
        "message": {
            "content": message["content"] or "",
            "reasoning_content": message.get("reasoning_content") or "",
            "tool_calls": [{**_plain(call), "index": place} for place, call in enumerate(calls)],
        },
        "logprobs": (choice["logprobs"] or {}).get("content") or [],
        "finish_reason": choice["finish_reason"],
        "usage": response["usage"],
    }


def _completion_stream(events: Sequence[Event]) -> Any:
    found: Json = {"text": "", "logprobs": None, "finish_reason": None, "usage": None}
    for event in events:
        found["usage"] = event.data.get("usage") or found["usage"]
        for choice in event.data["choices"]:
            found["text"] += choice["text"]
            for name, values in (choice["logprobs"] or {}).items():
                found["logprobs"] = found["logprobs"] or {}
                found["logprobs"].setdefault(name, []).extend(values)
            found["finish_reason"] = choice["finish_reason"] or found["finish_reason"]
    return found


def _completion_whole(response: Json) -> Any:
    (choice,) = response["choices"]
    return {
        **{name: choice[name] for name in ("text", "logprobs", "finish_reason")},
        "usage": response["usage"],
    }


def _responses_stream(events: Sequence[Event]) -> Any:
    """From the deltas; what the last event tells whole must agree."""
    items: list[Json] = []
    numbers = [event.data["sequence_number"] for event in events]
    assert numbers == list(range(len(events)))
    assert all(event.name == event.data["type"] for event in events)
    for event in events:
        data = event.data
        match event.name:
            case "response.output_item.added":
                items.append({**_plain(data["item"]), "text": "", "logprobs": []})
            case "response.output_text.delta":
                items[data["output_index"]]["text"] += data["delta"]
                items[data["output_index"]]["logprobs"] += data["logprobs"]
            case "response.reasoning_text.delta" | "response.function_call_arguments.delta":
                items[data["output_index"]]["text"] += data["delta"]
    last = events[-1].data["response"]
    return _responses_told([(each["text"], each["logprobs"]) for each in items], last)


def _responses_whole(response: Json) -> Any:
    pieces = []
    for item in response["output"]:
        part = item["content"][0] if item["type"] != "function_call" else {}
        pieces.append((part.get("text", item.get("arguments")), part.get("logprobs", [])))
    return _responses_told(pieces, response)


def _responses_told(pieces: Sequence[tuple[str, list[Json]]], response: Json) -> Any:
    return {"pieces": list(pieces), "response": _plain(response)}


def _messages_stream(events: Sequence[Event]) -> Any:
    blocks: list[Json] = []
    message: Json = {}
    for event in events:
        data = event.data
        match data["type"]:
            case "message_start":
                message = _plain(data["message"])
            case "content_block_start":
                blocks.append({**_plain(data["content_block"]), "json": ""})
            case "content_block_delta":
                _grow(blocks[data["index"]], data["delta"])
            case "message_delta":
                message |= {**data["delta"], "usage": {**message["usage"], **data["usage"]}}
    for block in blocks:
        written = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(written)
        block.pop("signature", None)
    return {**message, "content": blocks}


def _grow(block: Json, delta: Json) -> None:
    match delta["type"]:
        case "text_delta":
            block["text"] += delta["text"]
        case "thinking_delta":
            block["thinking"] += delta["thinking"]
        case "input_json_delta":
            block["json"] += delta["partial_json"]


def _messages_whole(response: Json) -> Any:
    message = _plain(response)
    for block in message["content"]:
        block.pop("signature", None)
    return message


def _plain(document: Any) -> Any:
    """Without what is random."""
    if isinstance(document, dict):
        return {name: _plain(value) for name, value in document.items() if name not in _RANDOM}
    return [_plain(each) for each in document] if isinstance(document, list) else document


VIEWS = {
    "chat": View(_chat_stream, _chat_whole),
    "completions": View(_completion_stream, _completion_whole),
    "responses": View(_responses_stream, _responses_whole),
    "messages": View(_messages_stream, _messages_whole),
}
