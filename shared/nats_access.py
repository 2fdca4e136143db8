"""What a NATS client is told about credentials and TLS. Knows its options, not the client."""

from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from shared.access import Access, has_login, place
from shared.errors import ConfigError

_JWT_BEGIN = "-----BEGIN NATS USER JWT-----"


def options_of(url: str, access: Access) -> dict[str, Any]:
    """Options for a connection to `url`. Raises ConfigError for what cannot be meant or read."""
    where = f"NATS at {place(url)}"
    try:
        _ = urlsplit(url).port
    except ValueError:  # what it says may hold a part of a password
        raise ConfigError(f"{where}: the URL cannot be used") from None
    if access.has_tls_files and not url.startswith("tls://"):
        raise ConfigError(f"{where}: a CA or certificate file needs tls://")
    if access.credentials_file is not None and has_login(url):
        raise ConfigError(f"{where}: credentials stand in the URL and in a file")
    context = access.client_context()
    tls = {} if context is None else {"tls": context}
    return {**tls, **_login(where, access)}


def _login(where: str, access: Access) -> dict[str, str]:
    if access.text().startswith(_JWT_BEGIN):
        if find_spec("nkeys") is None:
            raise ConfigError(f"{where}: a JWT needs the package nkeys (extra nats-jwt)")
        return {"user_credentials": str(access.credentials_file)}
    login = access.login()
    if login is None:
        return {}
    if not login.user:
        return {"token": login.secret}
    return {"user": login.user, "password": login.secret}
