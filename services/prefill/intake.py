"""What a submitted request must look like: checked once at the door, trusted inside.

Pure; knows this worker's limits, nothing of its load.
"""

import math
import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shared import farspan_pb2 as pb
from shared.block_hash import BLOCK_TOKENS, HASH_BYTES, BlockHash, unpack
from shared.engine.step import Sampling
from shared.errors import BadRequest, DeadlineExceeded, TooLong, WorkerLost

_TOKEN_BYTES = 4
_ID = re.compile(r"[A-Za-z0-9_-]+")  # what a NATS subject token may hold


@dataclass(frozen=True)
class Door:
    """What this life of this worker takes."""

    worker: pb.WorkerRef
    model: str
    vocab_size: int
    max_position: int


def check(submit: pb.Submit, door: Door, now_ms: float) -> None:
    """Raises BadRequest, TooLong, WorkerLost for another life, or DeadlineExceeded."""
    _check_ids(submit, door)
    num_tokens, rest = divmod(len(submit.token_ids), _TOKEN_BYTES)
    if rest or num_tokens <= submit.num_resumed_tokens:
        raise BadRequest(f"{len(submit.token_ids)} bytes hold no prompt")
    num_hashes = num_tokens // BLOCK_TOKENS
    if len(submit.block_hashes) != num_hashes * HASH_BYTES:
        raise BadRequest(f"a sequence of {num_tokens} tokens has {num_hashes} block hashes")
    if len(submit.hash_root) != HASH_BYTES:
        raise BadRequest("a request needs the root of its block hashes")
    if int(token_array(submit).max()) >= door.vocab_size:
        raise BadRequest("a token id is outside the vocabulary")
    _check_sampling(submit.sampling, door.vocab_size)
    if num_tokens + submit.sampling.max_new_tokens > door.max_position:
        raise TooLong(f"the model holds {door.max_position} tokens, prompt and answer together")
    if submit.deadline_unix_ms <= now_ms:
        raise DeadlineExceeded("the request's deadline had passed before it was submitted")


def token_array(submit: pb.Submit) -> npt.NDArray[np.uint32]:
    """The sequence's token ids."""
    return np.frombuffer(submit.token_ids, dtype="<u4")


def block_hashes(submit: pb.Submit) -> list[BlockHash]:
    """The sequence's full blocks."""
    return unpack(submit.block_hashes)


def first_sampling(submit: pb.Submit) -> Sampling:
    """How the first token is drawn: at its place in the whole answer."""
    asked = submit.sampling
    return Sampling(
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        seed=asked.seed,
        index=submit.num_resumed_tokens,
        banned_token_ids=tuple(asked.stop_token_ids) if asked.min_new_tokens > 0 else (),
    )


def _check_ids(submit: pb.Submit, door: Door) -> None:
    if not submit.request_id:
        raise BadRequest("a request without an id")
    if submit.prefill != door.worker:
        raise WorkerLost(f"worker {door.worker.worker_id} has begun another life")
    if submit.model != door.model:
        raise BadRequest(f"this worker serves {door.model}, not {submit.model}")
    if not _ID.fullmatch(submit.gateway_id):
        raise BadRequest("a request without a gateway to answer")
    if not _ID.fullmatch(submit.decode.worker_id) or not submit.decode.epoch:
        raise BadRequest("a request without a decode worker")


def _check_sampling(sampling: pb.SamplingParams, vocab_size: int) -> None:
    if sampling.max_new_tokens < 1:
        raise BadRequest("max_new_tokens must be at least 1")
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise BadRequest("the temperature must be a number of at least 0")
    if not 0 < sampling.top_p <= 1:
        raise BadRequest("top_p must be in (0, 1]")
    if any(token_id >= vocab_size for token_id in sampling.stop_token_ids):
        raise BadRequest("a stop token is outside the vocabulary")
