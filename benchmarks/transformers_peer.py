"""transformers' `generate` on the same checkpoint, in its own processes: `with Peer(...) as peer`.

Default attention, fp32, weights dequantised before. OpenMP's threads spin between kernels by
default, which is the best on an idle machine and the worst on a busy one, so each call is made both
ways, and the faster counts.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from shared.engine import compute_threads


@dataclass(frozen=True)
class Generated:
    """Prompts of equal length, continued as one batch."""

    first_s: float  # from the call to the first token of all
    rest_s: float  # from there to the last token of all


class Peer:
    """transformers at its best. Made before this process calms its own OpenMP."""

    def __init__(self, checkpoint: Path) -> None:
        calm = dict(os.environ)
        compute_threads.calm_openmp(calm)
        self._processes = [_Process(checkpoint, environ) for environ in (dict(os.environ), calm)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self._processes:
            process.stop()

    def first_s(self, prompts: Sequence[Sequence[int]]) -> float:
        """Seconds to the first token of all prompts."""
        return min(process.generate(prompts, 1).first_s for process in self._processes)

    def rest_s(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
        """Seconds from the first to the last of num_tokens tokens of all prompts."""
        return min(process.generate(prompts, num_tokens).rest_s for process in self._processes)


class _Process:
    def __init__(self, checkpoint: Path, environ: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.transformers_peer", str(checkpoint)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environ,
            cwd=Path(__file__).parents[1],
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._calls, self._replies = self._process.stdin, self._process.stdout

    def stop(self) -> None:
        self._calls.close()
        self._process.wait()

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> Generated:
        """Continue the prompts greedily by exactly num_tokens each."""
        print(json.dumps([list(map(list, prompts)), num_tokens]), file=self._calls, flush=True)
        line = self._replies.readline()
        if not line:
            raise RuntimeError("transformers' process ended; its error stands above")
        return Generated(**json.loads(line))


def main(checkpoint: Path) -> None:
    """Answer calls on stdin until it is closed."""
    import torch
    from transformers import StoppingCriteria, StoppingCriteriaList

    class Clock(StoppingCriteria):
        def __init__(self) -> None:
            self.times: list[float] = []

        def __call__(self, input_ids, scores, **kwargs):
            self.times.append(time.perf_counter())
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    model = _load(checkpoint)
    for line in sys.stdin:
        prompts, num_tokens = json.loads(line)
        inputs, clock = torch.tensor(prompts), Clock()
        begin = time.perf_counter()
        model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([clock]),
        )
        first, last = clock.times[0], clock.times[-1]
        print(json.dumps(vars(Generated(first - begin, last - first))), flush=True)


def _load(checkpoint: Path):
    import torch
    from safetensors.torch import save_file
    from transformers import GlmMoeDsaForCausalLM

    from tests.oracles.transformers_oracle import dequantised_state

    raw = json.loads((checkpoint / "config.json").read_text())
    raw.pop("quantization_config", None)
    mtp = f"model.layers.{raw['num_hidden_layers']}."
    state = {k: v for k, v in dequantised_state(checkpoint).items() if not k.startswith(mtp)}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(raw))
        save_file(state, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        model = GlmMoeDsaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for layer in model.model.layers:  # as serving stacks have it
        layer.self_attn.q_a_layernorm.variance_epsilon = 1e-5
        layer.self_attn.kv_a_layernorm.variance_epsilon = 1e-5
    return model.eval()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
