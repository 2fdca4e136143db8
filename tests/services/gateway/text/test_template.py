"""The chat template is a stranger's program, and its options are strangers' data."""

from pathlib import Path
from typing import Any

import pytest

from services.gateway.text.spellings import MARK
from services.gateway.text.template import Template
from shared.errors import BadRequest, ConfigError

CHECKPOINT = Path(__file__).parents[4] / "checkpoints" / "demo-fp8"
MESSAGES = [{"role": "user", "content": "x"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def template(folder: Path, text: str) -> Template:
    (folder / "chat_template.jinja").write_text(text)
    return Template(folder)


@pytest.mark.parametrize("value", [None, 0, -1.5, "x" * 10_000, [[[]]], {"a": {"b": 1}}, True, []])
@pytest.mark.parametrize(
    "name", ["enable_thinking", "reasoning_effort", "clear_thinking", "namespace", "loop", "dict"]
)
def test_no_option_of_a_client_can_break_the_checkpoints_template(name: str, value: Any) -> None:
    """A prompt no longer than what was sent, or a refusal."""
    try:
        text = Template(CHECKPOINT).render(MESSAGES, [TOOL], {name: value})
    except BadRequest as error:
        assert "chat template" in str(error)
    else:
        assert len(text) < 11_000


def test_options_cannot_take_the_place_of_messages_and_tools(tmp_path: Path) -> None:
    """What was checked is what is rendered."""
    shows = template(tmp_path, "{{ messages[0].content }} {{ tools }}")

    assert shows.render(MESSAGES, None, {"messages": [], "tools": [1]}) == "x None"


def test_it_cannot_touch_what_it_is_given(tmp_path: Path) -> None:
    """Nor reach Python through it."""
    for attack in ("{{ messages.append(1) }}", "{{ ''.__class__.__mro__[0] }}"):
        with pytest.raises(BadRequest, match="chat template"):
            template(tmp_path, attack).render(MESSAGES, None, {})


@pytest.mark.parametrize(
    "text", ["{{ raise_exception('no system turns') }}", "{{ 1 // n }}", "{{ [].pop() }}"]
)
def test_it_may_refuse_a_chat_or_fail_over_it(tmp_path: Path, text: str) -> None:
    """`raise_exception` is how templates say so; any other failure is the chat's too."""
    with pytest.raises(BadRequest, match="cannot render these messages"):
        template(tmp_path, text).render([], None, {"n": 0})


def test_marks_stay_marks_in_json_and_out_of_errors(tmp_path: Path) -> None:
    """No client ever sees one; a lone surrogate could not be sent."""
    words = f"<{MARK}|user|> \U0001f642 é \\ud800"
    shows = template(tmp_path, "{{ x | tojson(ensure_ascii=True) }}{{ x | tojson }}")

    assert shows.render([], None, {"x": words}) == (
        f'"<{MARK}|user|> \\ud83d\\ude42 \\u00e9 \\\\ud800""<{MARK}|user|> \U0001f642 é \\\\ud800"'
    )
    with pytest.raises(BadRequest, match=r"messages: <\|user\|> "):
        template(tmp_path, "{{ raise_exception(x) }}").render([], None, {"x": words})


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    """The operator must be able to repair it."""
    with pytest.raises(ConfigError, match=r"chat_template\.jinja: No such file"):
        Template(tmp_path)
    with pytest.raises(ConfigError, match=r"chat_template\.jinja line 1"):
        template(tmp_path, "{% if %}")
