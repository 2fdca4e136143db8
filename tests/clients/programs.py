"""Starting a client's program: its own environment, a time limit, and nothing left running."""

import hashlib
import json
import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CLIENTS = ROOT / ".clients"
SCRIPTS = Path(__file__).parent / "scripts"
CHECKPOINT = ROOT / "checkpoints" / "demo-fp8"
MODEL = CHECKPOINT.name
KEY = "the-clients-key"
# What the machine decides for every program; nothing else of the caller's environment comes in.
_INHERITED = ("PATH", "LANG", "LC_ALL", "SSL_CERT_FILE")


@dataclass(frozen=True)
class Finished:
    """A program that ended."""

    status: int
    out: str
    err: str

    def require_success(self) -> "Finished":
        """Itself. Raises AssertionError with the ends of its output when it failed."""
        assert self.status == 0, f"status {self.status}\n{self.out[-4000:]}\n{self.err[-4000:]}"
        return self

    @property
    def json(self) -> Any:
        """The last line that it wrote, as JSON."""
        return json.loads(self.out.strip().splitlines()[-1])


class Desk:
    """Where one program works: an empty home and an empty folder."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "home"
        self.work = folder / "work"
        for made in (self.home, self.work):
            made.mkdir()

    def run(
        self, command: list[str | Path], limit_s: float, environ: Mapping[str, str] | None = None
    ) -> Finished:
        """Run a program to its end. Raises AssertionError when it takes longer than `limit_s`.

        Whatever it started is gone afterwards.
        """
        arguments = [str(part) for part in command]
        process = self.start(arguments, environ)
        try:
            out, err = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            end(process)
            out, err = process.communicate()
            raise AssertionError(
                f"{arguments[0]} ran past {limit_s:g} s\n{out[-4000:]}\n{err[-4000:]}"
            ) from None
        finally:
            end(process)
        return Finished(process.returncode, out, err)

    def start(
        self, command: list[str], environ: Mapping[str, str] | None = None, log: Path | None = None
    ) -> "subprocess.Popen[str]":
        """Start a program in a group of its own, its output in pipes or a log; who starts it
        ends it.
        """
        inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        with log.open("w") if log else nullcontext(subprocess.PIPE) as output:
            return subprocess.Popen(
                command,
                cwd=self.work,
                env={**inherited, "HOME": str(self.home), **(environ or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT if log else output,
                text=True,
                start_new_session=True,
            )


def end(process: "subprocess.Popen[str]") -> None:
    """Kill a program's whole group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def python_of(name: str) -> Path:
    """The interpreter that has the packages of requirements-NAME.txt."""
    return _installed(CLIENTS / name / "bin" / "python")


def program_of(name: str, program: str) -> Path:
    """A command that a package of requirements-NAME.txt installed."""
    return _installed(CLIENTS / name / "bin" / program)


def npm_package(path: str) -> Path:
    """A file of an npm package."""
    return _installed(CLIENTS / "npm" / "node_modules" / path)


def keys_file(folder: Path) -> Path:
    """A gateway's file of keys with KEY in it: every client must send it, in its own way."""
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    path = folder / "api_keys.toml"
    path.write_text(f'[[keys]]\nname = "clients"\ntenant = "clients"\nsha256 = "{digest}"\n')
    return path


def _installed(path: Path) -> Path:
    assert path.exists(), f"{path} is not there: `make test-clients` installs it"
    return path
