"""All text stages together: the parts do not depend on how tokens were batched."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.logprobs import RawLogprob
from services.gateway.text.answer import Answer, Stops, merge
from services.gateway.text.glm import Content, GlmParser, Part, Reasoning, ToolCall
from tests.services.gateway.stage import TOKENIZER

TEXT = (
    "Denke 한국 🙂</think>Ant<wort> "
    "<tool_call>now<arg_key>wo</arg_key><arg_value>Zürich</arg_value></tool_call> Ende <|user|>"
)
IDS = TOKENIZER.encode(TEXT)


def describe(token_id: int) -> tuple[str, bytes]:
    return TOKENIZER.token_text(token_id), TOKENIZER.token_bytes(token_id)


def stages(stops: Stops) -> Answer:
    parser = GlmParser({"now": {}}, is_reasoning=True)
    return Answer(TOKENIZER.detokenizer(), stops, parser, describe)


def answer(batches: list[list[int]], stops: list[str]) -> tuple[list[Part], int, int]:
    whole = stages(Stops(stops))
    parts = [part for batch in batches for part in whole.feed(batch).parts]
    return merge([*parts, *whole.flush().parts]), whole.num_tokens, whole.num_reasoning_tokens


@settings(max_examples=150, deadline=None)
@given(
    cuts=st.lists(st.integers(0, len(IDS)), max_size=8),
    stops=st.lists(st.sampled_from(["국", "🙂<", "wort", "</arg", " E", "zz"]), max_size=3),
)
def test_batches_change_neither_parts_nor_count(cuts: list[int], stops: list[str]) -> None:
    """Usage is what the text was made of, also with a stop string inside a batch."""
    edges = [0, *sorted(cuts), len(IDS)]
    batches = [IDS[a:b] for a, b in pairwise(edges)]

    assert answer(batches, stops) == answer([IDS], stops)


def test_the_stages_follow_each_other() -> None:
    """Bytes, then stop strings, then markup."""
    parts, num_tokens, _ = answer([IDS], [])

    assert parts == [
        Reasoning("Denke 한국 🙂"),
        Content("Ant<wort> "),
        ToolCall("now", '{"wo": "Zürich"}'),
        Content(" Ende "),
    ]
    assert num_tokens == len(IDS)


def test_a_stop_string_hides_all_that_follows() -> None:
    """Also a call that would have come."""
    parts, num_tokens, _ = answer([IDS], ["wort"])

    assert parts == [Reasoning("Denke 한국 🙂"), Content("Ant<")]
    assert num_tokens < len(IDS)


def test_a_stop_token_of_the_client_s_ends_the_answer_unseen() -> None:
    """It counts, since it was generated; which one it was is told."""
    (stop,) = TOKENIZER.encode(" E")[:1]
    whole = stages(Stops(token_ids=frozenset({stop})))

    whole.feed([*TOKENIZER.encode("a</think>b"), stop, *IDS])

    assert whole.is_stopped
    assert whole.stop == stop
    assert whole.num_tokens == len(TOKENIZER.encode("a</think>b")) + 1


def test_a_stop_string_in_the_reasoning_ends_nothing() -> None:
    """A client that stops at a full stop means the answer, which it has not seen yet."""
    whole = stages(Stops((".",)))

    parts = whole.feed(TOKENIZER.encode("One. Two.</think>Three. Four")).parts

    assert parts == [Reasoning("One. Two."), Content("Three")]
    assert whole.stop == "."


def test_a_stop_string_within_the_first_tokens_does_not_count() -> None:
    """min_tokens promises so many."""
    ids = TOKENIZER.encode("</think>word word")
    first, later = (stages(Stops(("word",), min_tokens=number)) for number in (0, len(ids)))

    first.feed(ids)
    later.feed(ids)

    assert first.stop == "word"
    assert later.stop is None
    assert later.flush().parts == []


def test_each_token_has_its_logprob_whatever_the_text_holds_back() -> None:
    """Also those of half a code point; which token it was is told in bytes."""
    ids = TOKENIZER.encode("</think>한")
    raw = [RawLogprob(-0.5, ((5, -0.25), (ids[place], -0.5))) for place in range(len(ids))]

    delta = stages(Stops()).feed(ids, raw)

    assert b"".join(each.data for each in delta.logprobs).decode() == "</think>한"
    assert {each.logprob for each in delta.logprobs} == {-0.5}
    assert [other.logprob for other in delta.logprobs[0].top] == [-0.25, -0.5]


def test_tokens_before_the_end_of_thinking_are_reasoning() -> None:
    """The marker that ends it is counted with them."""
    whole = stages(Stops())
    thought = TOKENIZER.encode("one two</think>")

    whole.feed([*thought, *TOKENIZER.encode("three")])

    assert whole.num_reasoning_tokens == len(thought)
