"""Answers to draw tokens for, without a request around them."""

import numpy as np

from services.decode.answer import Answer
from shared import farspan_pb2 as pb
from shared.engine.drawing import Drawing
from shared.grammar import Vocabulary
from tests.demo import CHECKPOINT

VOCABULARY = Vocabulary(CHECKPOINT, 4096)


def answer_of(sampling: pb.SamplingParams, *, num_resumed: int = 0, longest: int = 3) -> Answer:
    """After a prompt of ten tokens."""
    token_ids = np.arange(10 + num_resumed, dtype=np.uint32)
    drawing = Drawing(sampling, token_ids, num_resumed, VOCABULARY)
    return Answer(drawing, sampling.stop_token_ids, longest)
