"""Every private name of torch or Lightning that the package touches has a test in this folder."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

import lightning_hetpipe
from tests.private.guarding import GUARDED
from tests.test_imports import PRIVATE_FILES


def tree_of(file: str) -> ast.Module:
    return ast.parse((Path(lightning_hetpipe.__file__).parent / file).read_text())


def names_in(file: str) -> set[str]:
    """Private names of others in ``file``: imported ones, attributes and those in strings."""
    tree = tree_of(file)
    own = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found.update((node.module or "").split("."), (alias.name for alias in node.names))
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            found.add(node.value)
    return {name for name in found - own if name.startswith("_") and not name.startswith("__")}


@pytest.mark.parametrize("file", PRIVATE_FILES)
def test_every_private_name_is_guarded(file: str) -> None:
    for module in Path(__file__).parent.glob("test_*.py"):
        importlib.import_module(f"{__package__}.{module.stem}")
    assert names_in(file) - GUARDED == set(), "give these a test of their own"


def names_told_in(file: str) -> list[str]:
    """Private names in the list in the docstring of ``file`` that says what happens where they are absent."""
    docstring = ast.get_docstring(tree_of(file)) or ""
    lines = re.split(r"^- ", docstring.partition("does not have")[2], flags=re.MULTILINE)[1:]
    return [name for line in lines for name in re.findall(r"``(_\w+)``", line)]


@pytest.mark.parametrize("file", PRIVATE_FILES)
def test_every_private_name_says_what_happens_where_it_is_absent(file: str) -> None:
    told = names_told_in(file)
    assert len(told) == len({*told}), "the docstring says two things of one name"
    assert names_in(file) - {*told} == set(), "say in the docstring what happens without these"
    assert {*told} - names_in(file) == set(), "take these out of the docstring"
