"""Imports point one way, pure packages stay pure, and other people's private names are used in two files only."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightning_hetpipe

ROOT = Path(lightning_hetpipe.__file__).parent
FILES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))
PRIVATE_FILES = ["private.py", "strategy/private.py"]
"""The files that may touch private names of torch and Lightning."""

BELOW: dict[str, set[str]] = {
    "__init__": {"strategy", "planning"},
    "cli": {
        "strategy",
        "server",
        "demo",
        "capture",
        "pipeline",
        "reporting",
        "planning",
        "rules",
        "errors",
        "private",
        "conf",
    },
    "demo": {"strategy", "server", "capture", "pipeline", "reporting", "planning", "rules", "errors", "private"},
    "strategy": {"server", "capture", "pipeline", "emulation", "reporting", "planning", "rules", "errors", "private"},
    "capture": {"pipeline", "planning", "rules", "errors", "private"},
    "reporting": {"planning", "rules", "errors", "private"},
    "server": {"planning", "rules", "errors", "private"},
    "emulation": {"pipeline", "errors"},
    "pipeline": {"planning", "rules", "errors", "private"},
    "planning": {"rules", "errors"},
    "rules": set(),
    "errors": set(),
    "private": set(),
}
"""What each part of the package may import besides itself: cli, demo > strategy > the rest > planning > rules."""

IMPURE = {"lightning", "pytorch_lightning", "torch", "threading", "queue", "multiprocessing", "concurrent", "asyncio"}
IMPURE |= {"socket", "grpc", "subprocess"}


def tree(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text())


def part_of(file: str) -> str:
    return file.split("/")[0].removesuffix(".py")


def imports(file: str) -> Iterator[tuple[str, str | None]]:
    """Every module that ``file`` imports, also inside functions, with the name that is taken from it."""
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} imports relatively; write the full name"
            yield from ((node.module or "", alias.name) for alias in node.names)


def parts_imported(file: str) -> set[str]:
    found = set()
    for module, name in imports(file):
        package, _, rest = module.partition(".")
        if package == "lightning_hetpipe":
            found.add(rest.split(".")[0] if rest else name or "__init__")
    return found - {part_of(file)}


@pytest.mark.parametrize("file", FILES)
def test_imports_point_one_way(file: str) -> None:
    part = part_of(file)
    assert part in BELOW, f"say in this test what {part} may import"
    # An example in the demo uses the package as everybody does: through its public names.
    public = {"HetPipeStrategy", "__init__"} if part in ("cli", "demo") else set()
    assert parts_imported(file) <= BELOW[part] | public


def test_the_order_has_no_circle() -> None:
    order: list[str] = []
    while len(order) < len(BELOW):
        free = [part for part in BELOW if part not in order and BELOW[part] <= {*order, "conf"}]
        assert free, "these import each other: " + ", ".join(sorted(set(BELOW) - set(order)))
        order += free


@pytest.mark.parametrize("file", [file for file in FILES if part_of(file) in ("rules", "planning")])
def test_pure_packages_import_neither_lightning_nor_threads_nor_sockets(file: str) -> None:
    found = {module.split(".")[0] for module, _ in imports(file)}
    assert not found & IMPURE
    # Where the partition is looked for among millions of sums, numpy adds them; torchmetrics brings it along.
    allowed = {"numpy"} if part_of(file) == "planning" else set()
    assert found <= {*sys.stdlib_module_names, "lightning_hetpipe", *allowed}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined_here() -> set[str]:
    """Every private name that this package itself defines: functions, classes, variables and attributes."""
    found: set[str] = set()
    for file in FILES:
        if file in PRIVATE_FILES:
            continue
        for node in ast.walk(tree(file)):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if isinstance(node.value, ast.Name) and node.value.id == "self":
                    found.add(node.attr)
            elif isinstance(node, ast.arg):
                found.add(node.arg)
    return {name for name in found if is_private(name)}


OURS = defined_here()
BY_NAME = {"getattr", "hasattr", "setattr", "delattr", "Redirect"}
"""What takes the name of an attribute as a string."""


DOCUMENTED = {"sys._getframe", "os._exit"}
"""Python's own, public in spite of their names."""


def names_in_strings(node: ast.Call) -> list[str]:
    if not isinstance(node.func, ast.Name) or node.func.id not in BY_NAME:
        return []
    return [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]


@pytest.mark.parametrize("file", [file for file in FILES if file not in PRIVATE_FILES])
def test_private_names_of_others_are_in_two_files_only(file: str) -> None:
    """What is imported, what is read from an object, and what is named in a string."""
    found = [
        f"{module}.{name}" if name else module
        for module, name in imports(file)
        if any(map(is_private, [*module.split("."), name or ""])) and not module.startswith("lightning_hetpipe")
    ]
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in OURS:
            if ast.unparse(node) not in DOCUMENTED and node.attr != "_replace":  # of a NamedTuple
                found.append(f"{ast.unparse(node)} in line {node.lineno}")
        elif isinstance(node, ast.Call):
            names = [name for name in names_in_strings(node) if is_private(name) and name not in OURS]
            found += [f"'{name}' in line {node.lineno}" for name in names]
    assert found == [], f"move these into {' or '.join(PRIVATE_FILES)}, and guard them in tests/test_private.py"
