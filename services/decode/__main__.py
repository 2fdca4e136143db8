"""A decode worker's process: `python -m services.decode`, settings from DECODE_*."""

import logging
import os
import sys

from services.decode.config import DecodeConfig
from shared import config, lifecycle, telemetry
from shared.engine import compute_threads

logger = logging.getLogger(__name__)


async def main(stopping: lifecycle.Stopping) -> None:
    """Serve until the process is asked to stop."""
    settings = config.load(DecodeConfig, os.environ, "DECODE_")
    compute_threads.calm_openmp(os.environ)
    compute_threads.settle(settings.threads)
    from services.decode import app  # it loads torch, after calm_openmp

    with telemetry.configure(
        "decode", trace_file=settings.trace_file, otlp_endpoint=settings.otlp_endpoint
    ):
        async with app.serve(settings):
            lifecycle.freeze_startup()
            await stopping.wait()


if __name__ == "__main__":
    sys.exit(lifecycle.run("decode", main))
