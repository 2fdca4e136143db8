"""A turn that appends a thousand tokens to a conversation of a million: how long its text takes to
become tokens, when its first token comes, and what other streams notice.
"""

import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle

from benchmarks import report
from benchmarks.gateway_speed import figures
from benchmarks.gateway_speed.client import Client, Heard, Load
from benchmarks.gateway_speed.flow import Flow
from benchmarks.gateway_speed.streams import CHECKPOINT, MODEL, PACE, body, our_side
from services.gateway.text.tokenizer import Tokenizer
from tests.system.pass_keys import docstrings

_TOKENS = 1_000_000
_TURN_TOKENS = 1_000
_NUM_TURNS = 10
_NUM_OTHERS, _OTHERS_S, _OTHERS_FROM = 16, 20, 1000

Messages = list[dict[str, str]]


def measure() -> dict[str, float]:
    """The figures; a minute."""
    report.progress("a turn of a conversation of a million tokens")
    tokenizer = Tokenizer(CHECKPOINT)
    conversation, turns = _conversation(tokenizer)
    retokenise_ms = _retokenise_ms(tokenizer, conversation, turns)
    flow = Flow()
    with (
        Client(flow) as client,
        Client(flow) as other,
        our_side(client, flow) as (side, _),
        ThreadPoolExecutor() as threads,
    ):
        side.pace(PACE)
        (cold,) = client.load(Load(side.port, [_asked(conversation)]))
        side.sent_s()
        told = [body(int(_OTHERS_S * PACE))]
        others = Load(side.port, told, _NUM_OTHERS, first_number=_OTHERS_FROM)
        listening = threads.submit(other.load, others)
        time.sleep(2)
        warm = [
            answer
            for number in range(_NUM_TURNS)
            for answer in client.load(
                Load(side.port, [_asked(conversation + turns[: 2 * number + 1])])
            )
        ]
        end_s = warm[-1].arrived_s[-1]
        heard = listening.result()
        sent = side.sent_s()
    return {
        "retokenise_1m_ms": retokenise_ms,
        "turn_1m_ttft_p50_ms": figures.first_token_p50_ms(warm),
        "first_1m_ttft_ms": figures.first_token_p50_ms([cold]),
        "others_stall_1m_ms": _longest_delay_ms(heard, sent, warm[0].sent_s, end_s),
    }


def _retokenise_ms(tokenizer: Tokenizer, conversation: Messages, turns: Messages) -> float:
    """Template and tokens of each next turn, where the one before was seen; the median."""

    def encode(messages: Messages) -> float:
        begin_s = time.perf_counter()
        tokenizer.encode_bytes(tokenizer.render(messages, None, {}))
        return 1e3 * (time.perf_counter() - begin_s)

    encode(conversation)
    return statistics.median(
        encode(conversation + turns[: 2 * number + 1]) for number in range(_NUM_TURNS)
    )


def _longest_delay_ms(
    heard: list[Heard], sent: figures.Sent, begin_s: float, end_s: float
) -> float:
    """The latest that a token came which was sent meanwhile."""
    delays = zip(
        figures.delays_ms(heard, sent),
        (arrived_s for answer in heard for arrived_s in answer.arrived_s),
        strict=True,
    )
    return max(delay_ms for delay_ms, arrived_s in delays if begin_s <= arrived_s <= end_s)


def _conversation(tokenizer: Tokenizer) -> tuple[Messages, Messages]:
    """A conversation, and the turns that follow it: a thousand tokens of each speaker."""
    texts = cycle(docstrings())
    messages: Messages = []
    wanted = _TOKENS // _TURN_TOKENS + 2 * _NUM_TURNS
    while len(messages) < wanted:
        text, num_tokens = f"Part {len(messages)}.", 0
        while num_tokens < _TURN_TOKENS:
            more = next(texts)
            text += f"\n{more}"
            num_tokens += len(tokenizer.encode(more))
        kept = tokenizer.decode(tokenizer.encode(text)[:_TURN_TOKENS], skips_special=True)
        role = "assistant" if len(messages) % 2 else "user"
        messages.append({"role": role, "content": kept})
    split = len(messages) - 2 * _NUM_TURNS
    return messages[:split], messages[split:]


def _asked(messages: Messages) -> str:
    return json.dumps({"model": MODEL, "stream": True, "max_tokens": 2, "messages": messages})
