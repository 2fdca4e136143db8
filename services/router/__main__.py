"""The router process: python -m services.router."""

import os
import sys

from services.router import app
from services.router.config import RouterConfig
from shared import config, lifecycle, telemetry
from shared.lifecycle import Stopping


async def main(stopping: Stopping) -> None:
    """Serve until asked to stop."""
    settings = config.load(RouterConfig, os.environ, "ROUTER_")
    with telemetry.configure(
        "router", trace_file=settings.trace_file, otlp_endpoint=settings.otlp_endpoint
    ):
        async with app.serve(settings):
            lifecycle.freeze_startup()
            await stopping.wait()


if __name__ == "__main__":
    sys.exit(lifecycle.run("router", main))
