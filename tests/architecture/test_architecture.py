"""Rules that prose would lose: what is checked here stays true."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_LINES = 300
GENERATED = {"farspan_pb2.py"}
MODULES = sorted(
    path.relative_to(ROOT)
    for top in ("services", "shared")
    for path in (ROOT / top).rglob("*.py")
    if path.name not in GENERATED
)
# Tests that mirror no module: they test the whole, or rules about it.
UNMIRRORED = {"architecture", "browser", "clients", "contracts", "system"}


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_a_module_is_short_enough_to_read(module: Path) -> None:
    """A file that runs away takes its idea with it: split before it grows."""
    assert len((ROOT / module).read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize("module", [m for m in MODULES if m.name == "__init__.py"], ids=str)
def test_a_package_says_what_it_is_and_imports_nothing(module: Path) -> None:
    """A re-export in shared/__init__ would load torch into the gateway."""
    statements = ast.parse((ROOT / module).read_text()).body

    assert len(statements) == 1
    assert isinstance(statements[0], ast.Expr)
    assert isinstance(statements[0].value, ast.Constant)


def test_every_test_mirrors_a_module() -> None:
    """tests/a/b/test_c.py tests a/b/c.py; a test whose module is gone tests a memory."""
    tests = ROOT / "tests"
    orphans = [
        str(path.relative_to(ROOT))
        for path in tests.rglob("test_*.py")
        if path.relative_to(tests).parts[0] not in UNMIRRORED
        and not (ROOT / path.relative_to(tests).with_name(path.name.removeprefix("test_"))).exists()
    ]

    assert not orphans


def test_there_is_no_module_for_odds_and_ends() -> None:
    """A helper lives beside its one user, or gets a name."""
    refused = {"utils.py", "common.py", "helpers.py", "types.py", "constants.py", "base.py"}

    assert not [str(module) for module in MODULES if module.name in refused]


@pytest.mark.parametrize("service", ["gateway", "router", "kv_index", "local"])
def test_a_control_service_imports_neither_torch_nor_nixl(service: str) -> None:
    """Their images hold neither. The import contracts see names; this sees what really loads."""
    names = [
        ".".join(module.with_suffix("").parts)
        for module in MODULES
        if module.parts[:2] == ("services", service) and module.name != "__main__.py"
    ]
    code = (
        f"import sys, importlib\nfor name in {names!r}: importlib.import_module(name)\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'nixl', 'nixl_cu13')])"
    )

    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
