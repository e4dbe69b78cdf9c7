"""Places in the package that make an error of ours, found by ``ast``, and a recorder of those that are reached."""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import lightning_hetpipe
from lightning_hetpipe import errors
from lightning_hetpipe.planning.plan.planned_worker import Problem

PACKAGE = Path(lightning_hetpipe.__file__).parent
ROOTS = (errors.SettingError, errors.PipelineStalled, errors.VirtualWorkerLost, Problem)
"""Classes that hold what a user reads of an error. ``Discarded`` is left out: it has no sentence."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
Position = tuple[str, int, int]
"""File, and where the call ends in it: line and column."""


@dataclass(frozen=True)
class _Call:
    module: str
    function: str
    position: Position


@dataclass(frozen=True)
class _Maker:
    """Function that returns or raises nothing but errors of ours."""

    module: Path
    owner: str
    """Its class; empty for a function of a module."""


@dataclass
class _Module:
    path: Path
    tree: ast.Module
    functions: dict[str, Function] = field(default_factory=dict)
    classes: list[ast.ClassDef] = field(default_factory=list)
    calls: list[tuple[str, ast.Call]] = field(default_factory=list)
    imported: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._walk(self.tree, "")

    def _walk(self, node: ast.AST, function: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = function
            if isinstance(child, Function | ast.ClassDef):
                name = f"{function}.{child.name}".lstrip(".")
                if isinstance(child, Function):
                    self.functions[name] = child
                else:
                    self.classes.append(child)
            elif isinstance(child, ast.Call):
                self.calls.append((function, child))
            elif isinstance(child, ast.ImportFrom):
                self.imported |= {alias.name for alias in child.names}
            self._walk(child, name)


@cache
def sites() -> dict[Position, str]:
    """Return the name of each place, by its position.

    A place is a call of an error's class, or of a function that returns or raises nothing but such errors. Its name is
    that of the function around it, with a number if the function has several; the module comes first if another one has
    a function of this name.
    """
    modules = [_Module(path, ast.parse(path.read_text())) for path in sorted(PACKAGE.rglob("*.py"))]
    found = _calls(modules)
    by_function: dict[str, dict[str, list[Position]]] = defaultdict(lambda: defaultdict(list))
    for call in found:
        by_function[call.function][call.module].append(call.position)
    names: dict[Position, str] = {}
    for function, in_modules in by_function.items():
        for module, positions in in_modules.items():
            name = f"{module}:{function}" if len(in_modules) > 1 else function
            for number, position in enumerate(sorted(positions), start=1):
                names[position] = f"{name}#{number}" if len(positions) > 1 else name
    return names


def _calls(modules: list[_Module]) -> list[_Call]:
    classes = {each.__name__ for each in ROOTS}
    bases = {
        node.name: {part.attr if isinstance(part, ast.Attribute) else getattr(part, "id", "") for part in node.bases}
        for module in modules
        for node in module.classes
    }
    while more := {name for name, own in bases.items() if own & classes} - classes:
        classes |= more
    makers: dict[str, set[_Maker]] = defaultdict(set)
    found: dict[Position, _Call] = {}
    while True:
        before = len(found)
        for module in modules:
            for function, call in module.calls:
                if _is_site(call, classes, makers, module):
                    assert call.end_lineno is not None
                    assert call.end_col_offset is not None
                    position = str(module.path), call.end_lineno, call.end_col_offset
                    found[position] = _Call(module.path.stem, function, position)
                    if (around := module.functions.get(function)) and _only_errors(around, classes):
                        owner = function.rpartition(".")[0].rpartition(".")[2]
                        makers[around.name].add(_Maker(module.path, owner))
        if len(found) == before:
            return list(found.values())


def _only_errors(function: Function, classes: set[str]) -> bool:
    returns = function.returns
    if returns is None or isinstance(returns, ast.Subscript):
        return False
    return bool({node.id for node in ast.walk(returns) if isinstance(node, ast.Name)} & {*classes, "NoReturn"})


def _is_site(call: ast.Call, classes: set[str], makers: dict[str, set[_Maker]], module: _Module) -> bool:
    match call.func:
        case ast.Name(id=name):
            here = {maker.module for maker in makers.get(name, ()) if not maker.owner}
            return name in classes or module.path in here or (bool(here) and name in module.imported)
        case ast.Attribute(attr=name, value=owner):
            known = {owner.id} if isinstance(owner, ast.Name) else set()
            return name in classes or any(
                maker.module == module.path or maker.owner in module.imported
                if maker.owner
                else maker.module.stem in known
                for maker in makers.get(name, ())
            )
    return False


@contextmanager
def recording() -> Iterator[set[str]]:
    """Give the set of the places that are reached meanwhile, in this process."""
    known = sites()
    reached: set[str] = set()

    def recorded(root: Any) -> Any:
        make = root.__init__

        def __init__(self: object, *args: Any, **settings: Any) -> None:
            make(self, *args, **settings)
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and frame.f_code.co_name == "__init__" and frame.f_locals.get("self") is self:
                frame = frame.f_back
            while frame is not None and (name := known.get(_position(frame))) is not None:
                reached.add(name)
                frame = frame.f_back

        return __init__

    with pytest.MonkeyPatch.context() as patch:
        for root in ROOTS:
            patch.setattr(root, "__init__", recorded(root))
        yield reached


def _position(frame: FrameType) -> Position:
    _, line, _, column = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    return frame.f_code.co_filename, line or 0, column or 0
