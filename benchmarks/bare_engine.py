"""Farspan's engine without services: prefill and decode in one process.

Same model, pools, kernels, chunk size and threads as the services use; a handoff is a copy in
memory.
"""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from services.decode.config import DecodeConfig
from shared.engine import tiles
from shared.engine.attention_ops import CpuAttentionOps
from shared.engine.comm import RankGroup
from shared.engine.decode_step import DecodeRow, hidden_from_bytes
from shared.engine.kv.format import make_format
from shared.engine.kv.host_tier import TieredSequence
from shared.engine.kv.layout import BLOCK_TOKENS, Sharding
from shared.engine.kv.pool import BlockPool
from shared.engine.kv.residency import ResidencyMode
from shared.engine.model.backend import CpuBackend
from shared.engine.model.config import load_config
from shared.engine.model.loading import load_weights
from shared.engine.model.transformer import Transformer
from shared.engine.open_decode import DecodeEngineSettings, open_decode_engine
from shared.engine.prefill_engine import PrefillEngine
from shared.engine.prefill_kv import KvContext
from shared.engine.step import Chunk, PrefillStep, Sampled, Sampling


@dataclass
class Stream:
    """One request that decodes greedily."""

    sequence: TieredSequence
    position: int  # of the newest token
    hidden: torch.Tensor = field(repr=False)
    token_ids: list[int] = field(default_factory=list)  # generated ones


class BareEngine:
    """A prefill pool for one prompt of up to max_tokens, and a decode engine of default size."""

    def __init__(
        self, checkpoint: Path, kv_format: str, *, max_tokens: int, chunk_tokens: int
    ) -> None:
        config, group = load_config(checkpoint), RankGroup()
        made = make_format(kv_format, config.attention)
        self._chunk_tokens = chunk_tokens
        self._num_blocks = -(-max_tokens // BLOCK_TOKENS)
        self._pool = BlockPool(config, made, self._num_blocks, epoch=1)
        model = Transformer(config, load_weights(checkpoint, config, group, CpuBackend()), group)
        ops, sharding = CpuAttentionOps(made, config.attention), Sharding(1, BLOCK_TOKENS)
        context = KvContext(self._pool, ops, config.attention.kv_lora_rank, sharding, group)
        self._prefill = PrefillEngine(model, context)
        opened = open_decode_engine(
            DecodeEngineSettings(
                checkpoint=checkpoint,
                kv_format=kv_format,
                host_pool_mib=1024,
                device_pool_mib=512,
                index_pool_mib=128,
                hot_rows=1024,
                residency=ResidencyMode.MIXED,
            )
        )
        self._decode = ExitStack().enter_context(opened)  # on a CPU there is nothing to leave
        self._num_used_blocks = 0
        self._prefill_threads = len(os.sched_getaffinity(0))

    def prefill(self, prompt: Sequence[int]) -> Sampled:
        """Compute the prompt into the prefill pool and draw the first token."""
        tiles.use(self._prefill_threads)
        for done in range(0, len(prompt), self._chunk_tokens):
            end = min(len(prompt), done + self._chunk_tokens)
            sampled = self._prefill.run(PrefillStep((self._chunk(prompt, done, end),))).sampled
        return sampled["bare"]

    def start(self, prompt: Sequence[int], first: Sampled, max_new_tokens: int) -> Stream:
        """Hand over what `prefill` just computed: prompt rows to the host tier, index keys too."""
        num_blocks = -(-(len(prompt) + max_new_tokens) // BLOCK_TOKENS)
        blocks = list(range(self._num_used_blocks, self._num_used_blocks + num_blocks))
        self._num_used_blocks += num_blocks
        sequence = self._decode.tier.open(blocks)
        pools = self._decode.tier.pools
        for page in range(-(-len(prompt) // BLOCK_TOKENS)):
            rows = slice(blocks[page] * BLOCK_TOKENS, (blocks[page] + 1) * BLOCK_TOKENS)
            pools.host_rows[:, rows] = self._pool.rows[page]
            pools.index_pages[:, blocks[page]] = self._pool.index_pages[page]
        hidden = hidden_from_bytes(first.last_hidden, self._decode.config.hidden_size)
        return Stream(sequence, len(prompt), hidden, [first.token_id])

    def step(self, streams: Sequence[Stream]) -> None:
        """One more token for each stream."""
        tiles.use(DecodeConfig.threads)
        rows = [
            DecodeRow(s.sequence, s.token_ids[-1], s.position, s.hidden, Sampling())
            for s in streams
        ]
        for stream, output in zip(streams, self._decode.step(rows), strict=True):
            stream.token_ids.append(output.token_id)
            stream.hidden = output.hidden
            stream.position += 1

    def finish(self, streams: Sequence[Stream]) -> None:
        """End all streams; the decode pools are empty afterwards."""
        for stream in streams:
            self._decode.tier.close(stream.sequence)
        self._num_used_blocks = 0

    def _chunk(self, prompt: Sequence[int], done: int, end: int) -> Chunk:
        early = 1 if done else 0
        return Chunk(
            request_id="bare",
            token_ids=np.array(prompt[done - early : end], np.uint32),
            first=done - early,
            num_recomputed=early,
            block_ids=tuple(range(self._num_blocks)),
            sampling=Sampling() if end == len(prompt) else None,
        )
