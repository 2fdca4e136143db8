"""The five services with prefill and decode on GPUs, through settings alone.

They answer as on the CPU where its fp32 engine prefers each token of the answer by a nat or more;
but for few, as a rounding can change which positions are chosen. Device pools are small, so that
long prompts are read through hot rows.
"""

import asyncio
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from benchmarks import glm_slice, report
from services.gateway.text.tokenizer import Tokenizer
from services.local.plan import TRACE_FILE, Options
from services.local.stack import Stack
from shared import farspan_pb2 as pb
from shared.engine.kv.format import make_format, page_geometry
from shared.engine.kv.layout import BLOCK_TOKENS
from shared.engine.model.config import load_config
from tests import demo
from tests.system import dialogs, pass_keys
from tests.system.dialogs import Call, Dialog
from tests.system.prompts import prompt_of
from tests.system.spans import Span, TraceFile
from tests.system.watch import watching

pytestmark = pytest.mark.gpu

KV_FORMAT = "fp8_ds_mla"
SETTINGS = {
    "DECODE_HOST_POOL_MIB": "96",
    "DECODE_DEVICE_POOL_MIB": "24",  # 80 pages: one long prompt is resident, four are not
    "DECODE_HOT_ROWS": "320",
    "DECODE_MAX_CONCURRENT": "4",  # fewer shapes of a step to capture at the start
}
SLICE_SETTINGS = {
    "DECODE_HOST_POOL_MIB": "64",
    "PREFILL_NUM_BLOCKS": "256",
    "PREFILL_CHUNK_TOKENS": "2048",
    "DECODE_HOT_ROWS": "2048",
    "DECODE_MAX_CONCURRENT": "2",
    "DECODE_STAGING_MIB": "512",
}
SURE = 1.0  # nats
FEWEST_SURE_EQUAL = 0.95
LONG_TOKENS = 4096
NUM_ASKED = 9  # of the 25 questions about the long text
FEWEST_RIGHT = 8  # fp32 answers 24 of 25
NUM_OF_A_KIND = 4
TOGETHER = 4
MOST_CHECKED_BYTES = 64  # of a block: its generation, read before and after


@dataclass(frozen=True)
class Devices:
    """Where the workers are."""

    name: str
    prefill_ranks: int  # on the first GPU, and the next
    decode: str


ONE_GPU = Devices("one_gpu", 1, "cuda:0")
A_GPU_EACH = Devices("a_gpu_each", 1, "cuda:1")
TWO_RANKS = Devices("two_ranks", 2, "cuda:1")


def where(*devices: Devices) -> list[Any]:
    needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
    return [
        pytest.param(each, id=each.name, marks=() if each is ONE_GPU else needs_two)
        for each in devices
    ]


class Served:
    """A running stack, asked from outside."""

    def __init__(
        self, stack: Stack, runner: asyncio.Runner, http: httpx.Client, options: Options
    ) -> None:
        self.options = options
        self._stack = stack
        self._runner = runner
        self._http = http

    def ask(self, bodies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Greedy answers, some at once."""
        with ThreadPoolExecutor(TOGETHER) as pool:
            return list(pool.map(self._ask, bodies))

    def _ask(self, body: dict[str, Any]) -> dict[str, Any]:
        whole = {"model": self.options.checkpoint.name, "temperature": 0, "max_tokens": 120, **body}
        response = self._http.post("chat/completions", json=whole)
        assert response.is_success, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def pulls(self) -> list[Span]:
        """Every handoff so far."""
        traces = TraceFile(self._stack.folder / TRACE_FILE).traces()
        return [span for trace in traces.values() for span in trace.all_named("handoff.pull")]

    def decode_load(self) -> pb.Load:
        """What the decode worker says of itself."""

        async def latest() -> pb.Load:
            async with watching(self._stack) as watch:
                return watch.latest["decode-0"].load

        return self._runner.run(latest())


@contextmanager
def serving(
    folder: Path, devices: Devices, checkpoint: Path, settings: dict[str, str]
) -> Iterator[Served]:
    options = Options(
        port=0,
        checkpoint=checkpoint,
        prefill_ranks=devices.prefill_ranks,
        prefill_device="cuda:0",
        decode_device=devices.decode,
        run_folder=folder,
        settings=settings,
    )
    stack = Stack(options, report.progress)
    with asyncio.Runner() as runner:
        runner.run(stack.__aenter__())
        try:
            with httpx.Client(base_url=stack.base_url, timeout=60, trust_env=False) as http:
                yield Served(stack, runner, http, options)
        finally:
            runner.run(stack.__aexit__(None, None, None))


@pytest.fixture(scope="module", params=where(ONE_GPU, A_GPU_EACH, TWO_RANKS))
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("stack")
    with serving(folder, request.param, demo.CHECKPOINT, SETTINGS) as running:
        yield running


def said(completion: dict[str, Any]) -> tuple[str | None, str | Call]:
    """Thought and answer."""
    message = completion["choices"][0]["message"]
    if message.get("tool_calls"):
        (called,) = message["tool_calls"]
        function = called["function"]
        call = Call(function["name"], json.loads(function["arguments"]))
        return message.get("reasoning_content"), call
    return message.get("reasoning_content"), message["content"] or ""


def lead(tokenizer: Tokenizer, dialog: Dialog) -> float:
    """By how much the CPU's engine prefers each token of the answer, and then to stop, at least."""
    prompt, answer = prompt_of(tokenizer, dialog.body), tokenizer.encode(dialog.text)
    reference = demo.reference(len(prompt) + len(answer), KV_FORMAT)
    logits = reference.answer_logits(prompt, answer, num_cached=0)
    best = logits[:-1].topk(2, -1).values
    stops = torch.zeros(logits.shape[1], dtype=torch.bool)
    stops[list(tokenizer.checkpoint.stop_token_ids)] = True
    lead_of_stop = logits[-1][stops].max() - logits[-1][~stops].max()
    return min(float((best[:, 0] - best[:, 1]).min()), float(lead_of_stop))


def test_dialogs_are_answered_as_on_the_cpu(served: Served) -> None:
    """And as trained; asked together."""
    tokenizer = Tokenizer(demo.CHECKPOINT)
    asked = [dialog for kind in dialogs.by_kind().values() for dialog in kind[:NUM_OF_A_KIND]]
    leads = [lead(tokenizer, dialog) for dialog in asked]
    assert sum(each > SURE for each in leads) >= 0.9 * len(asked)

    completions = served.ask([dialog.body for dialog in asked])

    sure = [
        said(completion) == (dialog.thought, dialog.answer)
        for by, completion, dialog in zip(leads, completions, asked, strict=True)
        if by > SURE
    ]
    report.progress(f"{sum(sure)} of {len(sure)} sure answers are the CPU's")
    assert sum(sure) >= FEWEST_SURE_EQUAL * len(sure)


def test_a_long_prompt_is_handed_over_found_again_and_read_through_hot_rows(
    served: Served,
) -> None:
    before = served.decode_load()
    encode = Tokenizer(demo.CHECKPOINT).encode
    hidden = pass_keys.hide(LONG_TOKENS, "docstrings", encode)
    questions = hidden.questions[:NUM_ASKED]
    first, *others = [hidden.body(question) for question in questions]

    completions = [*served.ask([first]), *served.ask(others)]

    right = [said(each)[1] == q.answer for each, q in zip(completions, questions, strict=True)]
    assert sum(right) >= FEWEST_RIGHT
    for completion in completions[1:]:
        assert completion["usage"]["prompt_tokens_details"]["cached_tokens"] == LONG_TOKENS
    after = served.decode_load()
    assert after.hot_misses > before.hot_misses and after.hot_hits > before.hot_hits
    assert after.host_read_bytes > before.host_read_bytes


def test_a_handoff_moves_each_block_once(served: Served) -> None:
    served.ask([{"messages": [{"role": "user", "content": "Define moon. " * 1000}]}])

    check_largest_pull(served, at_least=LONG_TOKENS)


@pytest.mark.parametrize("devices", where(ONE_GPU, TWO_RANKS))
def test_a_slice_of_the_released_model_is_served(devices: Devices, tmp_path: Path) -> None:
    """Its weights are random, so all there is to see is that an answer comes, and what moved."""
    question = {"messages": [{"role": "user", "content": "Define moon. " * 1500}], "max_tokens": 32}

    with serving(tmp_path, devices, glm_slice.directory(), SLICE_SETTINGS) as running:
        (first,) = running.ask([question])
        (again,) = running.ask([question])
        check_largest_pull(running, at_least=LONG_TOKENS)

    for completion in (first, again):
        assert completion["usage"]["completion_tokens"] > 0
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert again["usage"]["prompt_tokens"] - cached <= BLOCK_TOKENS * devices.prefill_ranks


def check_largest_pull(served: Served, at_least: int) -> None:
    """Whole blocks of every layer moved and no more; how fast is told, and not judged here."""
    config = load_config(served.options.checkpoint)
    kv_format = make_format(KV_FORMAT, config.attention)
    block_bytes = (
        config.num_kv_layers * BLOCK_TOKENS * kv_format.row_bytes
        + len(config.index_layers) * page_geometry(kv_format).page_bytes
    )
    largest = max(served.pulls(), key=lambda span: span.attributes["bytes"])
    num_blocks, num_bytes = largest.attributes["blocks"], largest.attributes["bytes"]
    assert num_blocks >= at_least // BLOCK_TOKENS
    # The last block covers a page on each rank.
    most_blocks = num_blocks + served.options.prefill_ranks - 1
    most_bytes = most_blocks * (block_bytes + MOST_CHECKED_BYTES)
    assert num_blocks * block_bytes <= num_bytes <= most_bytes
    milliseconds = largest.attributes["reading_ms"]
    report.progress(
        f"{served.options.checkpoint.name}: handoff of {num_bytes / 1e6:.1f} MB"
        f" in {milliseconds:.1f} ms, {num_bytes / milliseconds / 1e6:.2f} GB/s"
    )
