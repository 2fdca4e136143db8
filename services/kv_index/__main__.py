"""The kv_index process: python -m services.kv_index."""

import os
import sys

from services.kv_index import app
from services.kv_index.config import KvIndexConfig
from shared import config, lifecycle, telemetry
from shared.lifecycle import Stopping


async def main(stopping: Stopping) -> None:
    """Serve until asked to stop."""
    settings = config.load(KvIndexConfig, os.environ, "KV_INDEX_")
    with telemetry.configure(
        "kv_index", trace_file=settings.trace_file, otlp_endpoint=settings.otlp_endpoint
    ):
        async with app.serve(settings):
            lifecycle.freeze_startup()
            await stopping.wait()


if __name__ == "__main__":
    sys.exit(lifecycle.run("kv_index", main))
