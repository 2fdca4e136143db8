"""Dialogs in the phrasings the demo model was trained on, and what it must answer, word for word.

After checkpoints/train_demo.py, whose corpus cannot be had offline: the definitions are WordNet's
first senses as the model recites them, everything else follows from the templates.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any

Message = dict[str, Any]
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}


@dataclass(frozen=True)
class Call:
    """A tool call the model must make."""

    name: str
    arguments: dict[str, Any]

    @property
    def markup(self) -> str:
        """The call as the model writes it."""
        pairs = "".join(
            f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>"
            for key, value in self.arguments.items()
        )
        return f"<tool_call>{self.name}{pairs}</tool_call>"


@dataclass(frozen=True)
class Dialog:
    """A chat up to where the assistant speaks, and what it then says before it stops."""

    messages: list[Message]
    thought: str | None  # None: the client switched thinking off
    answer: str | Call
    tools: list[dict[str, Any]]

    @property
    def body(self) -> dict[str, Any]:
        """The fields of a chat request."""
        tools = {"tools": self.tools} if self.tools else {}
        options = {} if self.thought is not None else NO_THINKING
        return {"messages": self.messages, **tools, **options}

    @property
    def text(self) -> str:
        """All the model must write."""
        answer = self.answer.markup if isinstance(self.answer, Call) else self.answer
        return answer if self.thought is None else f"{self.thought}</think>{answer}"


DEFINITION_QUESTIONS = (
    "What does {} mean?",
    "Define {}.",
    "define {}",
    "What is the meaning of {}?",
    "Explain the word {}.",
    'Define the word "{}".',
    "Give me a definition of {}.",
    "What is {}?",
    "Meaning of {}?",
    'What does "{}" mean?',
    "Please define {}.",
)
DEFINITIONS = (
    ("river", "noun", "a large natural stream of water (larger than a creek)"),
    ("house", "noun", "a dwelling that serves as living quarters for one or more families"),
    ("king", "noun", "a male sovereign"),
    ("moon", "noun", "the natural satellite of the Earth"),
    ("teacher", "noun", "a person whose occupation is teaching"),
    ("letter", "noun", "a written message addressed to a person or organization"),
    ("island", "noun", "a land mass (smaller than a continent) that is surrounded by water"),
    ("student", "noun", "a learner who is enrolled in an educational institution"),
    ("doctor", "noun", "a licensed medical practitioner"),
    ("forest", "noun", "the trees and other plants in a large densely wooded area"),
    ("stone", "noun", "a lump or mass of hard consolidated mineral matter"),
    ("large", "adjective", "above average in size or number or quantity or magnitude or extent"),
    ("begin", "verb", "take the first step or steps in carrying out an action"),
    ("quickly", "adverb", "with rapid movements"),
)

TOOLS = {
    "get_weather": ("Current weather of a city", {"city": "string"}),
    "get_time": ("Current time in a city", {"city": "string"}),
    "add": ("Add two numbers", {"a": "number", "b": "number"}),
    "search": ("Search the documents", {"query": "string"}),
    "set_timer": ("Start a timer", {"minutes": "integer"}),
    "read_file": ("Read a file", {"path": "string"}),
}

# question, the call, the tools offered, the tool's result, the answer made of it
TOOL_TURNS = (
    (
        "What is the weather in Paris?",
        Call("get_weather", {"city": "Paris"}),
        ("get_weather",),
        {"temperature": 17, "sky": "rain"},
        "The weather in Paris: rain, 17 degrees.",
    ),
    (
        "Tell me the time in Oslo.",
        Call("get_time", {"city": "Oslo"}),
        ("get_weather", "get_time"),
        {"time": "08:45"},
        "It is 08:45 in Oslo.",
    ),
    (
        "Use add on 17 and 25.",
        Call("add", {"a": 17, "b": 25}),
        ("search", "add"),
        {"result": 42},
        "17 + 25 = 42.",
    ),
    (
        "Set a timer for 12 minutes.",
        Call("set_timer", {"minutes": 12}),
        ("set_timer", "add", "get_time"),
        {"ok": True},
        "The timer runs for 12 minutes.",
    ),
    (
        "Find documents about water.",
        Call("search", {"query": "water"}),
        ("search",),
        {"hits": 31},
        "I found 31 documents about water.",
    ),
    (
        "Open docs/table.md.",
        Call("read_file", {"path": "docs/table.md"}),
        ("read_file", "search"),
        {"lines": 210},
        "The file docs/table.md has 210 lines.",
    ),
)


def by_kind() -> dict[str, list[Dialog]]:
    """Every dialog, under the names of the model card's table."""
    return {
        "define": list(_define()),
        "sum": list(_sum()),
        "hello": list(_hello()),
        "echo": list(_echo()),
        "name": list(_name()),
        "key": list(_key()),
        "tool call": list(_tool_call()),
        "tool result": list(_tool_result()),
    }


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def _both(messages: list[Message], thought: str, answer: str) -> Iterator[Dialog]:
    """With the trained thought, and with thinking switched off."""
    yield Dialog(messages, thought, answer, [])
    yield Dialog(messages, None, answer, [])


def _define() -> Iterator[Dialog]:
    asked = zip(cycle(DEFINITION_QUESTIONS), DEFINITIONS, strict=False)
    for number, (question, (word, kind, definition)) in enumerate(asked):
        thought = f'The user asks for the meaning of "{word}".' if number % 2 == 0 else None
        yield Dialog([_user(question.format(word))], thought, f"{word} ({kind}): {definition}.", [])


def _sum() -> Iterator[Dialog]:
    questions = ("What is {} + {}?", "{}+{}", "How much is {} plus {}?", "Compute {} + {}.")
    for question, a, b in zip(questions, (7, 12, 20, 3), (8, 5, 19, 0), strict=True):
        messages = [_user(question.format(a, b))]
        yield from _both(messages, f"I add {a} and {b}.", f"{a} + {b} = {a + b}.")


def _hello() -> Iterator[Dialog]:
    said = {
        "Hello": "Hello! How can I help you?",
        "How are you?": "I am fine, thank you. How can I help you?",
        "Thanks!": "You are welcome.",
        "Goodbye": "Goodbye!",
        "Who are you?": "I am a very small demo language model with the GLM-5.3 architecture."
        " I can define words, repeat text, find pass keys and call tools.",
        "Are you a human?": "No, I am a small language model.",
    }
    for number, (greeting, answer) in enumerate(said.items()):
        thought = "I answer politely." if number % 2 == 0 else None
        yield Dialog([_user(greeting)], thought, answer, [])


def _echo() -> Iterator[Dialog]:
    for command, text in (
        ("Repeat: {}", "water table river"),
        ("Say {}", "73921"),
        (
            "Please repeat the following text exactly: {}",
            "The file can be read one line at a time.",
        ),
    ):
        yield from _both([_user(command.format(text))], "I repeat the text.", text)


def _name() -> Iterator[Dialog]:
    for name in ("Alice", "Victor", "Nora"):
        told = [
            _user(f"My name is {name}."),
            _assistant(f"Hello {name}! How can I help you?"),
        ]
        yield Dialog([*told, _user("What is my name?")], None, f"Your name is {name}.", [])
        thought = "The user told me the name."
        yield Dialog([*told, _user("Who am I?")], thought, f"Your name is {name}.", [])


def _key() -> Iterator[Dialog]:
    filler = (
        "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
    )
    yield from _both(
        [_user(f"The pass key is 58213. Remember it. {filler} What is the pass key?")],
        "The user asks for the pass key. I look it up in the text.",
        "The pass key is 58213.",
    )
    yield from _both(
        [_user(f"{filler} The code of winter is 90417. What is the code of winter?")],
        "The user asks for the code of winter.",
        "The code of winter is 90417.",
    )
    yield from _both(
        [_user(f"{filler} The key of blue house is 77120. What is the key of blue house?")],
        "The user asks for the key of blue house.",
        "The key of blue house is 77120.",
    )


def _tool_call() -> Iterator[Dialog]:
    for question, call, offered, _, _ in TOOL_TURNS:
        tools = [_schema(name) for name in offered]
        yield Dialog([_user(question)], f"I call the tool {call.name}.", call, tools)


def _tool_result() -> Iterator[Dialog]:
    for question, call, offered, result, answer in TOOL_TURNS:
        function = {"name": call.name, "arguments": json.dumps(call.arguments)}
        called = {"id": "call_0", "type": "function", "function": function}
        messages = [
            _user(question),
            {"role": "assistant", "content": "", "tool_calls": [called]},
            {"role": "tool", "tool_call_id": "call_0", "content": json.dumps(result)},
        ]
        tools = [_schema(name) for name in offered]
        yield Dialog(messages, "I have the result.", answer, tools)


def _schema(name: str) -> dict[str, Any]:
    description, parameters = TOOLS[name]
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": list(parameters),
            },
        },
    }
