"""AIPerf, the AgentX harness and GuideLLM, unchanged: a short run of each, end to end."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.clients import programs
from tests.clients.programs import KEY, MODEL, Desk

pytestmark = pytest.mark.clients

LIMIT_S = 300
TOKENIZER = "local/demo"  # the name in conftest's hub_environ
OUTPUT_TOKENS = 12
BLOCK_TOKENS = 64


def test_aiperf_measures_a_load(desk: Desk, root_url: str, hub_environ: dict[str, str]) -> None:
    """It asks for exact lengths (ignore_eos) and reads the usage of every stream."""
    command = [programs.program_of("aiperf", "aiperf"), "profile"]
    command += _load_options(root_url)
    command += ["--concurrency", "3", "--request-count", "9", "--num-warmup-requests", "1"]
    command += ["--isl", "200", "--isl-stddev", "0", "--osl", str(OUTPUT_TOKENS)]
    command += ["--use-server-token-count"]

    desk.run(command, LIMIT_S, hub_environ).require_success()

    figures = _figures(desk)
    assert figures["error_summary"] == []
    assert figures["request_count"]["avg"] == 9
    assert figures["output_sequence_length"]["min"] == OUTPUT_TOKENS
    assert figures["output_sequence_length"]["max"] == OUTPUT_TOKENS
    assert figures["input_sequence_length"]["min"] > 200
    assert figures["time_to_first_token"]["min"] > 0


def test_agentx_replays_agents(desk: Desk, root_url: str, hub_environ: dict[str, str]) -> None:
    """Sessions of eight turns whose prefix repeats: the service's cached tokens are its figure."""
    traces = desk.work / "traces"
    traces.mkdir()
    for session in range(4):
        (traces / f"{session}.json").write_text(json.dumps(_trace(session)))
    command = [programs.program_of("agentx", "agentx"), "profile"]
    command += _load_options(root_url)
    command += ["--concurrency", "2", "--benchmark-duration", "30"]
    command += ["--custom-dataset-type", "weka_trace", "--input-file", "traces"]
    command += ["--unsafe-override"]  # its scenario wants an hour of its own traces

    desk.run(command, LIMIT_S, hub_environ).require_success()

    figures = _figures(desk)
    assert figures["error_summary"] == []
    assert figures["request_count"]["avg"] >= 8
    assert figures["output_sequence_length"]["min"] == OUTPUT_TOKENS
    assert figures["output_sequence_length"]["max"] == OUTPUT_TOKENS
    assert figures["overall_usage_prompt_cache_read_pct"]["avg"] > 0


def test_guidellm_measures_a_load(desk: Desk, root_url: str) -> None:
    """It asks /health first, and sends text as content parts."""
    report = desk.work / "report.json"
    command = [programs.program_of("guidellm", "guidellm"), "run", "--disable-progress"]
    command += ["--backend", f"kind=openai_http,target={root_url},model={MODEL},api_key={KEY}"]
    command += ["--profile", "kind=concurrent,streams=2"]
    command += ["--constraint", "kind=max_requests,count=6"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={programs.CHECKPOINT}"]
    command += [
        "--data",
        f"kind=synthetic_text,prompt_tokens=64,output_tokens={OUTPUT_TOKENS}",
    ]
    command += ["--output", f"kind=json,path={report}"]

    desk.run(command, LIMIT_S, {"HF_HUB_OFFLINE": "1"}).require_success()

    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    # Seen on a busy machine: six answered, and the last one left out of its own count.
    assert (totals["errored"], totals["incomplete"]) == (0, 0)
    assert totals["successful"] in (5, 6)
    made = benchmark["metrics"]["output_token_count"]["successful"]
    assert made["min"] == made["max"] == OUTPUT_TOKENS


def _load_options(root_url: str) -> list[str | Path]:
    """What both tools of the AIPerf family take."""
    return [
        *("--model", MODEL, "--url", root_url, "--endpoint-type", "chat", "--streaming"),
        *("--tokenizer", TOKENIZER, "--api-key", KEY, "--extra-inputs", "ignore_eos:true"),
        *("--ui", "simple", "--artifact-dir", "out", "--random-seed", "1"),
    ]


def _figures(desk: Desk) -> Any:
    return json.loads((desk.work / "out" / "profile_export_aiperf.json").read_text())


def _trace(session: int) -> dict[str, Any]:
    """An agent's session: every turn repeats what was said and adds a block."""
    blocks = [1000 * session + block for block in range(4)]
    turns = []
    for turn in range(8):
        blocks = [*blocks, 1000 * session + 100 + turn]
        turns.append(
            {
                "t": 0.8 * turn,
                "type": "s",
                "model": "recorded",
                "in": BLOCK_TOKENS * len(blocks) - 10,
                "out": OUTPUT_TOKENS,
                "hash_ids": blocks,
                "stop": "end_turn",
                "api_time": 0.5,
                "think_time": 0.3,
                "ttft": 0.1,
            }
        )
    return {
        "id": f"session-{session}",
        "models": ["recorded"],
        "block_size": BLOCK_TOKENS,
        "hash_id_scope": "local",
        "requests": turns,
    }
