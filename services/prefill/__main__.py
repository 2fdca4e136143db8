"""The prefill worker's process: python -m services.prefill."""

import os
import sys

from services.prefill import app
from services.prefill.config import PrefillConfig
from shared import config, lifecycle, telemetry
from shared.lifecycle import Stopping


async def main(stopping: Stopping) -> None:
    """Serve until asked to stop, then drain."""
    settings = config.load(PrefillConfig, os.environ, "PREFILL_")
    with telemetry.configure(
        "prefill", trace_file=settings.trace_file, otlp_endpoint=settings.otlp_endpoint
    ):
        async with app.serve(settings):
            lifecycle.freeze_startup()
            await stopping.wait()


if __name__ == "__main__":
    sys.exit(lifecycle.run("prefill", main))
