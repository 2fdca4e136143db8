"""A slice of GLM-5.3 at its true widths: what each layer makes on a GPU is what the CPU makes.

In prefill, and in decode with the context in host memory. How far bf16 activations may be from fp32
ones stands in layer_comparison.py.
"""

import numpy as np
import pytest
import torch

from benchmarks import glm_slice, report
from shared.engine.decode_step import DecodeRow
from shared.engine.gpu import decode_kv
from shared.engine.gpu.attention_ops import GpuAttentionOps
from shared.engine.gpu.backend import GpuBackend
from shared.engine.gpu.decode_engine import GpuDecodeEngine
from shared.engine.gpu.decode_step import DecodeStep
from shared.engine.gpu.tier import GpuTier
from shared.engine.kv.format import Fp8Format, page_geometry
from shared.engine.kv.layout import BLOCK_TOKENS
from shared.engine.kv.pinned_pool import pinned_pool
from shared.engine.kv.residency import TAIL_PAGES, ResidencyMode, make_policy
from shared.engine.kv.tier_pools import TierPools, TierShape
from shared.engine.model.config import load_config
from shared.engine.open_decode import index_groups
from shared.engine.step import Sampling
from tests.layer_comparison import (
    NUM_COMPARED,
    TOLERANCE,
    Comparison,
    Recorder,
    RecordingModel,
    TokenIds,
    compare,
    last,
    load,
    load_reference,
)

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
LAYERS = {0: "dense owner", 1: "owner with experts", 2: "follower with experts", 3: "MTP layer"}
# A step decodes without a draft, so the MTP layer only writes its row.
CASES = [("prefill", layer) for layer in LAYERS] + [("decode", layer) for layer in (0, 1, 2)]
NUM_TOKENS = 3_000  # the index chooses 2,048 of them
CHUNK = 2_000
NUM_BLOCKS = -(-NUM_TOKENS // BLOCK_TOKENS)
HOT_ROWS = 2_048

Found = dict[str, dict[int, Comparison]]


@pytest.fixture(scope="module")
def compared() -> Found:
    place = glm_slice.directory()
    vocabulary = load_config(place).vocab_size
    token_ids = np.random.default_rng(0).integers(vocabulary, size=NUM_TOKENS, dtype=np.uint32)
    ours = load(place, GpuBackend(DEVICE), GpuAttentionOps, NUM_TOKENS)
    reference = load_reference(place, NUM_TOKENS)

    ours.run(token_ids, CHUNK)
    found = {"prefill": compare(ours, reference, token_ids)}
    decode_last_rows(ours, token_ids)
    found["decode"] = compare(ours, reference, token_ids)
    for phase, layer in CASES:
        report.progress(f"{phase}, {LAYERS[layer]}: {found[phase][layer]}")
    return found


def decode_last_rows(model: RecordingModel, token_ids: TokenIds) -> None:
    """Compute the last rows of the prompt again, one a sequence, each over the rows before it."""
    config, source = model.config, model.context.pool
    kv_format = Fp8Format(config.attention)
    shape = TierShape(
        num_mla_layers=config.num_kv_layers,
        num_index_layers=len(config.index_layers),
        row_bytes=kv_format.row_bytes,
        index_page_bytes=page_geometry(kv_format).page_bytes,
        num_host_pages=NUM_COMPARED * NUM_BLOCKS,
        num_device_pages=NUM_COMPARED * (HOT_ROWS // BLOCK_TOKENS + TAIL_PAGES),
    )
    policy = make_policy(
        ResidencyMode.ALL_HOST,
        hot_rows=HOT_ROWS,
        union_rows=config.attention.index_topk,
        num_device_pages=shape.num_device_pages,
    )
    with pinned_pool(shape.host_bytes, DEVICE) as memory, pytest.MonkeyPatch.context() as patch:
        pools = TierPools(shape, DEVICE, memory)
        tier = GpuTier(pools, index_groups(config), policy, NUM_COMPARED)
        step = DecodeStep(model, tier, NUM_COMPARED)
        rows, host_rows = [], []
        host_pages = pools.host_rows.unflatten(1, (-1, BLOCK_TOKENS))
        for place, position in enumerate(range(NUM_TOKENS - NUM_COMPARED, NUM_TOKENS)):
            blocks = range(place * NUM_BLOCKS, (place + 1) * NUM_BLOCKS)
            pages = slice(blocks.start, blocks.stop)
            host_pages[:, pages] = source.rows.cpu().transpose(0, 1)
            pools.index_pages[:, pages] = source.index_pages.transpose(0, 1)
            before, token_id = torch.zeros(config.hidden_size), int(token_ids[position])
            rows.append(DecodeRow(tier.open(blocks), token_id, position, before, Sampling()))
            host_rows.append(blocks.start * BLOCK_TOKENS + position)
        model.seen.clear()
        model.recorder = recorded(patch)
        model.cached_rows = lambda layer: kv_format.decode_rows(pools.host_rows[layer][host_rows])
        GpuDecodeEngine(step, step.run, policy).step(rows)


def recorded(patch: pytest.MonkeyPatch) -> Recorder:
    """What decode's kernels make from now on."""
    recorder = Recorder()
    choose, attend = decode_kv.top_k, decode_kv.sparse_mla_decode

    def top_k(*arguments: object) -> torch.Tensor:
        chosen = choose(*arguments)
        recorder.wanted = recorder.attended_to = last(chosen)
        return chosen

    def sparse_mla_decode(*arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = attend(*arguments)
        recorder.attended = last(out)
        return out, lse

    patch.setattr(decode_kv, "top_k", top_k)
    patch.setattr(decode_kv, "sparse_mla_decode", sparse_mla_decode)
    return recorder


@pytest.mark.parametrize(("phase", "layer"), CASES)
def test_a_layer_makes_on_a_gpu_what_it_makes_on_the_cpu(
    compared: Found, phase: str, layer: int
) -> None:
    seen = compared[phase][layer]
    assert seen.rows < TOLERANCE.rows
    assert seen.attended < TOLERANCE.attended
    assert seen.added < TOLERANCE.added
    assert seen.expert_outputs < TOLERANCE.expert_outputs
    assert seen.same_experts >= TOLERANCE.same_experts


@pytest.mark.parametrize(("phase", "layer"), CASES)
def test_the_same_positions_are_chosen(compared: Found, phase: str, layer: int) -> None:
    """But for scores that bf16 cannot tell apart; a follower attends to its owner's."""
    assert compared[phase][layer].same_positions > TOLERANCE.same_positions
