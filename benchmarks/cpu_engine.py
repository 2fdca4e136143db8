"""The engine against transformers' `generate`, and what the services add to the first token.

One run, one machine, the same checkpoint and prompts; README.md says how each figure is made.
"""

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from benchmarks import report
from benchmarks.first_token import FirstTokenClient
from benchmarks.prompts import text_prompts
from benchmarks.transformers_peer import Peer
from services.local.plan import Options
from services.local.stack import Stack
from services.prefill.config import PrefillConfig
from shared.engine import compute_threads

if TYPE_CHECKING:
    from benchmarks.bare_engine import BareEngine

CHECKPOINT = Options().checkpoint
NUM_STREAMS = 8
SHORT_PROMPT_TOKENS = 48  # less than a block: no prefix can hit

Prompt = Sequence[int]


def main() -> int:
    """Measure, write benchmarks/results/cpu_engine.json."""
    options = _parse()
    figures: dict[str, float] = {"load_average_before": os.getloadavg()[0]}
    with Peer(CHECKPOINT) as peer:
        compute_threads.calm_openmp(os.environ)
        compute_threads.settle(len(os.sched_getaffinity(0)))
        from benchmarks.bare_engine import BareEngine  # it loads torch, after calm_openmp

        engine = BareEngine(
            CHECKPOINT,
            options.kv_format,
            max_tokens=max(options.prompt_tokens, options.decode_prompt_tokens),
            chunk_tokens=PrefillConfig.chunk_tokens,
        )
        figures |= _prefill(engine, peer, options)
        figures |= _decode(engine, peer, options)
    figures |= asyncio.run(_added_ttft(engine, options))
    report.write("cpu_engine", figures)
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt-tokens", type=int, default=4096, help="of the prefill figure")
    parser.add_argument("--decode-prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--requests", type=int, default=60, help="of the TTFT figure")
    parser.add_argument("--kv-format", default=Options().kv_format)
    return parser.parse_args()


def _prefill(engine: "BareEngine", peer: Peer, options: argparse.Namespace) -> dict[str, float]:
    """Alternating, so that a slow moment of the machine meets both."""
    prompts = text_prompts(CHECKPOINT, options.repeats + 1, options.prompt_tokens)
    ours, theirs = [], []
    for number, prompt in enumerate(prompts):
        begin = time.perf_counter()
        engine.prefill(prompt)
        ours_s, theirs_s = time.perf_counter() - begin, peer.first_s([prompt])
        report.progress(f"prefill {number}: {ours_s:.2f} s, transformers {theirs_s:.2f} s")
        if number:  # the first is a warm-up
            ours.append(ours_s)
            theirs.append(theirs_s)
    ours_s, theirs_s = statistics.median(ours), statistics.median(theirs)
    return {
        "prefill_tokens": options.prompt_tokens,
        "prefill_4k_s": ours_s,
        "prefill_4k_transformers_s": theirs_s,
        "prefill_4k_speedup": theirs_s / ours_s,
    }


def _decode(engine: "BareEngine", peer: Peer, options: argparse.Namespace) -> dict[str, float]:
    """Tokens a second after the first token, which prefill gives."""
    prompts = text_prompts(CHECKPOINT, NUM_STREAMS, options.decode_prompt_tokens)
    num_new = options.new_tokens
    rates: dict[str, list[float]] = {}
    for number in range(options.repeats + 1):
        measured = {
            "decode_1_tokens_per_s": _our_rate(engine, prompts[:1], num_new),
            "decode_1_transformers_tokens_per_s": _their_rate(peer, prompts[:1], num_new),
            "decode_8_tokens_per_s": _our_rate(engine, prompts, num_new),
            "decode_8_transformers_tokens_per_s": _their_rate(peer, prompts, num_new),
        }
        report.progress(
            f"decode {number}: " + ", ".join(f"{key} {rate:.1f}" for key, rate in measured.items())
        )
        if number:  # the first is a warm-up
            for key, rate in measured.items():
                rates.setdefault(key, []).append(rate)
    figures = {key: statistics.median(values) for key, values in rates.items()}
    # Eight requests can also be answered one after the other: the better counts.
    their_best = max(
        figures["decode_8_transformers_tokens_per_s"], figures["decode_1_transformers_tokens_per_s"]
    )
    speedup_1 = figures["decode_1_tokens_per_s"] / figures["decode_1_transformers_tokens_per_s"]
    return {
        **figures,
        "decode_1_speedup": speedup_1,
        "decode_8_speedup": figures["decode_8_tokens_per_s"] / their_best,
    }


def _our_rate(engine: "BareEngine", prompts: Sequence[Prompt], num_tokens: int) -> float:
    streams = [engine.start(prompt, engine.prefill(prompt), num_tokens) for prompt in prompts]
    begin = time.perf_counter()
    for _ in range(num_tokens - 1):
        engine.step(streams)
    elapsed_s = time.perf_counter() - begin
    engine.finish(streams)
    return len(prompts) * (num_tokens - 1) / elapsed_s


def _their_rate(peer: Peer, prompts: Sequence[Prompt], num_tokens: int) -> float:
    return len(prompts) * (num_tokens - 1) / peer.rest_s(prompts, num_tokens)


async def _added_ttft(engine: "BareEngine", options: argparse.Namespace) -> dict[str, float]:
    """The same prompt to the engine and to the running stack, one after the other."""
    prompts = text_prompts(CHECKPOINT, options.requests + 5, SHORT_PROMPT_TOKENS)
    bare, served = [], []
    async with (
        Stack(Options(port=0, kv_format=options.kv_format), report.progress) as stack,
        FirstTokenClient(stack.base_url, CHECKPOINT.name) as client,
    ):
        for number, prompt in enumerate(prompts):
            begin = time.perf_counter()
            engine.prefill(prompt)
            bare_s = time.perf_counter() - begin
            served_s = await client.first_token_s(prompt)
            if number >= 5:  # warm-up
                bare.append(1e3 * bare_s)
                served.append(1e3 * served_s)
    added = [b - a for a, b in zip(bare, served, strict=True)]
    return {
        "ttft_bare_p50_ms": statistics.median(bare),
        "ttft_served_p50_ms": statistics.median(served),
        "added_ttft_p50_ms": statistics.median(added),
        "added_ttft_p90_ms": statistics.quantiles(added, n=10)[-1],
    }


if __name__ == "__main__":
    sys.exit(main())
