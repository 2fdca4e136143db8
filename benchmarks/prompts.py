"""Prompts of real English: docstrings of the running Python's library."""

from pathlib import Path

from tokenizers import Tokenizer

from tests.system.pass_keys import docstrings


def text_prompts(checkpoint: Path, num_prompts: int, num_tokens: int) -> list[list[int]]:
    """Different prompts of exactly num_tokens tokens each."""
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    prompts: list[list[int]] = []
    token_ids: list[int] = []
    for text in docstrings():
        token_ids += tokenizer.encode(text, add_special_tokens=False).ids
        while len(token_ids) >= num_tokens:
            prompts.append(token_ids[:num_tokens])
            del token_ids[:num_tokens]
            if len(prompts) == num_prompts:
                return prompts
    raise ValueError(f"the library's docstrings do not fill {num_prompts} x {num_tokens} tokens")
