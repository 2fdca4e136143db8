"""What is refused before it is parsed, and what never is."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.dialects import structure
from services.gateway.dialects.bounds import MAX_PROMPT_TOKENS
from services.gateway.dialects.shapes import read_fields
from services.gateway.dialects.structure import MAX_PARTS, refuse_intricate
from services.gateway.failures import InvalidRequest


@pytest.mark.parametrize("part", ["{}", "[]", '""', '"a":1', "[[],[]]"])
def test_a_body_of_many_parts_is_refused_unparsed(part: str) -> None:
    """In a field that nobody knows, too: every stream would wait while it is parsed."""
    signs = "{}" if ":" in part else "[]"
    many = ",".join([part] * (MAX_PARTS + 1))

    with pytest.raises(InvalidRequest, match="the body holds more than"):
        read_fields(f'{{"unknown":{signs[0]}{many}{signs[1]}}}'.encode())


def test_numbers_are_bounded_by_the_longest_prompt() -> None:
    """Which itself passes."""
    longest = b'{"prompt":[' + b"1," * MAX_PROMPT_TOKENS + b"1]}"
    refuse_intricate(longest)

    with pytest.raises(InvalidRequest, match="the body holds more than"):
        refuse_intricate(longest.replace(b"[", b"[" + b"1," * (MAX_PARTS + 1)))


@pytest.mark.parametrize("word", ["a,", "[{:", '"a": {"b"}, ', "\\", '\\",\\', "\n\t한,"])
def test_a_long_text_passes_whatever_stands_in_it(word: str) -> None:
    """Code is full of commas and brackets."""
    refuse_intricate(json.dumps({"a": word * 500_000, "b": [1, "x"]}).encode())


def test_a_text_without_an_end_is_left_to_the_parser() -> None:
    """Which says where it is."""
    for end in (b"", b"\\", b'\\"'):
        refuse_intricate(b'{"a":"' + b',"' + b'\\"' * 300_000 + b"," * 300_000 + end)


documents = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('ab,:[]{}"\\\n', max_size=6),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text('a,:"\\', max_size=3), inner, max_size=4)
    ),
    max_leaves=20,
)


@settings(max_examples=100, deadline=None)
@given(document=documents)
def test_parts_are_counted_outside_texts_only(document: object) -> None:
    """However texts are escaped."""
    found = num_parts(document)
    body = json.dumps(document).encode()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(structure, "_FEW", -1)
        patch.setattr(structure, "MAX_PARTS", found + 1)  # the end counts for one
        refuse_intricate(body)
        patch.setattr(structure, "MAX_PARTS", found - 1)
        if found:
            with pytest.raises(InvalidRequest):
                refuse_intricate(body)


def num_parts(document: object) -> int:
    """Objects, arrays, fields (a name and a colon) and texts."""
    if isinstance(document, str):
        return 1
    if isinstance(document, list):
        return 1 + sum(map(num_parts, document))
    if isinstance(document, dict):
        return 1 + sum(2 + num_parts(value) for value in document.values())
    return 0
