"""Where a browser says a request comes from, and where it thinks it goes. Pure.

A page on the web can make a browser send requests to a gateway that only the browser can reach: by
its address, which Origin tells, or by a name that its owner points there (DNS rebinding), which
only Host tells.
"""

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

_PORTS = {"http": 80, "https": 443}


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens at `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_own_host(host: str, names: Collection[str]) -> bool:
    """Whether a Host header names us as nobody else can: an address, localhost, one of `names`."""
    name = _split(f"//{host}")[0]
    if name in names or name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_own_origin(origin: str, host: str, names: Collection[str]) -> bool:
    """Whether an Origin header names the site that the Host header names, or one of `names`."""
    name, port = _split(origin)
    if not name:
        return False  # "null": a file, a sandboxed frame
    if name in names:
        return True
    default = _PORTS.get(urlsplit(origin).scheme)
    host_name, host_port = _split(f"//{host}")
    return (name, port or default) == (host_name, host_port or default)


def _split(url: str) -> tuple[str, int | None]:
    """Name and port; no name where it cannot be read."""
    try:
        parts = urlsplit(url)
        return parts.hostname or "", parts.port
    except ValueError:
        return "", None
