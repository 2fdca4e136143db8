"""What setup.sh asks about pyproject.toml and the environment; needs only the standard library.

hash                 of every dependency named, so that other edits do not reinstall
torch                the exact requirement on torch
can-install-groups   exit status 0 if this environment's pip knows --group
describe-torch       one line: which build was installed
"""

import hashlib
import json
import sys
import tomllib
from importlib import metadata
from pathlib import Path

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


def main(question: str) -> int:
    """Answer one question on stdout."""
    if question == "hash":
        print(_hash())
    elif question == "torch":
        engine = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]["engine"]
        print(next(name for name in engine if name.startswith("torch==")))
    elif question == "can-install-groups":
        return int(tuple(map(int, metadata.version("pip").split(".")[:2])) < (25, 1))
    elif question == "describe-torch":
        print(_describe_torch())
    else:
        print(__doc__, file=sys.stderr)
        return 2
    return 0


def _hash() -> str:
    parsed = tomllib.loads(PYPROJECT.read_text())
    named = (parsed["build-system"], parsed["project"], parsed["dependency-groups"])
    return hashlib.sha256(json.dumps([named, sys.version], sort_keys=True).encode()).hexdigest()


def _describe_torch() -> str:
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} computes on the CPU"
    found = (
        "a GPU was found"
        if torch.cuda.is_available()
        else (
            "no GPU was found: it works, a CPU build would have been smaller (README, Installing)"
        )
    )
    return f"torch {torch.__version__} is built for CUDA {torch.version.cuda}; {found}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) == 2 else ""))
