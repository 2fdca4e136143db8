"""Reasoning as an opaque text that clients carry from turn to turn.

No secret: it says only that a client is to hand it back as it is, so that the model sees what it
thought before, and the prompt's prefix stays the same.
"""

import base64
import binascii

_MARK = "farspan-1."


def seal(text: str) -> str:
    """The text, made opaque."""
    return _MARK + base64.urlsafe_b64encode(text.encode()).decode()


def unseal(sealed: str) -> str | None:
    """The text again; None for what was not sealed here."""
    if not sealed.startswith(_MARK):
        return None
    try:
        return base64.b64decode(sealed.removeprefix(_MARK), b"-_", validate=True).decode()
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return None
