"""One word, one meaning: names are unique, and those that docs/architecture.md rules out do not return."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "lightning_hetpipe"

RIDDLE = re.compile(r"(What|Whether|Of|How|Who|Where)\b")
"""Beginnings of docstrings that only those understand who know the code."""
FIELDS = ("id", "attr", "arg", "name", "asname")
"""Attributes of syntax trees that hold identifiers."""


@cache
def texts() -> dict[str, str]:
    return {str(path.relative_to(PACKAGE)): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


def test_a_class_name_is_defined_once() -> None:
    places = defaultdict(list)
    for file, text in texts().items():
        for name in re.findall(r"^ *class (\w+)", text, re.MULTILINE):
            places[name].append(file)
    assert len(places) > 100
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_a_module_name_is_used_once() -> None:
    places = defaultdict(list)
    for file in texts():
        if not file.endswith("__init__.py"):
            places[Path(file).name].append(file)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def files_with_riddles() -> Iterator[tuple[str, str]]:
    """Files of the package, the tests, benchmarks and examples, where some string, or its line, begins as one does."""
    for folder in (PACKAGE.name, "tests", "benchmarks", "examples"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text()
            if re.search(rf"[\"'](\\\n)?\s*{RIDDLE.pattern}", text):
                yield str(path.relative_to(ROOT)), text


def docstrings() -> Iterator[tuple[str, str]]:
    for file, text in files_with_riddles():
        for node in ast.walk(ast.parse(text)):
            # Of a module, a class or a function, and below a variable or an attribute.
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                yield f"{file}:{node.lineno}", node.value.value.strip()


def test_docstrings_begin_with_a_noun_or_a_verb() -> None:
    found = [f"{place}: {text.splitlines()[0]}" for place, text in docstrings() if RIDDLE.match(text)]
    assert found == []


def ruled_out() -> set[str]:
    """The words in the right column of the table in docs/architecture.md."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    table = text.partition("| say | not |\n| --- | --- |\n")[2].partition("\n\n")[0]
    return {word for row in table.splitlines() for word in row.split("|")[2].replace(",", " ").split()}


def words(text: str) -> set[str]:
    """The words in the identifiers of ``text``, a module's."""
    every = (getattr(node, field, None) for node in ast.walk(ast.parse(text)) for field in FIELDS)
    names = {name for name in every if isinstance(name, str)}
    return {word.lower() for name in names for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)}


def test_identifiers_speak_the_legends_language() -> None:
    wrong = ruled_out()
    assert wrong
    suspects = {file: text for file, text in texts().items() if any(word in text.lower() for word in wrong)}
    assert {file: found for file, text in suspects.items() if (found := words(text) & wrong)} == {}
