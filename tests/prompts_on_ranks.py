"""Prompts on a prefill worker's ranks without its service; KV is read back as decode would."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import torch

from shared import farspan_pb2 as pb
from shared.engine import ranks
from shared.engine.handoff.importer import KvImporter, PullRequest
from shared.engine.handoff.placing import Destination
from shared.engine.kv.layout import BLOCK_TOKENS
from shared.engine.rank_messages import RankSettings
from shared.engine.ranks import Ranks
from shared.engine.step import BlockCopy, Chunk, PrefillStep, Sampled, Sampling
from tests import demo

EPOCH = 1_700_000_000_000_000_000
NUM_BLOCKS = 48


def settings(
    num_ranks: int,
    interleave: int = 64,
    checkpoint: Path = demo.CHECKPOINT,
    kv_format: str = "fp32",
    device: str = "cpu",
) -> RankSettings:
    """Small ranks."""
    return RankSettings(
        "p", EPOCH, checkpoint, kv_format, num_ranks, interleave, NUM_BLOCKS, 1, device
    )


def chunk_ends(begin: int, end: int, chunk_tokens: int) -> list[int]:
    """Where chunks of a fixed budget end."""
    return [*range(begin + chunk_tokens, end, chunk_tokens), end]


def token_rows(pages: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """[layers, tokens, values] fp32 of block-major rows, or of [blocks, layers, page bytes]."""
    rows = pages.unflatten(-1, (BLOCK_TOKENS, -1)) if pages.dim() == 3 else pages
    return rows.transpose(0, 1).flatten(1, 2)[:, :num_tokens].contiguous().view(torch.float32)


class PromptsOnRanks:
    """Hands out blocks one after another, and computes prompts in them."""

    def __init__(
        self,
        engine: Ranks,
        num_ranks: int,
        device: str = "cpu",  # that pulls
    ) -> None:
        self.block_tokens = BLOCK_TOKENS * num_ranks
        self._engine = engine
        self._device = torch.device(device)
        self._importer = KvImporter(
            "test", engine.layout, staging_bytes=1 << 25, num_lanes=1, device=self._device
        )
        self._next_block = 1
        self._generation = 1

    def reuse_blocks(self) -> None:
        """Hand out all blocks again; what they hold is void."""
        self._next_block = 1
        self._generation += 1

    def blocks(self, num_tokens: int) -> list[int]:
        """Blocks for so many tokens, in no natural order."""
        count = -(-num_tokens // self.block_tokens)
        self._next_block += count
        assert self._next_block <= NUM_BLOCKS
        return [*range(self._next_block - count, self._next_block)][::-1]

    async def compute(
        self,
        ids: Sequence[int],
        blocks: Sequence[int],
        ends: Sequence[int],  # of each chunk; the last one is len(ids)
        num_cached: int = 0,
        copies: tuple[BlockCopy, ...] = (),
    ) -> Sampled:
        """What is drawn after the prompt; its KV is in the ranks' pools then."""
        fresh = tuple((block, self._generation) for block in blocks)
        for begin, end in zip((num_cached, *ends), ends, strict=False):
            early = 1 if begin else 0
            chunk = Chunk(
                request_id="r",
                token_ids=np.array(ids[begin - early : end], np.uint32),
                first=begin - early,
                num_recomputed=early,
                block_ids=tuple(blocks[: -(-end // self.block_tokens)]),
                sampling=Sampling() if end == len(ids) else None,
            )
            step = PrefillStep((chunk,), fresh, copies if begin == num_cached else ())
            result = await self._engine.run(step)
        return result.sampled["r"]

    async def read_back(
        self, blocks: Sequence[int], num_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows and index keys in token order, the MTP layer's too: as `token_rows` gives them."""
        pages = await self.pull(blocks, num_tokens)
        rows, keys = (token_rows(each.transpose(0, 1), num_tokens) for each in pages)
        return rows, keys

    async def pull(
        self, blocks: Sequence[int], num_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[layers, pages, 64, row bytes] and [index layers, pages, page bytes] uint8."""
        layout, num_pages = self._engine.layout, -(-num_tokens // BLOCK_TOKENS)
        destination = Destination(
            torch.empty(
                (layout.num_mla_layers, num_pages, BLOCK_TOKENS, layout.row_bytes),
                dtype=torch.uint8,
                pin_memory=self._device.type == "cuda",
            ),
            torch.empty(
                (layout.num_index_layers, num_pages, layout.index_page_bytes),
                dtype=torch.uint8,
                device=self._device,
            ),
            range(num_pages),
        )
        pull = PullRequest(
            ranks=self._engine.regions,
            blocks=[pb.BlockRef(block_id=b, generation=self._generation) for b in blocks],
            epoch=EPOCH,
            interleave=layout.interleave,
            first_token=0,
            last_token=num_tokens,
            deadline_s=20.0,
            destination=destination,
        )
        await asyncio.to_thread(self._importer.pull, pull)
        return destination.host_rows, destination.index_pages


@asynccontextmanager
async def running(num_ranks: int, interleave: int) -> AsyncIterator[PromptsOnRanks]:
    """Ranks that are ready inside the block."""
    async with ranks.start(settings(num_ranks, interleave)) as engine:
        yield PromptsOnRanks(engine, num_ranks)
