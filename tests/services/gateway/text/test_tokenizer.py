"""The checkpoint's text side against transformers, and what is said when a file is missing."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from services.gateway.text.tokenizer import Tokenizer
from shared.errors import BadRequest, ConfigError

CHECKPOINT = Path(__file__).parents[4] / "checkpoints" / "demo-fp8"

TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Wetter für <b>", "parameters": {}},
}
CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "What does river mean?"}]},
    {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "image_url"}]},
            {"role": "assistant", "content": "a</think>b", "reasoning_content": "r"},
            {"role": "user", "content": "Ünïcode 한국"},
        ],
        "reasoning_effort": "low",
    },
    {
        "messages": [
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"function": {"name": "get_weather", "arguments": {"days": [1]}}}],
            },
            {"role": "tool", "content": '{"sky": "rain"}'},
            {"role": "tool", "content": "more"},
        ],
        "tools": [TOOL],
        "enable_thinking": False,
    },
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(CHECKPOINT)


@pytest.mark.parametrize("chat", CHATS)
def test_prompts_equal_those_of_transformers(tokenizer: Tokenizer, chat: dict[str, Any]) -> None:
    """The model was trained on exactly that text; one newline more is another prompt."""
    from transformers import PreTrainedTokenizerFast

    oracle = PreTrainedTokenizerFast.from_pretrained(CHECKPOINT)
    options = {name: value for name, value in chat.items() if name not in ("messages", "tools")}

    text = tokenizer.render(chat["messages"], chat.get("tools"), options)

    expected = oracle.apply_chat_template(
        chat["messages"], chat.get("tools"), add_generation_prompt=True, tokenize=False, **options
    )
    assert text == expected
    assert tokenizer.encode(text) == oracle.encode(text, add_special_tokens=False)


def test_the_checkpoint_names_stops_limits_and_sampling(tokenizer: Tokenizer) -> None:
    """Defaults are the model's, not ours."""
    checkpoint = tokenizer.checkpoint

    assert checkpoint.stop_token_ids == (4076, 4083, 4085)
    assert checkpoint.max_context_tokens == 1048576
    assert (checkpoint.temperature, checkpoint.top_p, checkpoint.top_k) == (0.6, 0.9, 0)


def test_a_text_far_too_long_is_found_out_early(tokenizer: Tokenizer) -> None:
    """And one that fits is never taken for longer."""
    text = "A word and another one. " * 20_000
    num_tokens = len(tokenizer.encode(text))

    assert tokenizer.surely_exceeds(text, num_tokens // 2)
    assert not tokenizer.surely_exceeds(text, num_tokens)
    assert tokenizer.surely_exceeds("=" * 30_000_000, 65_536)
    assert not tokenizer.surely_exceeds(" " * 500_000, len(tokenizer.encode(" " * 500_000)))


def test_a_template_cannot_touch_what_it_is_given(tmp_path: Path) -> None:
    """A checkpoint is somebody else's program."""
    attack = "{{ messages.append(1) }}{{ ''.__class__.__mro__ }}"
    tokenizer = Tokenizer(copy_with(tmp_path, "chat_template.jinja", attack))

    with pytest.raises(BadRequest, match="chat template"):
        tokenizer.render([{"role": "user", "content": "x"}], None, {})


def test_a_template_may_refuse_a_chat(tmp_path: Path) -> None:
    """`raise_exception` is how templates say so."""
    tokenizer = Tokenizer(
        copy_with(tmp_path, "chat_template.jinja", "{{ raise_exception('no system turns') }}")
    )

    with pytest.raises(BadRequest, match="no system turns"):
        tokenizer.render([], None, {})


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "chat_template.jinja"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    """The operator must be able to repair it."""
    folder = copy_with(tmp_path, name, "")
    (folder / name).unlink()

    with pytest.raises(ConfigError, match=name):
        Tokenizer(folder)


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("config.json", "{", "not valid JSON"),
        ("config.json", "[]", "JSON object"),
        ("config.json", "{}", "max_position_embeddings"),
        ("tokenizer.json", json.dumps({"decoder": {"type": "WordPiece"}}), "byte-level"),
        ("chat_template.jinja", "{% if %}", "chat_template.jinja line 1"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, name: str, content: str, complaint: str) -> None:
    """So is what is wrong in it."""
    with pytest.raises(ConfigError, match=complaint):
        Tokenizer(copy_with(tmp_path, name, content))


def copy_with(folder: Path, name: str, content: str) -> Path:
    """The checkpoint's small files, one of them replaced."""
    for path in CHECKPOINT.iterdir():
        if path.suffix in (".json", ".jinja"):
            shutil.copy(path, folder)
    (folder / name).write_text(content)
    return folder
