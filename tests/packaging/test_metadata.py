"""The promises of pyproject.toml: packages, scripts, versions, one lowest Python."""

from __future__ import annotations

import re
import tomllib
from importlib import import_module
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

CHECKOUT = Path(__file__).parents[2]

PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())


def requirements() -> list[Requirement]:
    extras = PROJECT["project"]["optional-dependencies"]
    texts = PROJECT["project"]["dependencies"] + [text for name in sorted(extras) for text in extras[name]]
    return [Requirement(text) for text in texts]


def test_every_package_is_listed() -> None:
    found = {"lightning_hetpipe.conf"}
    for init in (CHECKOUT / "lightning_hetpipe").rglob("__init__.py"):
        found.add(".".join(init.parent.relative_to(CHECKOUT).parts))
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == found


def test_every_console_script_exists() -> None:
    for target in PROJECT["project"]["scripts"].values():
        module, _, name = target.partition(":")
        assert callable(getattr(import_module(module), name))


def test_the_tested_versions_satisfy_the_ranges() -> None:
    pins = {}
    for line in (CHECKOUT / "constraints.txt").read_text().splitlines():
        if not line.startswith("#"):
            pin = Requirement(line)
            (exact,) = pin.specifier
            assert exact.operator == "=="
            pins[pin.name.lower()] = Version(exact.version)
    for requirement in requirements():
        assert pins[requirement.name.lower()] in requirement.specifier, requirement


def test_every_range_has_a_lower_bound() -> None:
    for requirement in requirements():
        assert any(specifier.operator == ">=" for specifier in requirement.specifier), requirement


def test_one_lowest_python_everywhere() -> None:
    lowest = PROJECT["project"]["requires-python"].removeprefix(">=")
    assert PROJECT["tool"]["ruff"]["target-version"] == f"py{lowest.replace('.', '')}"
    assert PROJECT["tool"]["mypy"]["python_version"] == lowest
    assert f"python{lowest}" in (CHECKOUT / ".ci" / "run").read_text()
    assert f"(Python {lowest})" in (CHECKOUT / "constraints.txt").read_text()


def test_ci_runs_what_the_readme_names() -> None:
    script = (CHECKOUT / ".ci" / "run").read_text()
    assert re.findall(r"^make .*$", script, re.MULTILINE) == ["make check", "make test"]
    readme = (CHECKOUT / "README.md").read_text()
    for target in re.findall(r"^(\S+):.*## ", (CHECKOUT / "Makefile").read_text(), re.MULTILINE):
        if target != "clean":
            assert f"make {target}" in readme
