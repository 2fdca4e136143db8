"""When an answer ends, and how its next token is drawn."""

from services.decode.answer import longest_answer
from shared import farspan_pb2 as pb
from tests.services.decode.answers import answer_of


def test_the_model_s_last_position_bounds_the_answer() -> None:
    sampling = pb.SamplingParams(max_new_tokens=50)

    assert longest_answer(sampling, 100, 1000) == 50
    assert longest_answer(sampling, 980, 1000) == 20


def test_an_answer_ends_at_a_stop_token_or_at_its_greatest_length() -> None:
    """A stop token that is also the last one counts as a stop."""
    sampling = pb.SamplingParams(stop_token_ids=[7])

    answer = answer_of(sampling)
    assert [answer.add(token) for token in (1, 2, 3)] == [None, None, pb.FINISH_REASON_LENGTH]
    answer = answer_of(sampling)
    assert [answer.add(token) for token in (1, 2, 7)] == [None, None, pb.FINISH_REASON_STOP]


def test_the_place_in_the_whole_answer_keys_the_generator() -> None:
    """Resumed tokens have spent their random numbers."""
    sampling = pb.SamplingParams(temperature=0.5, top_p=0.25, top_k=3, seed=9)
    answer = answer_of(sampling, num_resumed=40)

    answer.add(1)

    drawn = answer.next_sampling()
    assert (drawn.index, drawn.seed, drawn.top_k, drawn.temperature) == (41, 9, 3, 0.5)


def test_stop_tokens_are_banned_until_the_answer_is_long_enough() -> None:
    answer = answer_of(pb.SamplingParams(stop_token_ids=[7, 8], min_new_tokens=2), longest=9)

    answer.add(1)
    assert answer.next_sampling().banned_token_ids == (7, 8)
    answer.add(1)
    assert answer.next_sampling().banned_token_ids == ()
