"""The checkpoint's text side against transformers, and what is said when a file is missing."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from services.gateway.text.tokenizer import Tokenizer
from shared import block_hash
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


def test_a_run_that_nothing_splits_is_refused(tokenizer: Tokenizer) -> None:
    """It takes a hundred times its size of memory, and everything else waits for it."""
    with pytest.raises(BadRequest, match="1048576 characters"):
        tokenizer.encode_bytes("<|user|>" + "=" * 1_100_000)
    with pytest.raises(BadRequest, match="1048576 characters"):
        tokenizer.surely_exceeds("=" * 1_100_000, 200_000)
    assert tokenizer.encode_bytes("= 1 " * 300_000)


def test_ids_come_in_wire_form_and_as_numbers(tokenizer: Tokenizer) -> None:
    """A million Python integers are not needed to send them on."""
    text = "[gMASK]<sop><|user|>Ünïcode 한국 " + "and more words. \n" * 3000

    ids = tokenizer.encode(text)

    assert ids == tokenizer.encode(text, "another tenant")
    assert tokenizer.encode_bytes(text) == block_hash.token_bytes(ids)
    assert tokenizer.encode_bytes("") == b""


def test_a_token_is_told_by_name_and_by_its_bytes(tokenizer: Tokenizer) -> None:
    """A control token has a name but adds no text; half a code point has bytes but no name."""
    user, think = tokenizer.encode("<|user|><think>")
    first, *_ = tokenizer.encode("한")

    assert (tokenizer.token_text(user), tokenizer.token_bytes(user)) == ("<|user|>", b"")
    assert (tokenizer.token_text(think), tokenizer.token_bytes(think)) == ("<think>", b"<think>")
    assert tokenizer.token_text(first) == "\ufffd"
    assert "한".encode().startswith(tokenizer.token_bytes(first))


def test_ids_become_text_with_or_without_control_tokens(tokenizer: Tokenizer) -> None:
    """What /detokenize gives."""
    text = "<|user|>한국 a</think>"
    ids = tokenizer.encode(text)

    assert tokenizer.decode(ids, skips_special=False) == text
    assert tokenizer.decode(ids, skips_special=True) == "한국 a</think>"
    for outside in (-1, 4096):
        with pytest.raises(BadRequest, match=f"{outside} is not in the vocabulary"):
            tokenizer.decode([1, outside], skips_special=True)


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
