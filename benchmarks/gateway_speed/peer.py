"""LiteLLM's proxy in an environment of its own, the version that the clients' tests use."""

import subprocess
import sys
from pathlib import Path

from benchmarks.report import ROOT, progress

_FOLDER = ROOT / ".bench" / "litellm"
_REQUIREMENTS = ROOT / "tests" / "clients" / "requirements-litellm-proxy.txt"


def program() -> Path:
    """The proxy's command; the first time it is installed, which takes some minutes."""
    installed = _FOLDER / "requirements.txt"
    wanted = _REQUIREMENTS.read_text()
    if not installed.exists() or installed.read_text() != wanted:
        progress("installing LiteLLM's proxy")
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(_FOLDER)], check=True)
        pip = [str(_FOLDER / "bin" / "pip"), "install", "-q", "-r", str(_REQUIREMENTS)]
        subprocess.run(pip, check=True)
        installed.write_text(wanted)
    return _FOLDER / "bin" / "litellm"
