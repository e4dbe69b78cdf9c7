"""Every package that the code imports is a declared dependency, or comes for certain with one."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

CHECKOUT = Path(__file__).parents[2]
PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]

DISTRIBUTIONS = {
    "grpc": "grpcio",
    "hydra": "hydra-core",
    "sklearn": "scikit-learn",
    "typing_extensions": "typing-extensions",
}
"""Names on the package index, where they differ from the name that is imported."""

BROUGHT_BY = {
    "numpy": "torchmetrics",
    "omegaconf": "hydra-core",
    "protobuf": "tensorboard",
    "tqdm": "lightning",
    "typing-extensions": "torch",
}
"""For each package that is imported but not declared, the dependency that requires it."""

EXTRAS = {"matplotlib": "plot", "scikit-learn": "examples", "transformers": "examples"}
"""For each optional package, the extra that declares it."""


def imported() -> dict[str, set[str]]:
    """The distributions that the package imports, each with the files that do so."""
    found: dict[str, set[str]] = {}
    for file in sorted((CHECKOUT / "lightning_hetpipe").rglob("*.py")):
        for module in _imports(ast.parse(file.read_text())):
            top = module.partition(".")[0]
            if top != "lightning_hetpipe" and top not in sys.stdlib_module_names:
                name = "protobuf" if module.startswith("google.protobuf") else DISTRIBUTIONS.get(top, top)
                found.setdefault(name, set()).add(str(file.relative_to(CHECKOUT)))
    return found


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            yield node.module


def names(requirements: list[str]) -> set[str]:
    """The names of requirements that hold without any extra, as the package index normalises them."""
    found = [Requirement(text) for text in requirements]
    return {
        each.name.lower().replace("_", "-")
        for each in found
        if each.marker is None or each.marker.evaluate({"extra": ""})
    }


DECLARED = names(PROJECT["dependencies"])


def test_every_import_is_declared() -> None:
    known = DECLARED | set(BROUGHT_BY) | set(EXTRAS)
    assert {name: files for name, files in imported().items() if name not in known} == {}


@pytest.mark.parametrize(("name", "bringer"), BROUGHT_BY.items())
def test_a_dependency_brings_what_is_not_declared(name: str, bringer: str) -> None:
    assert bringer in DECLARED
    assert name in names(requires(bringer) or [])


@pytest.mark.parametrize(("name", "extra"), EXTRAS.items())
def test_an_extra_declares_what_is_optional(name: str, extra: str) -> None:
    assert name not in DECLARED
    assert name in names(PROJECT["optional-dependencies"][extra])
