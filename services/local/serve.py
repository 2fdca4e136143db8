"""`farspan serve`: the embedded default, everything on this machine."""

import asyncio
import json
import os
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path

from services.local.plan import Options
from services.local.stack import Stack
from shared.lifecycle import Stopping


async def serve(options: Options, stopping: Stopping) -> None:
    """Run a stack until asked to stop. Raises StackFailed if it cannot be kept running."""
    running = asyncio.create_task(_run(options))
    asked = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait((running, asked), return_when=asyncio.FIRST_COMPLETED)
    finally:
        asked.cancel()
        if not running.done():
            _say("Stopping.")
            running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    _say("Stopped: no process is left.")


async def _run(options: Options) -> None:
    started_s = time.monotonic()
    async with Stack(options, _say) as stack:
        _say(_welcome(stack, options.checkpoint.resolve().name, time.monotonic() - started_s))
        await stack.keep()


def _welcome(stack: Stack, model: str, elapsed_s: float) -> str:
    body = json.dumps(
        {"model": model, "messages": [{"role": "user", "content": "What does river mean?"}]}
    )
    logs = "\n".join(f"  {name:<10} {stack.log(name)}" for name in stack.children)
    port = "" if stack.port == 8000 else f" --port {stack.port}"
    farspan = _program()
    return f"""
Serving {model} at {stack.base_url} after {elapsed_s:.1f} s. Try:

  curl {stack.base_url}/chat/completions -H 'Content-Type: application/json' \\
    -d '{body}'

  {farspan} chat{port}      talk in this terminal
  {farspan} status{port}    services, workers, pools

Logs:
{logs}
"""


def _program() -> str:
    """What to type for this program here: a virtual environment need not be on the PATH."""
    script = Path(sys.executable).with_name("farspan")
    if not script.exists():
        return f"{os.path.relpath(sys.executable)} -m services.local"
    return "farspan" if shutil.which("farspan") == str(script) else os.path.relpath(script)


def _say(text: str) -> None:
    print(text, flush=True)
