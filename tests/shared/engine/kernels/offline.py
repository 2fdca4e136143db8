"""Compiling kernels for Hopper on a machine without a GPU, and what the assembler says of them.

It happens in a process of its own: where triton was loaded to interpret, it cannot compile.
"""

import dataclasses
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

MAX_SHARED_BYTES = 227 * 1024  # what one block may have on Hopper

_HOPPER = GPUTarget("cuda", 90, 32)
_ASSEMBLER = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
_ROOT = Path(__file__).parents[4]


@dataclass(frozen=True)
class Build:
    """One kernel to be compiled in one way. Pointers are taken as 16-byte aligned."""

    kernel: str  # module:name
    signature: Mapping[str, str]  # argument -> type, as "*fp32", "i32", "tensordesc<...>"
    constants: Mapping[str, Any]  # argument -> constexpr value
    options: Mapping[str, int]  # num_warps, num_stages, maxnreg
    multiples_of_16: Sequence[str] = field(default=())  # integer arguments


@dataclass(frozen=True)
class Compiled:
    """What became of a build."""

    registers: int  # of a thread at the kernel's entry
    spilled_bytes: int
    shared_bytes: int


def compile_for_hopper(builds: Sequence[Build]) -> list[Compiled]:
    """Compile Triton or Gluon kernels for sm_90."""
    environment = {name: os.environ[name] for name in os.environ if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.shared.engine.kernels.offline"],
        input=json.dumps([dataclasses.asdict(build) for build in builds]),
        capture_output=True,
        text=True,
        cwd=_ROOT,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return [Compiled(**figures) for figures in json.loads(done.stdout)]


def _compile(build: Build) -> Compiled:
    module, _, name = build.kernel.partition(":")
    kernel = getattr(importlib.import_module(module), name)
    types = {
        name: "constexpr" if name in build.constants else build.signature[name]
        for name in kernel.arg_names
    }
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if types[name].startswith("*") or name in build.multiples_of_16
    }
    values = {(kernel.arg_names.index(name),): value for name, value in build.constants.items()}
    source_type = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    source = source_type(kernel, types, values, aligned)
    built = triton.compile(source, target=_HOPPER, options=dict(build.options))
    registers, spilled = _assemble(built.asm["ptx"])
    return Compiled(registers, spilled, int(built.metadata.shared))


def _assemble(ptx: str) -> tuple[int, int]:
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory, "kernel.ptx")
        source.write_text(ptx)
        command = [str(_ASSEMBLER), "-v", "--gpu-name=sm_90a", str(source), "-o", "/dev/null"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", report)]
    spilled = [int(count) for count in re.findall(r"(\d+) bytes spill stores", report)]
    return max(registers), max(spilled)


if __name__ == "__main__":
    compiled = [_compile(Build(**build)) for build in json.load(sys.stdin)]
    json.dump([dataclasses.asdict(figures) for figures in compiled], sys.stdout)
