"""The model card's promises through the whole stack, asked with the `openai` client.

test_model_card.py asks the engine alone.
"""

import json
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from openai.types.chat import ChatCompletion

from tests import demo
from tests.system import dialogs, pass_keys
from tests.system.dialogs import Call, Dialog
from tests.system.pass_keys import Question

MODEL = demo.CHECKPOINT.name
BLOCK_TOKENS = 64


def ask(client: openai.OpenAI, body: dict[str, object]) -> ChatCompletion:
    """A greedy answer."""
    options = {"chat_template_kwargs": body.get("chat_template_kwargs", {})}
    known = {name: body[name] for name in ("messages", "tools") if name in body}
    return client.chat.completions.create(
        model=MODEL, temperature=0, max_tokens=120, extra_body=options, **known
    )


def said(completion: ChatCompletion) -> tuple[str | None, str | Call, str]:
    """Thought, answer, and why it ended."""
    (choice,) = completion.choices
    answer: str | Call = choice.message.content or ""
    if choice.message.tool_calls:
        (call,) = choice.message.tool_calls
        answer = Call(call.function.name, json.loads(call.function.arguments))
    thought = getattr(choice.message, "reasoning_content", None)
    return thought, answer, choice.finish_reason


def expected(dialog: Dialog) -> tuple[str | None, str | Call, str]:
    reason = "tool_calls" if isinstance(dialog.answer, Call) else "stop"
    return dialog.thought, dialog.answer, reason


@pytest.mark.parametrize("kind", dialogs.by_kind())
def test_dialogs_are_answered_as_trained_and_end_by_themselves(
    client: openai.OpenAI, kind: str
) -> None:
    """Asked together: answers do not depend on who else is served."""
    asked = dialogs.by_kind()[kind]

    with ThreadPoolExecutor(len(asked)) as pool:
        completions = list(pool.map(lambda dialog: ask(client, dialog.body), asked))

    assert list(map(said, completions)) == list(map(expected, asked))


def test_pass_keys_are_found_in_4096_tokens(client: openai.OpenAI) -> None:
    """The first question's prompt is computed, the other 24 begin with a prefix hit."""
    encode = demo.tokenizer().encode
    hidden = pass_keys.hide(
        4096, "docstrings", lambda text: encode(text, add_special_tokens=False).ids
    )

    def answer(question: Question) -> ChatCompletion:
        return ask(client, hidden.body(question))

    first, *others = hidden.questions
    completions = [answer(first)]
    with ThreadPoolExecutor(4) as pool:
        completions += pool.map(answer, others)

    num_right = sum(
        said(completion)[1:] == (question.answer, "stop")
        for completion, question in zip(completions, hidden.questions, strict=True)
    )
    assert num_right >= 23
    for completion in completions[1:]:
        assert completion.usage is not None
        assert completion.usage.prompt_tokens_details is not None
        assert completion.usage.prompt_tokens_details.cached_tokens == 4096
