"""The model card's pass keys: keyed codes and one pass key, hidden at even depths of a long text.

The text is made as checkpoints/eval.py makes it, except that its held-out text, which cannot be had
offline, is replaced by docstrings of the running Python's library.
"""

import ast
import random
import re
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Literal

from tests.system.dialogs import NO_THINKING

NUM_CODES = 24
_GRASS = (
    " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
)
_WORDS = """
    water house tree king moon bread teacher letter island winter doctor forest paper stone garden
    market bird friend mountain ocean road city language table window animal color number river
    summer student apple music horse bridge village silver school train flower cloud winner paint
    field dinner engine basket captain season picture wall kitchen sister butter corner bottle
"""

Filler = Literal["docstrings", "repeated sentences"]
Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Question:
    """What is asked after the text, and the whole answer."""

    question: str
    answer: str


@dataclass(frozen=True)
class PassKeys:
    """A text, and one question for each thing hidden in it, in the order of depth."""

    text: str
    questions: tuple[Question, ...]

    def body(self, question: Question) -> dict[str, Any]:
        """The fields of a chat request; all of a text's requests share all but their ends."""
        content = f"{self.text}\n{question.question}"
        return {"messages": [{"role": "user", "content": content}], **NO_THINKING}


def hide(num_tokens: int, filler: Filler, encode: Encode, seed: int = 0) -> PassKeys:
    """A text of at least num_tokens tokens, and few more."""
    needles = _needles(random.Random(seed))
    room = num_tokens - sum(len(encode(text)) for text, _ in needles)
    words = cycle(_words(filler))
    around = _pieces(words, room / (2 * len(needles)), encode)
    text = "".join(f"{next(around)}{needle}{next(around)}" for needle, _ in needles).lstrip()
    while len(encode(text)) < num_tokens:
        text += next(words)
    return PassKeys(text, tuple(question for _, question in needles))


def _needles(chance: random.Random) -> list[tuple[str, Question]]:
    def code() -> str:
        return "".join(chance.choices("0123456789", k=5))

    words, needles = chance.sample(_WORDS.split(), 2 * NUM_CODES), []
    for first, second in zip(words[::2], words[1::2], strict=True):
        stated = f"The code of {first} {second} is {code()}."
        needles.append((f" {stated} ", Question(f"What is the code of {first} {second}?", stated)))
    key = code()
    needles.append(
        (
            f" The pass key is {key}. Remember it. {key} is the pass key. ",
            Question("What is the pass key?", f"The pass key is {key}."),
        )
    )
    chance.shuffle(needles)
    return needles


def _words(filler: Filler) -> Iterator[str]:
    """The filler once, word by word, each with the space or line ends before it."""
    for text in [_GRASS] if filler == "repeated sentences" else docstrings():
        yield from re.findall(r"\s*\S+", text)


def docstrings() -> Iterator[str]:
    """Module and class docstrings of the standard library; ASCII, so that any cut is a text."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py")):
        tree = ast.parse(path.read_bytes())
        for node in (tree, *(child for child in tree.body if isinstance(child, ast.ClassDef))):
            text = ast.get_docstring(node)
            if text and text.isascii() and "<|" not in text:
                yield "\n\n" + text


def _pieces(words: Iterator[str], num_tokens: float, encode: Encode) -> Iterator[str]:
    """Consecutive pieces of about num_tokens tokens each; what one lacks, the next has more."""
    owed = 0.0
    while True:
        owed += num_tokens
        piece = ""
        while owed >= 1:
            step = "".join(islice(words, max(1, int(owed / 8))))
            owed -= len(encode(step))
            piece += step
        yield piece
