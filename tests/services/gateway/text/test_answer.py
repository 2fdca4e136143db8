"""All text stages together: the parts do not depend on how tokens were batched."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.text.answer import Answer, merge
from services.gateway.text.glm import Content, GlmParser, Part, Reasoning, ToolCall
from tests.services.gateway.stage import TOKENIZER

TEXT = (
    "Denke 한국 🙂</think>Ant<wort> "
    "<tool_call>now<arg_key>wo</arg_key><arg_value>Zürich</arg_value></tool_call> Ende <|user|>"
)
IDS = TOKENIZER.encode(TEXT)


def answer(batches: list[list[int]], stops: list[str]) -> tuple[list[Part], int]:
    parser = GlmParser({"now": {}}, is_reasoning=True)
    stages = Answer(TOKENIZER.detokenizer(), stops, parser)
    parts = [part for batch in batches for part in stages.feed(batch)]
    return merge(parts + stages.flush()), stages.num_tokens


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
    parts, num_tokens = answer([IDS], [])

    assert parts == [
        Reasoning("Denke 한국 🙂"),
        Content("Ant<wort> "),
        ToolCall("now", '{"wo": "Zürich"}'),
        Content(" Ende "),
    ]
    assert num_tokens == len(IDS)


def test_a_stop_string_hides_all_that_follows() -> None:
    """Also a call that would have come."""
    parts, num_tokens = answer([IDS], ["wort"])

    assert parts == [Reasoning("Denke 한국 🙂"), Content("Ant<")]
    assert num_tokens < len(IDS)
