"""What a prefill step is: plain data that a scheduler builds and every rank executes alike."""

import hashlib
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from shared import farspan_pb2 as pb

Bits = npt.NDArray[np.uint8]  # bit i % 8 of byte i // 8 stands for token i


@dataclass(frozen=True)
class Shaping:
    """What is done to a row's logits before a token is drawn, in this order; empty = nothing."""

    repetition_penalty: float = 1.0  # divides those of seen tokens above 0, multiplies the others
    seen: Bits | None = None
    added_token_ids: npt.NDArray[np.int64] | None = None  # different ones
    additions: npt.NDArray[np.float32] | None = None
    allowed: Bits | None = None  # no other token may be drawn


@dataclass(frozen=True)
class Sampling:
    """How to draw the next token."""

    temperature: float = 0.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    seed: int = 0
    index: int = 0  # place of the drawn token in the answer; with the seed it keys the generator
    banned_token_ids: tuple[int, ...] = ()  # stop tokens while min_new_tokens is not reached
    min_p: float = 0.0  # 0 = off; tokens less likely than this part of the likeliest are left out
    shaping: Shaping | None = None
    num_logprobs: int | None = (
        None  # likeliest tokens told beside the drawn one; None = no logprobs
    )


@dataclass(frozen=True)
class Chunk:
    """A part of one request computed in one step.

    The MTP layer's row of a token needs the hidden state of the token before it. A chunk that does
    not start at position 0 therefore begins one token early: that token is computed again, and
    nothing is written for it.
    """

    request_id: str
    token_ids: npt.NDArray[np.uint32]  # of positions first .. first + len - 1
    first: int
    num_recomputed: int  # leading tokens whose KV is cached already: 0 or 1
    block_ids: tuple[int, ...]  # effective blocks that cover the sequence up to this chunk's end
    sampling: Sampling | None = None  # given with the last chunk: draw the next token
    num_prompt_logprobs: int | None = None  # tell those of the chunk's tokens, all but the first

    @property
    def num_cached(self) -> int:
        """Leading tokens of the sequence whose KV is read, not computed."""
        return self.first + self.num_recomputed

    @property
    def end(self) -> int:
        """One past the last position computed."""
        return self.first + len(self.token_ids)


@dataclass(frozen=True)
class BlockCopy:
    """Copy a whole effective block before the step: a prefix hit ends inside it."""

    source: int
    target: int


@dataclass(frozen=True)
class PrefillStep:
    """One collective step of all ranks."""

    chunks: tuple[Chunk, ...]
    generations: tuple[
        tuple[int, int], ...
    ] = ()  # (block id, generation) handed out since the last step
    copies: tuple[BlockCopy, ...] = ()

    def digest(self) -> bytes:
        """Equal on all ranks or the step must not run."""
        digest = hashlib.blake2b(digest_size=8)
        for chunk in self.chunks:
            digest.update(f"{chunk.request_id} {chunk.first} {chunk.num_recomputed}".encode())
            digest.update(chunk.token_ids.tobytes())
            digest.update(np.array(chunk.block_ids, np.int64).tobytes())
        digest.update(repr((self.generations, self.copies)).encode())
        return digest.digest()


@dataclass(frozen=True)
class Sampled:
    """The token drawn after a request's last chunk."""

    token_id: int
    last_hidden: bytes = field(repr=False)  # fp32 post-norm hidden of the last prompt token
    logprobs: pb.TokenLogprobs | None = None


@dataclass(frozen=True)
class StepResult:
    """Rank 0's answer; the other ranks draw the same tokens."""

    sampled: dict[str, Sampled]
    prompt_logprobs: dict[str, pb.TokenLogprobs] = field(default_factory=dict)  # of the chunks
