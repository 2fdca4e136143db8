"""What a submitted request must look like: checked once at the door, trusted inside.

Pure; knows this worker's limits, nothing of its load.
"""

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shared import farspan_pb2 as pb
from shared import sampling
from shared.block_hash import BLOCK_TOKENS, HASH_BYTES, BlockHash, unpack
from shared.engine.drawing import Drawing
from shared.engine.step import Sampling
from shared.errors import BadRequest, DeadlineExceeded, TooLong, WorkerLost
from shared.grammar import Vocabulary

_TOKEN_BYTES = 4
_ID = re.compile(r"[A-Za-z0-9_-]+")  # what a NATS subject token may hold


@dataclass(frozen=True)
class Door:
    """What this life of this worker takes."""

    worker: pb.WorkerRef
    model: str
    vocabulary: Vocabulary
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
    if int(token_array(submit).max()) >= door.vocabulary.size:
        raise BadRequest("a token id is outside the vocabulary")
    sampling.check(submit.sampling, door.vocabulary.size)
    sampling.check_prompt_logprobs(submit.sampling, num_tokens - submit.num_resumed_tokens)
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


def first_sampling(submit: pb.Submit, vocabulary: Vocabulary) -> Sampling:
    """How the first token is drawn: at its place in the whole answer.

    Raises BadRequest for a grammar that cannot be used; compiling one takes milliseconds.
    """
    resumed, asked = submit.num_resumed_tokens, submit.sampling
    return Drawing(asked, token_array(submit), resumed, vocabulary).next()


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
