"""How many values a body may hold, counted before it is parsed.

A parser keeps every other thread waiting while it makes objects: 32 MB of empty ones take seconds.
Counting does that for milliseconds at a time. Texts of any length cost nothing here.
"""

import re

from services.gateway.dialects.bounds import MAX_PROMPT_TOKENS
from services.gateway.failures import InvalidRequest

MAX_PARTS = 1 << 19  # objects, arrays, fields and texts: parsed in 40 ms, far beyond any context
_FEW = 1 << 18  # so many of anything need no closer look
_STRIDE = 1 << 20  # bytes, searched in less than a millisecond
_WITHIN_TEXT = re.compile(rb'(?:[^"\\]{1,4096}+|\\.){1,64}+', re.DOTALL)


def refuse_intricate(body: bytes, where: str = "the body", param: str | None = None) -> None:
    """Raise InvalidRequest for JSON that holds more values than a request can need."""
    num_parts, num_commas = _counts(body, 0, len(body))
    if num_parts + num_commas <= _FEW:
        return
    # Some of them are in texts.
    num_parts = num_commas = at = 0
    while at < len(body):
        quote = body.find(b'"', at)
        end = len(body) if quote < 0 else quote
        more_parts, more_commas = _counts(body, at, end)
        num_parts += more_parts + 1
        num_commas += more_commas
        if num_parts > MAX_PARTS or num_commas > MAX_PARTS + MAX_PROMPT_TOKENS:
            raise InvalidRequest(
                f"{where} holds more than {MAX_PARTS} objects, arrays, fields and texts, or more"
                f" than {MAX_PARTS + MAX_PROMPT_TOKENS} values",
                param=param,
                code="invalid_value",
            )
        at = _text_end(body, end + 1)


def _counts(body: bytes, start: int, end: int) -> tuple[int, int]:
    """Objects, arrays and fields; commas."""
    num_parts = num_commas = 0
    for begin in range(start, end, _STRIDE):
        stop = min(end, begin + _STRIDE)
        num_parts += body.count(b"[", begin, stop) + body.count(b"{", begin, stop)
        num_parts += body.count(b":", begin, stop)
        num_commas += body.count(b",", begin, stop)
    return num_parts, num_commas


def _text_end(body: bytes, start: int) -> int:
    """Where a text ends that begins there: behind its quote."""
    while found := _WITHIN_TEXT.match(body, start):
        start = found.end()
    return start + 1
