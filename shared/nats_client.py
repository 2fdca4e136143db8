"""The NATS client as the bus wants it: careful with credentials, and quiet while it retries."""

import logging

import nats.errors
from nats.aio.client import Client

logger = logging.getLogger(__name__)


class SafeClient(Client):
    """The client, which says nothing to a server that should speak TLS and does not."""

    def _connect_command(self) -> bytes:
        """The first words to a server: they hold the credentials."""
        assert self._current_server is not None
        is_tls_wanted = self._current_server.uri.scheme == "tls"
        if is_tls_wanted and not self._server_info.get("tls_required"):
            raise nats.errors.Error("nats: the server does not speak TLS")
        return super()._connect_command()


class Watch:
    """Turns the client's callbacks into few log lines: while it retries it repeats itself."""

    def __init__(self) -> None:
        self.last_error = ""
        self.is_started = False  # before that, `connect` tells what fails
        self.is_closing = False

    async def failed(self, error: Exception) -> None:
        """The client's error_cb."""
        if isinstance(error, nats.errors.SlowConsumerError):
            logger.error("a handler is too slow, a message on %s was dropped", error.subject)
        elif str(error) != self.last_error:
            self.last_error = str(error)
            if self.is_started:
                logger.warning("NATS: %s", error)

    async def disconnected(self) -> None:
        """The client's disconnected_cb."""
        if not self.is_closing:
            logger.warning("NATS: connection lost, reconnecting")

    async def reconnected(self) -> None:
        """The client's reconnected_cb."""
        self.last_error = ""
        logger.info("NATS: connected again")
