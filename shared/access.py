"""How a process shows a server who it is, and whom it trusts: one set of files for each server.

Secrets are read from files and never stand in a message. Knows neither NATS, Redis nor gRPC.
"""

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from shared.errors import ConfigError


class Login(NamedTuple):
    """What opens a door: a user's password, or a token alone (no user)."""

    user: str
    secret: str


@dataclass(frozen=True)
class Access:
    """The files for one server, read from <NAME>_CREDENTIALS_FILE and so on; each may be absent."""

    credentials_file: Path | None = None  # one line: `user:password`, or a token alone
    ca_file: Path | None = None  # who may vouch for the other side; else those the system trusts
    cert_file: Path | None = None  # our own certificate chain, PEM,
    key_file: Path | None = None  # and its key

    def __post_init__(self) -> None:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("a certificate file and a key file come together")

    @property
    def has_tls_files(self) -> bool:
        """Whether any file is about TLS."""
        return self.ca_file is not None or self.cert_file is not None

    def text(self) -> str:
        """What the credentials file holds; empty without one. Raises ConfigError."""
        if self.credentials_file is None:
            return ""
        text = read(self.credentials_file).decode(errors="replace").strip()
        if not text:
            raise ConfigError(f"the credentials file {self.credentials_file} is empty")
        return text

    def login(self) -> Login | None:
        """What the credentials file says; None without one. Raises ConfigError."""
        text = self.text()
        if len(text.splitlines()) > 1:
            raise ConfigError(f"the credentials file {self.credentials_file} is not one line")
        first, colon, rest = text.partition(":")
        if not text:
            return None
        return Login(first, rest) if colon else Login("", text)

    def client_context(self) -> ssl.SSLContext | None:
        """TLS as a client speaks it; None without files about TLS. Raises ConfigError."""
        if not self.has_tls_files:
            return None
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
            if self.cert_file is not None:
                context.load_cert_chain(self.cert_file, self.key_file)
        except (OSError, ssl.SSLError) as error:
            files = ", ".join(map(str, filter(None, (self.ca_file, self.cert_file, self.key_file))))
            raise ConfigError(f"cannot use for TLS: {files}: {error.strerror or error}") from error
        return context


ANONYMOUS = Access()


def read(path: Path) -> bytes:
    """A file's content. Raises ConfigError that names it."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error


def place(url: str) -> str:
    """Host and port of a URL, as far as they can be told without any part of a password."""
    _, at, after = url.rpartition("@")
    if at:
        return after.partition("/")[0]
    return urlsplit(url).netloc or "the given URL"


def has_login(url: str) -> bool:
    """Whether credentials stand in a URL."""
    return "@" in url
