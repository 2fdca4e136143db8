"""Many streams through our gateway before a mock fleet, and through LiteLLM's proxy before a mock
server: how many tokens a second, and how much later they come. One run, the same client.
"""

import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks import prompts, report
from benchmarks.gateway_speed import figures, peer, processes
from benchmarks.gateway_speed.client import TOKEN_MARK, Client, Heard, Load
from benchmarks.gateway_speed.figures import Sent
from benchmarks.gateway_speed.flow import Flow
from benchmarks.gateway_speed.mock_fleet import MockFleet
from benchmarks.gateway_speed.mock_server import MockServer

CHECKPOINT = report.ROOT / "checkpoints" / "demo-fp8"
MODEL = "demo"
NUM_STREAMS, NUM_TOKENS = 64, 512
PACE = 50.0  # tokens a second and stream
_PACED_TOKENS, _SPREAD_S = 500, 2.0
_REPEATS = 5
_PROMPTS, _PROMPT_TOKENS, _NUM_FIRST = 20, 1024, 100


def measure() -> dict[str, float]:
    """The figures; two minutes on an idle machine, more where LiteLLM has to be installed."""
    program = peer.program()
    words = mark_words(CHECKPOINT)
    flow = Flow()
    with Client(flow) as client:
        with MockServer(list(words), flow) as server:
            with processes.litellm(server.port, MODEL, program) as port:
                report.progress("LiteLLM's proxy")
                litellm = _figures(_Side(client, port, server.pace, server.sent_s), repeats=1)
            report.progress("the client and a mock server alone")
            alone = _figures(_Side(client, server.port, server.pace, server.sent_s))
        report.progress("our gateway")
        with our_side(client, flow) as (side, gateway):
            ours = _figures(side)
            before_s = gateway.cpu_s()
            side.stream(body(NUM_TOKENS))
            cpu_s = gateway.cpu_s() - before_s
    return {
        "tokens_per_s_64": ours.tokens_per_s,
        "litellm_tokens_per_s_64": litellm.tokens_per_s,
        "vs_litellm": ours.tokens_per_s / litellm.tokens_per_s,
        "client_tokens_per_s_64": alone.tokens_per_s,
        "events_per_token": ours.events_per_token,
        "cpu_us_per_token": 1e6 * cpu_s / (NUM_STREAMS * NUM_TOKENS),
        "added_ttft_p50_ms": ours.first_token_ms - alone.first_token_ms,
        "litellm_added_ttft_p50_ms": litellm.first_token_ms - alone.first_token_ms,
        "paced_tokens_per_s": ours.paced_tokens_per_s,
        "litellm_paced_tokens_per_s": litellm.paced_tokens_per_s,
        "added_itl_p99_ms": ours.added_gap_p99_ms,
        "litellm_added_itl_p99_ms": litellm.added_gap_p99_ms,
        "token_delay_p50_ms": ours.delay_p50_ms,
        "token_delay_p99_ms": ours.delay_p99_ms,
        "litellm_token_delay_p50_ms": litellm.delay_p50_ms,
        "litellm_token_delay_p99_ms": litellm.delay_p99_ms,
    }


@dataclass(frozen=True)
class _Figures:
    tokens_per_s: float
    events_per_token: float
    first_token_ms: float
    paced_tokens_per_s: float
    added_gap_p99_ms: float
    delay_p50_ms: float
    delay_p99_ms: float


@dataclass(frozen=True)
class _Side:
    """A server, and the mock that makes its tokens."""

    client: Client
    port: int
    pace: Callable[[float], None]
    sent_s: Callable[[], Sent]

    def stream(self, asked: str, spread_s: float = 0.0) -> list[Heard]:
        """All streams at once, or beginning over spread_s, each with this body."""
        return self.client.load(Load(self.port, [asked], NUM_STREAMS, spread_s=spread_s))

    def first_tokens(self, asked: Sequence[str]) -> list[Heard]:
        """One request after the other; each names itself, so that no text was seen before."""
        return self.client.load(Load(self.port, asked, rounds=_NUM_FIRST))


@contextmanager
def our_side(
    client: Client, flow: Flow, checkpoint: Path = CHECKPOINT
) -> Iterator[tuple[_Side, processes.Gateway]]:
    """Our gateway before a mock fleet, inside the block."""
    token_ids = list(mark_words(checkpoint).values())
    with (
        processes.nats() as nats_url,
        MockFleet(nats_url, MODEL, token_ids, flow) as fleet,
        processes.gateway(nats_url, checkpoint, MODEL) as gateway,
    ):
        gateway.wait_until_ready()
        yield _Side(client, gateway.port, fleet.pace, fleet.sent_s), gateway


def body(max_tokens: int, text: str = "Say something.") -> str:
    """A streamed chat; the request names itself in the text, after everything else."""
    message = {"role": "user", "content": f"{text} bench-{{number}}"}
    asked = {"model": MODEL, "stream": True, "max_tokens": max_tokens, "messages": [message]}
    return json.dumps({**asked, "temperature": 0})


def mark_words(checkpoint: Path) -> dict[str, int]:
    """Tokens that are text of their own, with the client's mark once."""
    vocabulary = Tokenizer.from_file(str(checkpoint / "tokenizer.json")).get_vocab()
    return {
        token: token_id
        for token, token_id in sorted(vocabulary.items())
        if token.count(TOKEN_MARK) == 1 and token.isascii() and token.isalpha()
    }


def _figures(side: _Side, repeats: int = _REPEATS) -> _Figures:
    side.stream(body(16))  # warm
    floods = [side.stream(body(NUM_TOKENS)) for _ in range(repeats)]
    alone = [body(2, text) for text in _texts()]
    side.first_tokens(alone)  # warm: after a flood the first hundred take half as long again
    first_tokens = side.first_tokens(alone)
    side.pace(PACE)
    side.sent_s()
    paced = side.stream(body(_PACED_TOKENS), _SPREAD_S)
    sent = side.sent_s()
    side.pace(0)
    delays_ms = figures.delays_ms(paced, sent)
    return _Figures(
        tokens_per_s=statistics.median(map(figures.tokens_per_s, floods)),
        events_per_token=statistics.median(map(figures.events_per_token, floods)),
        first_token_ms=figures.first_token_p50_ms(first_tokens),
        paced_tokens_per_s=figures.tokens_per_s(paced),
        added_gap_p99_ms=figures.p99(figures.added_gaps_ms(paced, sent)),
        delay_p50_ms=statistics.median(delays_ms),
        delay_p99_ms=figures.p99(delays_ms),
    )


def _texts() -> list[str]:
    """Different prompts of about a thousand tokens."""
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    return [
        tokenizer.decode(token_ids).replace("{number}", "")
        for token_ids in prompts.text_prompts(CHECKPOINT, _PROMPTS, _PROMPT_TOKENS)
    ]
