"""Imports point one way, pure packages stay pure, and other people's private names are used in two files only."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import lightning as L
from torch import Tensor, nn

import lightning_hetpipe
from tests.support import forks

ROOT = Path(lightning_hetpipe.__file__).parent
FILES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))
PRIVATE_FILES = [file for file in FILES if file.startswith(("torch_private/", "lightning_private"))]
"""The files that may touch private names of torch and Lightning."""

LEAVES = {"accelerator", "errors", "redirect", "settings", "torch_private", "lightning_private"}
"""Files of the root that any part may import."""
COMPUTES = {"capture", "pipeline", "emulation", "reporting", "planning", "rules"}
BELOW: dict[str, set[str]] = {
    "__init__": {"strategy", "launch", "planning", "errors"},
    "cli": {"strategy", "run", "placement", "workers", "hosts", "launch", "server", "demo", "conf", *COMPUTES},
    "demo": {"strategy", "server", *COMPUTES},
    "strategy": {"run", "placement", "workers", "launch", "server", *COMPUTES},
    "run": {"placement", "workers", "hosts", "launch", "server", *COMPUTES},
    "placement": {*COMPUTES},
    "workers": {"launch", "server", "pipeline", "rules"},
    "launch": {"hosts", "server", "rules"},
    "hosts": {"emulation", "server", "planning", "pipeline", "rules"},
    "capture": {"pipeline", "planning", "rules"},
    "reporting": {"planning", "rules"},
    "server": {"planning", "rules"},
    "emulation": {"pipeline"},
    "pipeline": {"planning", "rules"},
    "planning": {"rules"},
    "rules": set(),
    "lightning_private": {"redirect", "errors"},
    "torch_private": {"errors"},
    "accelerator": {"errors"},
    "redirect": set(),
    "settings": {"errors"},
    "errors": set(),
}
"""Parts that each part of the package may import: cli, demo > strategy > run > the rest > planning > rules."""

IMPURE = {"lightning", "pytorch_lightning", "torch", "threading", "queue", "multiprocessing", "concurrent", "asyncio"}
IMPURE |= {"socket", "grpc", "subprocess"}


@cache
def nodes(file: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse((ROOT / file).read_text())))


def part_of(file: str) -> str:
    return file.split("/")[0].removesuffix(".py")


def imports(file: str) -> Iterator[tuple[str, str | None]]:
    """Every module that ``file`` imports, also inside functions, with the name that is taken from it."""
    for node in nodes(file):
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


def test_imports_point_one_way() -> None:
    assert {part_of(file) for file in FILES} == set(BELOW), "say in this test what each part may import"
    # An example in the demo uses the package as everybody does: through its public names.
    public = {"cli": {"HetPipeStrategy"}, "demo": {"HetPipeStrategy", "__init__"}}
    allowed = {
        part: below | public.get(part, set()) | (LEAVES if part not in LEAVES else set())
        for part, below in BELOW.items()
    }
    found = {file: parts_imported(file) - allowed[part_of(file)] for file in FILES}
    assert {file: wrong for file, wrong in found.items() if wrong} == {}


def test_the_order_has_no_circle() -> None:
    order: list[str] = []
    while len(order) < len(BELOW):
        free = [part for part in BELOW if part not in order and BELOW[part] <= {*order, "conf"}]
        assert free, "these import each other: " + ", ".join(sorted(set(BELOW) - set(order)))
        order += free


def test_pure_packages_import_neither_lightning_nor_threads_nor_sockets() -> None:
    wrong = {}
    for file in [file for file in FILES if part_of(file) in ("rules", "planning")]:
        found = {module.split(".")[0] for module, _ in imports(file)}
        # Where the partition is looked for among millions of sums, numpy adds them.
        allowed = {*sys.stdlib_module_names, "lightning_hetpipe"} | (
            {"numpy"} if part_of(file) == "planning" else set()
        )
        wrong[file] = found & IMPURE | found - allowed
    assert {file: found for file, found in wrong.items() if found} == {}


LOADED = """
import os, signal, socket, sys, threading
from importlib import import_module

# As a child of the launcher that a supervisor watches.
ends = socket.socketpair()
os.environ |= {"HETPIPE_VIRTUAL_WORKER": f"1/2@{ends[1].fileno()}", "HETPIPE_SUPERVISED": str(os.pipe()[1])}

def state():
    threads = [thread.name for thread in threading.enumerate()]
    signals = [signal.getsignal(each) for each in sorted(signal.valid_signals())]
    return threads, signals, sys.excepthook, threading.excepthook, dict(os.environ), list(sys.path)

pure, others = sys.argv[1].split(), sys.argv[2].split()
before = state()
for name in pure:
    import_module(name)
    found = {name.partition(".")[0] for name in sys.modules} & {"lightning", "torchmetrics", "lightning_utilities"}
    assert not found, f"{name} loads {', '.join(found)}"
assert state() == before, "one of the pure modules does something when it is imported"

import grpc, hydra, lightning, torchmetrics

before, sync = state(), torchmetrics.Metric.sync
for name in others:
    import_module(name)
    assert state() == before, f"{name} does something when it is imported"
assert torchmetrics.Metric.sync is sync
"""


def test_pure_packages_and_servers_load_no_lightning_and_no_module_does_anything() -> None:
    """Modules that are really loaded count, by whatever way; and nothing else may happen to the process."""
    pure = [file for file in FILES if part_of(file) in ("rules", "planning", "server", "errors", "__init__")]
    others = [file for file in FILES if file not in pure]
    names = [" ".join(map(module_of, files)) for files in (pure, others)]
    run = forks.run("-c", LOADED, *names, loaded="libraries")
    assert run.returncode == 0, run.stderr


def module_of(file: str) -> str:
    return f"lightning_hetpipe.{file.removesuffix('.py').replace('/', '.')}".removesuffix(".__init__")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined_here() -> set[str]:
    """Every private name that this package itself defines: functions, classes, variables and attributes."""
    found: set[str] = set()
    for file in FILES:
        if file in PRIVATE_FILES:
            continue
        for node in nodes(file):
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
THEIRS = {name for each in (nn.Module(), L.LightningModule, L.Trainer, Tensor) for name in dir(each)}
"""Names of a module and the like; so where we have a private name of theirs, too, it is ours of ``self`` only."""
BY_NAME = {"getattr", "hasattr", "setattr", "delattr", "Redirect"}
"""Functions that take the name of an attribute as a string."""


DOCUMENTED = {"sys._getframe", "os._exit"}
"""Python's own, public in spite of their names."""


def names_in_strings(node: ast.Call) -> list[str]:
    if not isinstance(node.func, ast.Name) or node.func.id not in BY_NAME:
        return []
    return [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]


def is_of_others(node: ast.Attribute) -> bool:
    if ast.unparse(node) in DOCUMENTED or node.attr in ("_replace", "_make"):  # of a NamedTuple
        return False
    own = ast.unparse(node.value) in ("self", "super()")
    return node.attr not in OURS or (node.attr in THEIRS and not own)


def test_private_names_of_others_are_in_two_files_only() -> None:
    """Names that are imported, that are read from an object, and that a string holds."""
    found = []
    for file in [file for file in FILES if file not in PRIVATE_FILES]:
        for module, name in imports(file):
            if any(map(is_private, [*module.split("."), name or ""])) and not module.startswith("lightning_hetpipe"):
                found.append(f"{file}: {module}.{name}")
        for node in nodes(file):
            if isinstance(node, ast.Attribute) and is_private(node.attr) and is_of_others(node):
                found.append(f"{file}:{node.lineno}: {ast.unparse(node)}")
            elif isinstance(node, ast.Call):
                names = [name for name in names_in_strings(node) if is_private(name) and name not in OURS]
                found += [f"{file}:{node.lineno}: '{name}'" for name in names]
    assert found == [], "move these into torch_private or lightning_private, and guard them in tests/private"
