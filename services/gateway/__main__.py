"""The gateway's process: `python -m services.gateway`, settings from GATEWAY_*."""

import logging
import os
import sys

from services.gateway.app import serve
from services.gateway.config import GatewayConfig
from shared import config, lifecycle, telemetry

logger = logging.getLogger(__name__)

# A loop gives the interpreter away at every write to a socket, and gets it back after this long
# from a thread that renders and hashes a million tokens: 16 streams waited 22 ms in all with 1 ms.
_SWITCH_S = 0.0002


async def main(stopping: lifecycle.Stopping) -> None:
    """Serve until the process is asked to stop."""
    settings = config.load(GatewayConfig, os.environ, "GATEWAY_")
    with telemetry.configure(
        "gateway", trace_file=settings.trace_file, otlp_endpoint=settings.otlp_endpoint
    ):
        async with serve(settings) as serving:
            logger.info("serving %s on port %d", settings.model_name, serving.port)
            lifecycle.freeze_startup()
            sys.setswitchinterval(_SWITCH_S)
            await stopping.wait()


if __name__ == "__main__":
    sys.exit(lifecycle.run("gateway", main))
