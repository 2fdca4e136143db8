"""What the model card promises, kept by the aggregated engine with FP8 weights and FP8 KV.

test_model_card_served.py asks the same of the whole stack: when both fail, the engine is wrong.
"""

import pytest

from services.gateway.text.tokenizer import Tokenizer
from shared.engine.step import Sampling
from tests import demo
from tests.system import dialogs, pass_keys
from tests.system.dialogs import Dialog
from tests.system.pass_keys import Filler, Question
from tests.system.prompts import prompt_of

KV_FORMAT = "fp8_ds_mla"
MAX_NEW_TOKENS = 120


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(demo.CHECKPOINT)


def written(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    """The text of an answer; it must have ended by itself."""
    assert token_ids[-1] in tokenizer.checkpoint.stop_token_ids
    return demo.tokenizer().decode(token_ids[:-1], skip_special_tokens=False)


@pytest.mark.parametrize("kind", dialogs.by_kind())
def test_dialogs_are_answered_as_trained_and_end_by_themselves(
    tokenizer: Tokenizer, kind: str
) -> None:
    def answer(dialog: Dialog) -> str:
        prompt = prompt_of(tokenizer, dialog.body)
        reference = demo.reference(len(prompt) + MAX_NEW_TOKENS, KV_FORMAT)
        stop_ids = tokenizer.checkpoint.stop_token_ids
        return written(tokenizer, reference.answer(prompt, stop_ids, MAX_NEW_TOKENS))

    asked = dialogs.by_kind()[kind]

    assert [answer(dialog) for dialog in asked] == [dialog.text for dialog in asked]


@pytest.mark.parametrize("filler", ["docstrings", "repeated sentences"])
def test_pass_keys_are_found_in_4096_tokens(tokenizer: Tokenizer, filler: Filler) -> None:
    """25 questions about one text, which is computed once and continued from by each question."""
    hidden = pass_keys.hide(4096, filler, tokenizer.encode)
    stop_ids = tokenizer.checkpoint.stop_token_ids
    prompts = [prompt_of(tokenizer, hidden.body(question)) for question in hidden.questions]
    reference = demo.reference(4096 + 192, KV_FORMAT)
    reference.prefill(prompts[0], 512, Sampling())

    def is_right(prompt: list[int], question: Question) -> bool:
        answer = tokenizer.encode(question.answer)
        *would, end = reference.would_answer(prompt, answer, num_cached=4096)
        return would == answer and end in stop_ids

    assert sum(map(is_right, prompts, hidden.questions)) >= 23
