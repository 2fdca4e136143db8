"""Pass keys in a long context, FP8 weights and FP8 KV: what the engine finds and what it should.

25 questions about one text. The same is asked of the model card's own engine with the same
quantisation; README.md says how.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable

from benchmarks import report
from services.gateway.text.tokenizer import Tokenizer
from services.local.plan import Options
from shared.engine import compute_threads
from tests.system import pass_keys
from tests.system.pass_keys import PassKeys
from tests.system.prompts import prompt_of

CHECKPOINT = Options().checkpoint
FILLERS = {"docstrings": "docstrings", "sentences": "repeated sentences"}
_QUESTION_TOKENS = 128

Answers = Callable[[list[int], list[int], int], list[int]]


def main() -> int:
    """Measure, write benchmarks/results/passkeys.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--fillers", nargs="+", choices=FILLERS, default=list(FILLERS))
    options = parser.parse_args()
    compute_threads.calm_openmp(os.environ)
    compute_threads.settle(len(os.sched_getaffinity(0)))

    tokenizer = Tokenizer(CHECKPOINT)
    figures: dict[str, float] = {"tokens": options.tokens, "questions": pass_keys.NUM_CODES + 1}
    for name in options.fillers:
        hidden = pass_keys.hide(options.tokens, FILLERS[name], tokenizer.encode)
        prompts = [prompt_of(tokenizer, hidden.body(question)) for question in hidden.questions]
        for engine, open_engine in (("farspan", _farspan), ("reference", _reference)):
            begin = time.perf_counter()
            answers = open_engine(prompts[0][: options.tokens])
            prefill_s = time.perf_counter() - begin
            found = _found(answers, tokenizer, hidden, prompts, options.tokens)
            figures[f"{name}_{engine}_found"] = sum(found)
            figures[f"{name}_{engine}_prefill_s"] = prefill_s
            depths = "".join("x" if right else "." for right in found)
            report.progress(f"{name:<10} {engine:<10} {sum(found)} found: {depths}")
    report.write("passkeys", figures)
    return 0


def _farspan(context: list[int]) -> Answers:
    from shared.engine.step import Sampling
    from tests import demo

    engine = demo.reference(len(context) + _QUESTION_TOKENS, "fp8_ds_mla")
    engine.prefill(context, 1024, Sampling())
    return engine.would_answer


def _reference(context: list[int]) -> Answers:
    from benchmarks.card_engine import CardEngine

    engine = CardEngine(CHECKPOINT, len(context) + _QUESTION_TOKENS)
    engine.prefill(context)
    return engine.would_answer


def _found(
    answers: Answers,
    tokenizer: Tokenizer,
    hidden: PassKeys,
    prompts: list[list[int]],
    num_cached: int,
) -> list[bool]:
    """Per question whether the whole answer is right and ends by itself."""
    found = []
    for prompt, question in zip(prompts, hidden.questions, strict=True):
        expected = tokenizer.encode(question.answer)
        *would, end = answers(prompt, expected, num_cached)
        found.append(would == expected and end in tokenizer.checkpoint.stop_token_ids)
    return found


if __name__ == "__main__":
    sys.exit(main())
