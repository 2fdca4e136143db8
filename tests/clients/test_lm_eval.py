"""The evaluation harness lm-eval, unchanged: log-likelihoods of a task that lies in a file."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.clients import programs
from tests.clients.programs import CHECKPOINT, KEY, MODEL, Desk

pytestmark = pytest.mark.clients

LIMIT_S = 300
TASK = "farspan_meanings"
QUESTIONS = [
    {"question": "What does river mean?", "choices": [" water", " a large stream"], "answer": 1},
    {"question": "What does sun mean?", "choices": [" the star", " dark"], "answer": 0},
    {"question": "Define stone.", "choices": [" a lump of hard matter", " air"], "answer": 0},
]


def test_log_likelihoods_are_read_from_echoed_prompts(desk: Desk, base_url: str) -> None:
    """Batches of token ids with echo and logprobs; whatever the batch, the figures are the same."""
    (desk.work / "questions.json").write_text("\n".join(map(json.dumps, QUESTIONS)))
    (desk.work / f"{TASK}.yaml").write_text(yaml.safe_dump(_task(desk.work / "questions.json")))

    one_by_one = _evaluate(desk, base_url, "one", batch_size=1)
    together = _evaluate(desk, base_url, "together", batch_size=3)

    assert len(one_by_one) == len(QUESTIONS)
    assert one_by_one == together
    for likelihood in (value for values in one_by_one for value in values):
        assert math.isfinite(likelihood)
        assert likelihood < 0


def _evaluate(desk: Desk, base_url: str, name: str, batch_size: int) -> list[list[float]]:
    """Each question's log-likelihoods, one for each choice."""
    arguments = (
        f"model={MODEL},base_url={base_url}/completions,num_concurrent=2,max_retries=1,"
        f"tokenizer_backend=huggingface,tokenizer={CHECKPOINT}"
    )
    command: list[str | Path] = [programs.program_of("lm-eval", "lm_eval"), "run"]
    command += ["--model", "local-completions", "--model_args", arguments]
    command += ["--tasks", TASK, "--include_path", desk.work, "--batch_size", str(batch_size)]
    command += ["--output_path", desk.work / name, "--log_samples"]
    environ = {"OPENAI_API_KEY": KEY, "HF_HUB_OFFLINE": "1"}
    desk.run(command, LIMIT_S, environ).require_success()
    (samples,) = (desk.work / name).rglob("samples_*.jsonl")
    found = [json.loads(line) for line in samples.read_text().splitlines()]
    found.sort(key=lambda sample: sample["doc_id"])
    return [[float(choice[0]) for choice in sample["filtered_resps"]] for sample in found]


def _task(questions: Path) -> dict[str, Any]:
    return {
        "task": TASK,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(questions)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
