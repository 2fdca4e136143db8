"""Picks the logprobs of an answer's text from those of all its tokens. Pure."""

from collections.abc import Sequence

from services.gateway.ask import Json
from services.gateway.dialects.usage_objects import chat_logprob
from services.gateway.text.answer import TokenLogprob
from services.gateway.text.calls import CALL_END, CALL_START
from services.gateway.text.glm import THINK_END


class TextLogprobs:
    """Text may be held back after its tokens were taken in, so their logprobs wait for it here."""

    def __init__(self) -> None:
        self._waiting: list[Json] = []
        self._is_in_call = False

    def take(self, found: Sequence[TokenLogprob]) -> None:
        """The logprobs of the next tokens."""
        for each in found:
            if each.token == THINK_END:
                self._waiting.clear()
            elif each.token in (CALL_START, CALL_END):
                self._is_in_call = each.token == CALL_START
            elif not self._is_in_call:
                self._waiting.append(chat_logprob(each))

    def give(self) -> list[Json]:
        """Those that waited for the text that is there now."""
        given, self._waiting = self._waiting, []
        return given
