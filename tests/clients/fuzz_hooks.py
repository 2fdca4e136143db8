"""What schemathesis loads: sends half the cases past the parsers, keeps answers short, and writes
down how every case was answered.

Runs inside schemathesis, which has nothing of this project.
"""

import atexit
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import schemathesis

# A case that asks for 30,000 tokens gets them, ten minutes later; what it would show is shown by 4.
_MOST_TOKENS = 4
_LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_CONTEXT = 1 << 20  # longer than any context: refused, and left as it is
# No generated conversation makes sense, so every second case gets one; all else stays as generated.
_MODEL = os.environ["FUZZ_MODEL"]
_MESSAGES = [{"role": "user", "content": "What does river mean?"}]
_CHAT = {"model": _MODEL, "messages": _MESSAGES}
_SENSE = {
    "POST /v1/chat/completions": _CHAT,
    "POST /v1/completions": {"model": _MODEL, "prompt": "A river is"},
    "POST /v1/responses": {"model": _MODEL, "input": "What does river mean?"},
    "POST /v1/messages": _CHAT,
    "POST /v1/messages/count_tokens": _CHAT,
}

_statuses: Counter[str] = Counter()
_turns: Counter[str] = Counter()


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Give every second case of an operation a conversation; shorten what would be generated."""
    if not isinstance(case.body, dict):
        return
    label = case.operation.label
    _turns[label] += 1
    if _turns[label] % 2:
        case.body.update(_SENSE.get(label, {}))
    for name in _LENGTHS:
        value = case.body.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            case.body[name] = _MOST_TOKENS if _MOST_TOKENS < value < _CONTEXT else value


@schemathesis.hook
def after_call(context: Any, case: Any, response: Any) -> None:
    """Count an answer."""
    _statuses[f"{case.operation.label} {response.status_code}"] += 1


@atexit.register
def _write() -> None:
    Path(os.environ["FUZZ_STATUSES"]).write_text(json.dumps(dict(sorted(_statuses.items()))))
