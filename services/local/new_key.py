"""`farspan new-key`: a key for whoever will bear it, and an entry for the file of keys."""

import sys

from services.gateway.door.keys import new_key
from shared.errors import ConfigError


def print_new_key(name: str, tenant: str) -> int:
    """Print a fresh key, the only time it is ever seen, and its entry. Raises ConfigError.

    The key goes to stderr, so that stdout can be appended to the file.
    """
    try:
        key, entry = new_key(name, tenant)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    sys.stderr.write(f"The key of {name}, shown this once and kept nowhere:\n\n  {key}\n\n")
    print(entry)
    return 0
