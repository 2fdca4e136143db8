"""However an answer's tokens come in, every API tells the same: random splits of many answers.

Each answer is read token by token, then in random batches, and its text once more in other tokens,
through the gateway's own stages and each API's own responses, put together as that API's clients
do. Any difference ends the run with an error. `python -m benchmarks.invariance --splits 10000`
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.clients_view import VIEWS, View
from services.gateway.dialects.chat_replies import CHAT
from services.gateway.dialects.completion_replies import COMPLETION
from services.gateway.dialects.dialect import Dialect, Ending, Event, Opening, Replies
from services.gateway.dialects.messages_replies import MESSAGES
from services.gateway.dialects.responses_replies import RESPONSES
from services.gateway.intake import Intake, Limits, take_in
from services.gateway.ledger import Usage
from services.gateway.logprobs import RawLogprob
from services.gateway.text.answer import Answer
from services.gateway.text.tokenizer import Tokenizer
from shared import farspan_pb2 as pb

CHECKPOINT = Path(__file__).parents[1] / "checkpoints" / "demo-fp8"
DIALECTS = {"chat": CHAT, "completions": COMPLETION, "responses": RESPONSES, "messages": MESSAGES}
_LIMITS = Limits(max_tokens=1 << 20, max_prompt_tokens=1 << 20, default_new_tokens=1000)

_TOOL = {
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "n": {}}},
}
_PIECES = [
    "</think>",
    "<think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_call>get_weather</tool_call>",
    "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Zürich</arg_value>\n</tool_call>",
    "<tool_call>get_weather<arg_key>n</arg_key><arg_value>[1, {}]</arg_value></tool_call>",
    "<tool_call>nobody</tool_call>",
    "<tool_call>get_weather<arg_key>",
    "<tool_", "</th", "<", "\n", "\n\n", " ", "get_weather",
    "<arg_key>", "</arg_value>",
    "The river, ", "한국어 텍스트", "naïve ﬃ 𝔘", "👩‍👩‍👧", "STOP", "ST", "끝났다", "끝", "é", "0.5",
    "<|user|>",
]  # fmt: skip
_STOPS = [
    [],
    ["STOP"],
    ["끝났", "👩‍👩"],
    ["</arg", "\n\n"],
    ["é", "naïve ﬃ"],
    ["이 아닌 것", "<tool_call>n"],
]
_NUM_PLAIN_TOKENS = 4076  # of the demo checkpoint: any may follow any, most are half a code point


@dataclass(frozen=True)
class Case:
    """An answer, and what its client asked for."""

    token_ids: Sequence[int]
    logprobs: Sequence[RawLogprob]
    stops: list[str]
    is_one_call: bool
    has_logprobs: bool
    reason: pb.FinishReason


def main() -> int:
    """Run so many splits, and say how many agreed; the exit status is 1 if one did not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--splits", type=int, default=12_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    begun_s = time.monotonic()
    num_splits = splits(arguments.splits, arguments.seed)
    print(f"{num_splits} random splits agree, in {time.monotonic() - begun_s:.0f} s")
    return 0


def splits(num_wanted: int, seed: int, splits_a_case: int = 8) -> int:
    """At least so many random splits over all APIs, all of which agreed; how many there were.

    Raises AssertionError for the first that does not.
    """
    chance = random.Random(seed)
    tokenizer = Tokenizer(CHECKPOINT)
    spellings = _byte_tokens(tokenizer)
    num_done = 0
    while num_done < num_wanted:
        case = _case(chance, tokenizer)
        for name, dialect in DIALECTS.items():
            reading = _Reading(dialect, VIEWS[name], case, tokenizer)
            expected = reading.told([[place] for place in range(len(case.token_ids))], True)
            for _ in range(splits_a_case // 2):
                batches = list(_batches(chance, len(case.token_ids)))
                found = reading.told(batches, chance.random() < 0.3)
                assert found == expected, _difference(name, case, batches, expected, found)

                other = _respelled(chance, case, tokenizer, spellings)
                batches = list(_batches(chance, len(other.token_ids)))
                found = _Reading(dialect, VIEWS[name], other, tokenizer).told(batches, False)
                texts = _without_counts(expected)
                assert _without_counts(found) == texts, _difference(
                    name, other, batches, texts, _without_counts(found)
                )
                num_done += 2
    return num_done


class _Reading:
    """One case through one API."""

    def __init__(self, dialect: Dialect, view: View, case: Case, tokenizer: Tokenizer) -> None:
        self._case = case
        self._view = view
        call = dialect.read(json.dumps(_body(dialect, case)).encode())
        self._has_logprobs = call.ask.wishes.num_logprobs is not None
        self._new_replies: Callable[[], Replies] = lambda: call.replies("demo")
        self._intake: Intake = take_in(call.ask, tokenizer, "", bytes(16), _LIMITS)

    def told(self, batches: Sequence[Sequence[int]], is_one_event_a_token: bool) -> Any:
        """What a client has at the end, streamed and whole: the same, or an AssertionError."""
        answer, replies = self._intake.new_answer(), self._new_replies()
        events = replies.begin(Opening(Usage(7, 3)))
        for batch in batches:
            if answer.is_stopped:
                break
            is_apart = is_one_event_a_token or self._has_logprobs  # as services.gateway.choices
            for part in [[place] for place in batch] if is_apart else [batch]:
                events += self._fed(answer, replies, part)
        events += replies.feed(0, answer.flush())
        reason = pb.FINISH_REASON_STOP if answer.is_stopped else self._case.reason
        events += replies.finish(0, Ending(reason, answer.stop))
        usage = Usage(7, 3, answer.num_tokens, answer.num_reasoning_tokens)
        events += replies.end(usage)
        streamed, whole = self._view.streamed(events), self._view.whole(replies.whole(usage))
        assert streamed == whole, f"a stream tells\n{streamed}\nand no stream\n{whole}"
        return streamed

    def _fed(self, answer: Answer, replies: Replies, places: Sequence[int]) -> list[Event]:
        ids = [self._case.token_ids[place] for place in places]
        logprobs = [self._case.logprobs[place] for place in places] if self._has_logprobs else []
        return replies.feed(0, answer.feed(ids, logprobs))


def _body(dialect: Dialect, case: Case) -> dict[str, Any]:
    """A request to this API that asks for as much as it can tell."""
    messages = [{"role": "user", "content": "Weather?"}]
    function = {"type": "function", "function": _TOOL}
    sampled = {"model": "demo", "stream": True}
    if dialect is CHAT:
        return {
            **sampled,
            "messages": messages,
            "tools": [function],
            "logprobs": case.has_logprobs,
            "top_logprobs": 2 if case.has_logprobs else None,
            "stop": case.stops,
            "parallel_tool_calls": not case.is_one_call,
            "stream_options": {"include_usage": True},
        }
    if dialect is COMPLETION:
        return {
            **sampled,
            "prompt": "x",
            "logprobs": 2 if case.has_logprobs else None,
            "stop": case.stops,
            "stream_options": {"include_usage": True},
        }
    if dialect is RESPONSES:
        return {
            **sampled,
            "input": "Weather?",
            "tools": [{"type": "function", **_TOOL}],
            "top_logprobs": 2 if case.has_logprobs else None,
            "include": ["message.output_text.logprobs"] if case.has_logprobs else [],
            "parallel_tool_calls": not case.is_one_call,
        }
    return {
        **sampled,
        "max_tokens": 1000,
        "messages": messages,
        "tools": [{"name": _TOOL["name"], "input_schema": _TOOL["parameters"]}],
        "stop_sequences": case.stops,
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": case.is_one_call},
    }


def _case(chance: random.Random, tokenizer: Tokenizer) -> Case:
    token_ids: list[int] = []
    for piece in chance.choices(_PIECES, k=chance.randint(1, 14)):
        token_ids += tokenizer.encode(piece)
        if chance.random() < 0.1:
            token_ids += chance.choices(range(_NUM_PLAIN_TOKENS), k=chance.randint(1, 4))
    if chance.random() < 0.2 and len(token_ids) > 1:
        token_ids.pop()  # an answer cut by its length may end anywhere
    logprobs = [
        RawLogprob(-place / 8, ((token_id, -place / 8), (chance.randrange(4096), -9.0)))
        for place, token_id in enumerate(token_ids)
    ]
    reason = chance.choice([pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH])
    stops, is_one_call, has_logprobs = (
        chance.choice(_STOPS),
        chance.random() < 0.3,
        chance.random() < 0.5,
    )
    return Case(token_ids, logprobs, stops, is_one_call, has_logprobs, reason)


def _byte_tokens(tokenizer: Tokenizer) -> dict[int, int]:
    """The token that is one byte, for each byte."""
    spelled = {tokenizer.token_bytes(token_id): token_id for token_id in range(_NUM_PLAIN_TOKENS)}
    return {byte: spelled[bytes([byte])] for byte in range(256)}


def _respelled(
    chance: random.Random, case: Case, tokenizer: Tokenizer, byte_tokens: dict[int, int]
) -> Case:
    """The same text, some of its tokens byte by byte: markers and stops come in any pieces."""
    share = chance.random()
    token_ids: list[int] = []
    for token_id in case.token_ids:
        data = tokenizer.token_bytes(token_id)
        is_spelled = bool(data) and chance.random() < share
        token_ids += [byte_tokens[byte] for byte in data] if is_spelled else [token_id]
    logprobs = [RawLogprob(0.0, ())] * len(token_ids)
    return replace(case, token_ids=token_ids, logprobs=logprobs)


def _without_counts(told: Any) -> Any:
    """What does not depend on the tokens of a text: no usage, no logprobs."""
    if isinstance(told, dict):
        return {
            name: _without_counts(value)
            for name, value in told.items()
            if name not in ("usage", "logprobs")
        }
    if isinstance(told, tuple):
        return told[0]  # a text, with its logprobs
    return [_without_counts(each) for each in told] if isinstance(told, list) else told


def _batches(chance: random.Random, num_tokens: int) -> Iterator[list[int]]:
    """All places in order, in batches of random lengths: often one token, at times all."""
    longest = chance.choice([2, 3, 8, 1 << 20])
    start = 0
    while start < num_tokens:
        end = min(num_tokens, start + chance.randint(1, min(longest, num_tokens)))
        yield list(range(start, end))
        start = end


def _difference(
    name: str, case: Case, batches: Sequence[Sequence[int]], expected: Any, found: Any
) -> str:
    lengths = [len(batch) for batch in batches]
    return f"{name}: {case}\nin batches of {lengths} it is\n{found}\nand not\n{expected}"


if __name__ == "__main__":
    sys.exit(main())
