"""LiteLLM as a library: what it is told, as one line of JSON.

Run by the interpreter that has it. Arguments: the root URL, the key, the model.
"""

import json
import sys
from typing import Any

import litellm

ROOT, KEY, MODEL = sys.argv[1:4]
QUESTION = [{"role": "user", "content": "What does river mean?"}]
PROVIDERS = {"openai": f"{ROOT}/v1", "anthropic": ROOT}


def completions(provider: str) -> dict[str, Any]:
    """A chat through one provider's API, whole and streamed."""
    asked: dict[str, Any] = {
        "model": f"{provider}/{MODEL}",
        "api_base": PROVIDERS[provider],
        "api_key": KEY,
        "messages": QUESTION,
        "max_tokens": 200,
        "temperature": 0,
        "num_retries": 0,
        "timeout": 300,
    }
    whole = litellm.completion(**asked)
    chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
    streamed = litellm.stream_chunk_builder(chunks, messages=QUESTION)
    return {"whole": told(whole), "streamed": told(streamed)}


def told(response: Any) -> dict[str, Any]:
    """What both ways must agree on."""
    (choice,) = response.choices
    return {
        "text": choice.message.content,
        "reason": choice.finish_reason,
        "tokens": response.usage.completion_tokens,
    }


def main() -> None:
    """Write everything as one line."""
    response = litellm.responses(
        model=f"openai/{MODEL}",
        api_base=PROVIDERS["openai"],
        api_key=KEY,
        input="What does river mean?",
        max_output_tokens=200,
        temperature=0,
    )
    heard = {
        **{provider: completions(provider) for provider in PROVIDERS},
        "response": {"status": response.status, "kinds": [item.type for item in response.output]},
    }
    sys.stdout.write(json.dumps(heard) + "\n")


if __name__ == "__main__":
    main()
