"""transformers' GlmMoeDsaForCausalLM over the bundled checkpoint, in fp32.

transformers cannot read block-FP8 files with a short last row block, so the weights are dequantised
by plain loops here. Its two latent norms get the epsilon that serving stacks use (1e-5); it has no
MTP layer.
"""

import json
import os
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import GlmMoeDsaForCausalLM


def dequantised_state(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint in fp32, scales applied block by block."""
    stored: dict[str, torch.Tensor] = {}
    for shard in sorted(checkpoint.glob("*.safetensors")):
        stored |= load_file(shard)
    state = {}
    for name, tensor in stored.items():
        if name.endswith("_scale_inv"):
            continue
        value = tensor.float()
        if name + "_scale_inv" in stored:
            scales = stored[name + "_scale_inv"]
            for i in range(scales.shape[0]):
                for j in range(scales.shape[1]):
                    value[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128] *= scales[i, j]
        state[name] = value
    return state


class TransformersOracle:
    """The model, and the positions its indexers chose in the last forward."""

    def __init__(self, checkpoint: Path, scratch: Path) -> None:
        """Load through a dequantised copy in `scratch`: transformers fuses the experts itself."""
        raw = json.loads((checkpoint / "config.json").read_text())
        raw.pop("quantization_config", None)
        mtp = f"model.layers.{raw['num_hidden_layers']}."
        state = {k: v for k, v in dequantised_state(checkpoint).items() if not k.startswith(mtp)}
        (scratch / "config.json").write_text(json.dumps(raw))
        save_file(state, scratch / "model.safetensors", metadata={"format": "pt"})
        self.model, report = GlmMoeDsaForCausalLM.from_pretrained(
            scratch, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        if report["missing_keys"] or report["unexpected_keys"]:
            raise AssertionError(f"transformers loaded something else: {report}")
        self.chosen: dict[int, torch.Tensor] = {}
        for number, layer in enumerate(self.model.model.layers):
            attention = layer.self_attn
            attention.q_a_layernorm.variance_epsilon = 1e-5
            attention.kv_a_layernorm.variance_epsilon = 1e-5
            if attention.indexer is not None:
                attention.indexer.register_forward_hook(self._keep(number))

    def _keep(self, layer: int):
        def hook(_module, _inputs, output) -> None:
            self.chosen[layer] = output[0].long()

        return hook

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> torch.Tensor:  # [n, vocab]
        """Logits of every position; the chosen positions are in `chosen` afterwards."""
        torch.set_num_threads(len(os.sched_getaffinity(0)))  # the engine takes one
        return self.model(torch.tensor([token_ids]), use_cache=False).logits[0]

    @torch.inference_mode()
    def greedy(self, token_ids: list[int], num_tokens: int) -> list[int]:
        """The greedy continuation, with transformers' own cache."""
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        out = self.model.generate(
            torch.tensor([token_ids]),
            attention_mask=torch.ones((1, len(token_ids)), dtype=torch.long),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return out[0, len(token_ids) :].tolist()
