"""An answer that keeps to its masks is what its grammar says; control tokens never are."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shared.errors import BadRequest, ConfigError
from shared.grammar import Constraint, Vocabulary, check
from shared.stop_tokens import stop_token_ids
from tests.demo import CHECKPOINT, tokenizer

ROOT = Path(__file__).parents[2]
SIZE = 4096
VOCABULARY = Vocabulary(CHECKPOINT, SIZE)
STOPS = stop_token_ids(CHECKPOINT)
OBJECT = """start: %json {
  "type": "object", "additionalProperties": false, "required": ["name", "count"],
  "properties": {"name": {"type": "string", "maxLength": 8}, "count": {"type": "integer"}}
}"""


def allowed(constraint: Constraint, unwanted: tuple[int, ...] = ()) -> list[int]:
    mask = int.from_bytes(constraint.mask(unwanted), "little")
    return [token_id for token_id in range(SIZE) if mask >> token_id & 1]


def encode(text: str) -> list[int]:
    return list(tokenizer().encode(text, add_special_tokens=False).ids)


def chained(line: str, count: int) -> str:
    """A rule that refers to one that refers to one..."""
    rules = (line.format(this=number, next=number + 1) for number in range(count))
    return "\n".join(["start: r0", *rules, f'r{count}: "b"', f'T{count}: "b"'])


def linked(count: int) -> str:
    """A schema of objects, each within another by reference."""
    definitions: dict[str, object] = {
        f"d{n}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{n + 1}"}}}
        for n in range(count)
    }
    definitions[f"d{count}"] = {"type": "integer"}
    return f"start: %json {json.dumps({'$ref': '#/$defs/d0', '$defs': definitions})}"


DEEP = {
    "rules": lambda: chained('r{this}: "a" r{next}?', 9000),
    "terminals": lambda: chained('T{this}: "a" T{next}?', 9000).replace("r0", "T0"),
    "brackets": lambda: "start: " + "(" * 90_000 + '"a"' + ")" * 90_000,
    "a line": lambda: "start: " + '"a" ' * 60_000,
    "references": lambda: linked(2500),
}


def test_a_deep_grammar_is_refused_or_used_and_the_process_lives() -> None:
    """In one of its own: an overflow of the stack would end this one, and all its tests.

    The library recurses as deep as the text goes; a usual thread's stack is 8 MB.
    """
    code = """
from tests.shared.test_grammar import DEEP, VOCABULARY, check
from shared.errors import BadRequest
for name, text in DEEP.items():
    print(name, flush=True)
    try:
        check(text())
        VOCABULARY.constraint(text()).mask()
    except BadRequest:
        pass
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100
    )

    assert done.returncode == 0, done.stdout + done.stderr[-500:]
    assert done.stdout.split() == " ".join(DEEP).split()


SLOW = {
    "alternatives of objects": lambda: (
        "start: %json "
        + json.dumps(
            {
                "anyOf": [
                    {
                        "type": "object",
                        "properties": {f"p{n % 11}": {"type": "integer", "multipleOf": n}},
                    }
                    for n in range(1, 1000)
                ]
            }
        )
    ),
    "a pattern": lambda: "start: P\nP: /" + "(ab|cd)?" * 5000 + "/",
    "equal alternatives": lambda: "start: r\nr: " + " | ".join(['"a"'] * 30_000),
}


@pytest.mark.parametrize("name", SLOW)
def test_what_would_take_long_to_compile_is_refused(name: str) -> None:
    """With the library's own bounds these took 5 to 110 s, in which a worker serves nobody."""
    begun_s = time.monotonic()
    with pytest.raises(BadRequest):
        VOCABULARY.constraint(SLOW[name]()).mask()

    assert time.monotonic() - begun_s < 4


@pytest.mark.parametrize("seed", range(5))
def test_any_choice_among_the_allowed_tokens_is_a_text_of_the_grammar(seed: int) -> None:
    chosen = random.Random(seed)
    constraint, answer = VOCABULARY.constraint(OBJECT), list[int]()
    while not constraint.is_over:
        token_id = chosen.choice(allowed(constraint))
        constraint.accept(token_id)
        answer.append(token_id)
        # An integer may go on for ever: it is chosen to end where it can.
        if constraint.is_complete:
            constraint.accept(STOPS[0])

    found = json.loads(tokenizer().decode([t for t in answer if t not in STOPS]))
    assert set(found) == {"name", "count"}


def test_a_text_goes_on_where_another_attempt_left_it() -> None:
    tokens = encode('{"name": "Ada", "count": 12}')
    whole = VOCABULARY.constraint(OBJECT)
    for place, token_id in enumerate(tokens):
        resumed = VOCABULARY.constraint(OBJECT, tokens[:place])
        assert resumed.mask() == whole.mask()
        whole.accept(token_id)

    assert whole.is_complete


def test_a_complete_text_ends_with_any_of_the_stop_tokens() -> None:
    """And with nothing else, wanted or not: a grammar with min_tokens would else have no token."""
    constraint = VOCABULARY.constraint('start: "a"')
    constraint.accept(encode("a")[0])

    assert allowed(constraint) == sorted(STOPS) == allowed(constraint, unwanted=STOPS)
    constraint.accept(STOPS[1])
    assert constraint.is_over


def test_an_unwanted_token_waits_as_long_as_another_may_come() -> None:
    constraint = VOCABULARY.constraint("start: /a+/", encode("a"))

    assert set(STOPS) < set(allowed(constraint))
    assert not set(STOPS) & set(allowed(constraint, unwanted=STOPS))


def test_text_with_markers_uses_their_own_tokens() -> None:
    """`<think>` is a token but no control token: as text in a grammar it is that one."""
    grammar = 'start: "<think>" /[a-z ]+/ "</think>" /[0-9]/'
    tokens = encode("<think>so it is</think>7")
    assert len(tokens) < len("<think>so it is</think>7")

    assert VOCABULARY.constraint(grammar, tokens).is_complete


@pytest.mark.parametrize(
    "grammar",
    [
        pytest.param("start: /(.|\\n)*/", id="any-text"),
        pytest.param('start: <|user|> "a" | "b"', id="named"),
        pytest.param('start: <[4078-4082]> "a" | "b"', id="numbered"),
    ],
)
def test_no_grammar_lets_control_tokens_into_a_text(grammar: str) -> None:
    """They would end a turn, or begin one of somebody else."""
    control = {"<|user|>", "<|system|>", "<|assistant|>", "[gMASK]", "<sop>", "[MASK]"}
    ids = {tokenizer().token_to_id(token) for token in control} - set(STOPS)

    assert not ids & set(allowed(VOCABULARY.constraint(grammar)))


def test_ids_that_no_token_has_are_not_allowed() -> None:
    """The model's vocabulary is padded."""
    padded = Vocabulary(CHECKPOINT, SIZE + 100).constraint("start: /(.|\\n)*/").mask()

    assert int.from_bytes(padded, "little").bit_length() <= SIZE
    assert len(padded) == -(-(SIZE + 100) // 8)


@pytest.mark.parametrize(
    "grammar",
    [
        pytest.param("start: missing", id="unknown-rule"),
        pytest.param("start: /(/", id="bad-expression"),
        pytest.param('start: %json {"type": 7}', id="bad-schema"),
        pytest.param("start: /" + "a" * (1 << 18) + "/", id="too-long"),
        pytest.param("", id="empty"),
    ],
)
def test_a_grammar_that_cannot_be_used_is_refused(grammar: str) -> None:
    with pytest.raises(BadRequest):
        VOCABULARY.constraint(grammar)
    with pytest.raises(BadRequest):
        check(grammar)


def test_a_text_that_does_not_fit_is_refused() -> None:
    """Never taken for complete, as the library does in its error state."""
    with pytest.raises(BadRequest):
        VOCABULARY.constraint(OBJECT, encode("nonsense"))
    with pytest.raises(BadRequest):
        VOCABULARY.constraint(OBJECT, STOPS[:1])

    constraint = VOCABULARY.constraint(OBJECT)
    with pytest.raises(BadRequest):
        constraint.accept(encode("nonsense")[0])
    with pytest.raises(BadRequest):
        constraint.mask()


def test_a_grammar_that_costs_too_much_ends_in_an_error() -> None:
    """Bounds hold while masks are made too; the error tells nothing of the text."""
    constraint = VOCABULARY.constraint("start: x\nx: /[a-z ,]/ | x x | x x x x")

    with pytest.raises(BadRequest, match="too complex") as raised:
        for token_id in encode("what was written, and more of it" * 9):
            constraint.mask()
            constraint.accept(token_id)

    assert "written" not in str(raised.value)


def test_a_tokenizer_of_another_kind_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 1}')
    (tmp_path / "tokenizer.json").write_text('{"decoder": {"type": "Metaspace"}}')

    with pytest.raises(ConfigError, match="byte-level"):
        Vocabulary(tmp_path, 10).constraint('start: "a"')


def test_a_model_with_fewer_tokens_than_its_tokenizer_is_told() -> None:
    with pytest.raises(ConfigError, match="4095"):
        Vocabulary(CHECKPOINT, 1000).constraint('start: "a"')
