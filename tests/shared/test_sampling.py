"""What no worker draws is refused at its door, by name."""

import math

import pytest

from shared import farspan_pb2 as pb
from shared.errors import BadRequest
from shared.sampling import check, check_prompt_logprobs

VOCABULARY = 100


def asked(**changes: object) -> pb.SamplingParams:
    return pb.SamplingParams(**{"max_new_tokens": 1, "top_p": 1.0, **changes})  # type: ignore[arg-type]


def test_everything_that_is_meant_can_be_asked() -> None:
    check(asked(), VOCABULARY)
    everything = asked(
        temperature=2.0,
        min_p=0.1,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        repetition_penalty=1.1,
        bias_token_ids=[1, 2],
        biases=[-100.0, 100.0],
        num_logprobs=20,
        num_prompt_logprobs=0,
        grammar=pb.Grammar(kind=pb.GRAMMAR_KIND_LARK, text='start: "a"'),
    )
    check(everything, VOCABULARY)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"max_new_tokens": 0}, id="no-room"),
        pytest.param({"temperature": -1.0}, id="temperature"),
        pytest.param({"temperature": math.nan}, id="temperature-nan"),
        pytest.param({"top_p": 0.0}, id="top-p"),
        pytest.param({"min_p": 1.5}, id="min-p"),
        pytest.param({"min_p": math.nan}, id="min-p-nan"),
        pytest.param({"presence_penalty": math.inf}, id="presence"),
        pytest.param({"frequency_penalty": math.nan}, id="frequency"),
        pytest.param({"repetition_penalty": -1.0}, id="repetition"),
        pytest.param({"stop_token_ids": [100]}, id="unknown-stop"),
        pytest.param({"bias_token_ids": [100], "biases": [1.0]}, id="unknown-bias"),
        pytest.param({"bias_token_ids": [1, 1], "biases": [1.0, 1.0]}, id="one-token-twice"),
        pytest.param({"bias_token_ids": [1]}, id="no-bias"),
        pytest.param({"bias_token_ids": [1], "biases": [1e9]}, id="large-bias"),
        pytest.param({"num_logprobs": 21}, id="logprobs"),
        pytest.param({"num_prompt_logprobs": 21}, id="prompt-logprobs"),
        pytest.param({"grammar": pb.Grammar(text="start: x")}, id="kind-of-grammar"),
    ],
)
def test_what_cannot_be_drawn_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(BadRequest):
        check(asked(**changes), VOCABULARY)


def test_a_prompt_s_logprobs_must_fit_in_a_message() -> None:
    """16 MB; only where they are asked for."""
    check_prompt_logprobs(asked(), 10**6)
    check_prompt_logprobs(asked(num_prompt_logprobs=0), 10**6)
    with pytest.raises(BadRequest, match="16777216"):
        check_prompt_logprobs(asked(num_prompt_logprobs=20), 200_000)
