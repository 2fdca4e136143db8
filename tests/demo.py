"""The bundled checkpoint as tests use it: one model, engines over small pools, real text."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from shared.engine import tiles
from shared.engine.attention import Select, select_positions
from shared.engine.attention_ops import CpuAttentionOps
from shared.engine.comm import RankGroup
from shared.engine.kv.format import KvFormat, make_format
from shared.engine.kv.layout import BLOCK_TOKENS, Sharding
from shared.engine.kv.pool import BlockPool
from shared.engine.model.backend import CpuBackend
from shared.engine.model.config import load_config
from shared.engine.model.loading import load_weights
from shared.engine.model.transformer import Transformer
from shared.engine.prefill_engine import PrefillEngine
from shared.engine.prefill_kv import KvContext
from shared.engine.step import Chunk, PrefillStep, Sampled, Sampling

CHECKPOINT = Path(__file__).parents[1] / "checkpoints" / "demo-fp8"


@contextmanager
def threads(num_threads: int) -> Iterator[None]:
    """Compute with so many threads inside the block."""
    before = tiles.use(num_threads)
    try:
        yield
    finally:
        tiles.use(before)


@cache
def model() -> Transformer:
    """The demo model in fp32 on one rank."""
    config, group = load_config(CHECKPOINT), RankGroup()
    return Transformer(config, load_weights(CHECKPOINT, config, group, CpuBackend()), group)


@cache
def tokenizer() -> Tokenizer:
    """The demo tokenizer."""
    return Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))


@cache
def text_tokens() -> tuple[int, ...]:
    """3,600 tokens of English prose: the model card."""
    card = (CHECKPOINT.parent / "MODEL_CARD.md").read_text()
    return tuple(tokenizer().encode(card, add_special_tokens=False).ids)


@dataclass
class Reference:
    """The aggregated path: one engine on one rank that also decodes, a token per step."""

    engine: PrefillEngine
    pool: BlockPool
    kv_format: KvFormat
    block_ids: tuple[int, ...]

    def prefill(self, prompt: list[int], chunk_tokens: int, sampling: Sampling) -> Sampled:
        """Compute the prompt in chunks and draw the first token."""
        ends = range(chunk_tokens, len(prompt), chunk_tokens)
        return self.prefill_to(prompt, [*ends, len(prompt)], sampling)

    def prefill_to(self, prompt: list[int], ends: Sequence[int], sampling: Sampling) -> Sampled:
        """The same with chunks that end where told, the last one with the prompt."""
        done, drawn = 0, None
        for end in ends:
            wanted = sampling if end == len(prompt) else None
            drawn = self._chunk(prompt, done, end, wanted)
            done = end
        assert drawn is not None
        return drawn

    def generate(
        self, prompt: list[int], num_tokens: int, chunk_tokens: int = 512
    ) -> tuple[list[int], Sampled]:
        """num_tokens greedy tokens, and what prefill handed over after the prompt."""
        first = self.prefill(prompt, chunk_tokens, Sampling())
        tokens = [*prompt, first.token_id]
        while len(tokens) < len(prompt) + num_tokens:
            drawn = self._chunk(tokens, len(tokens) - 1, len(tokens), Sampling())
            assert drawn is not None
            tokens.append(drawn.token_id)
        return tokens[len(prompt) :], first

    def answer(self, prompt: list[int], stop_ids: Collection[int], max_tokens: int) -> list[int]:
        """Greedy tokens up to and with a stop token."""
        tokens = [*prompt, self.prefill(prompt, 512, Sampling()).token_id]
        while tokens[-1] not in stop_ids and len(tokens) < len(prompt) + max_tokens:
            drawn = self._chunk(tokens, len(tokens) - 1, len(tokens), Sampling())
            assert drawn is not None
            tokens.append(drawn.token_id)
        return tokens[len(prompt) :]

    def would_answer(self, prompt: list[int], answer: list[int], num_cached: int) -> list[int]:
        """The greedy token after each of the prompt and the answer's leading parts.

        Equal to the answer and a stop token if and only if that is what the engine would write. The
        first num_cached tokens were computed by earlier calls.
        """
        return self.answer_logits(prompt, answer, num_cached).argmax(-1).tolist()

    def answer_logits(
        self, prompt: list[int], answer: list[int], num_cached: int
    ) -> torch.Tensor:  # [answer + 1, vocabulary]
        """What `would_answer` decides by; at most the prompt may be cached."""
        step = PrefillStep(
            (self._make_chunk([*prompt, *answer], num_cached, len(prompt + answer)),)
        )
        return model().logits(self.engine.hidden(step)[-len(answer) - 1 :])

    def _chunk(
        self, tokens: list[int], done: int, end: int, sampling: Sampling | None
    ) -> Sampled | None:
        step = PrefillStep((self._make_chunk(tokens, done, end, sampling),))
        return self.engine.run(step).sampled.get("reference")

    def _make_chunk(
        self, tokens: list[int], done: int, end: int, sampling: Sampling | None = None
    ) -> Chunk:
        early = 1 if done else 0
        return Chunk(
            request_id="reference",
            token_ids=np.array(tokens[done - early : end], np.uint32),
            first=done - early,
            num_recomputed=early,
            block_ids=self.block_ids,
            sampling=sampling,
        )


def reference(
    num_tokens: int, kv_format: str = "fp32", select: Select = select_positions
) -> Reference:
    """A fresh aggregated engine with room for num_tokens."""
    config = model().config
    made = make_format(kv_format, config.attention)
    num_blocks = -(-num_tokens // BLOCK_TOKENS)
    pool = BlockPool(config, made, num_blocks, epoch=1)
    ops = CpuAttentionOps(made, config.attention, select)
    sharding = Sharding(1, BLOCK_TOKENS)
    context = KvContext(pool, ops, config.attention.kv_lora_rank, sharding, RankGroup())
    return Reference(PrefillEngine(model(), context), pool, made, tuple(range(num_blocks)))
