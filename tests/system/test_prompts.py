"""The gateway's prompts are the checkpoint's own: token for token what transformers makes."""

import copy
import json

import pytest
from transformers import PreTrainedTokenizerFast

from services.gateway.text.tokenizer import Tokenizer
from tests import demo
from tests.system import dialogs
from tests.system.prompts import prompt_of


@pytest.mark.parametrize("kind", dialogs.by_kind())
def test_a_chat_becomes_the_tokens_that_transformers_makes(kind: str) -> None:
    """A field in another place, or a space, is text the model was not trained on."""
    ours = Tokenizer(demo.CHECKPOINT)
    theirs = PreTrainedTokenizerFast.from_pretrained(demo.CHECKPOINT)

    for dialog in dialogs.by_kind()[kind]:
        messages = copy.deepcopy(dialog.messages)
        for message in messages:
            for call in message.get("tool_calls", []):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        expected = theirs.apply_chat_template(
            messages,
            tools=dialog.tools or None,
            add_generation_prompt=True,
            return_dict=False,
            **dialog.body.get("chat_template_kwargs", {}),
        )

        assert prompt_of(ours, dialog.body) == expected
