"""Imports point down only, one module reads the environment, and nothing happens at import."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import stepfence

PACKAGE = Path(stepfence.__file__).parent
LAYERS = (
    ("__main__", "cli"),
    ("integrations", "testing", "demo", "doctor"),
    ("report",),
    ("queue", "batch", "checkpoint", "container"),
    ("",),  # the package itself: its public names
    ("session", "retry", "step.runner"),
    ("step",),
    ("launch", "admission"),
    ("cluster",),
    ("ledger", "guard", "revision", "breaker"),
    ("redact", "errors", "model", "settings", "events", "fs", "forks", "locks"),
)
"""From the top down. A module may import from its own layer and from those below."""


def _modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


MODULES = _modules()


def _imports(path: Path) -> Iterator[str]:
    """Give what a module imports of the package, wherever in it; not what is there for type checkers alone."""
    waiting: list[ast.AST] = [ast.parse(path.read_text())]
    while waiting:
        match waiting.pop():
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                pass
            case ast.Import(names=names):
                yield from (name.name for name in names)
            case ast.ImportFrom(module=module, names=names, level=0) if module:
                yield from (f"{module}.{name.name}" for name in names)
            case ast.ImportFrom(level=level) if level:
                pytest.fail(f"{path}: a relative import: the package uses absolute ones")
            case node:
                waiting += ast.iter_child_nodes(node)


def _imported(path: Path) -> set[str]:
    """Return the modules of the package that a module imports."""
    found = set()
    for name in _imports(path):
        parts = name.split(".")
        if parts[0] != "stepfence":
            continue
        known = ".".join(parts[1:])
        while known not in MODULES:
            known = known.rpartition(".")[0]
        found.add(known)
    return found


def _layer(module: str) -> int | None:
    name = module
    while True:
        for number, layer in enumerate(LAYERS):
            if name in layer and (name or module == ""):
                return number
        if not name:
            return None
        name = name.rpartition(".")[0]


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_nothing_from_above(module: str) -> None:
    mine = _layer(module)
    assert mine is not None, f"{module} has no layer: give it one in LAYERS"
    upward = {other for other in _imported(MODULES[module]) if (theirs := _layer(other)) is None or theirs < mine}
    assert not upward, f"{module} imports from above: {upward}"


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {module: _imported(path) - {module} for module, path in MODULES.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' <- '.join(error.args[1])}")


@pytest.mark.parametrize("module", MODULES)
def test_the_environment_is_read_in_one_module(module: str) -> None:
    names = {"environ", "environb", "getenv", "getenvb", "putenv"}
    reads = [
        node.lineno
        for node in ast.walk(ast.parse(MODULES[module].read_text()))
        if (isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node.value) == "os")
        or (isinstance(node, ast.ImportFrom) and node.module == "os" and names & {name.name for name in node.names})
    ]
    assert not reads or module == "settings", f"{module} reads the environment in line {reads}"


def test_nothing_happens_at_import(tmp_path: Path) -> None:
    modules = [f"stepfence.{module}".rstrip(".") for module in MODULES if module != "__main__"]
    code = f"""
import importlib, sys, threading
opened = []
def hook(event, args):
    if event == "open" and (isinstance(args[2], int) and args[2] & 0o3 or args[1] and set(str(args[1])) & set("wax+")):
        opened.append(args[0])
    elif event in ("subprocess.Popen", "os.exec", "os.fork", "os.mkdir", "os.remove", "os.rename", "socket.connect"):
        opened.append((event, args))
sys.addaudithook(hook)
for module in {modules!r}:
    importlib.import_module(module)
print(opened, threading.active_count())
"""
    done = subprocess.run(
        [sys.executable, "-B", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("[] 1\n", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", stepfence.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert hasattr(stepfence, name)
