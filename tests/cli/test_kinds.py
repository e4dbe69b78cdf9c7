"""Plain values are held against annotations; whatever else an annotation names is left alone."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import pytest

from lightning_hetpipe.cli.kinds import expected, hints


@pytest.mark.parametrize(
    ("value", "hint", "said"),
    [
        ("abc", int, "a whole number"),
        (1.5, int, "a whole number"),
        (True, int, "a whole number"),
        (None, int, "a whole number"),
        ("abc", int | None, "a whole number or null"),
        ("abc", float | int | None, "a number or null"),
        (1, bool, "true or false"),
        (7, str | None, "text or null"),
        ("abc", int | Literal["auto"], "a whole number or 'auto'"),
        ("of", bool | Literal["warn", "off"], "true or false or 'warn' or 'off'"),
        (1, int, None),
        (1, float, None),
        (None, int | None, None),
        ("auto", int | Literal["auto"], None),
        (True, bool | int, None),
        ("abc", Any, None),
        ("abc", None, "null"),
        ("5", timedelta | float, None),
        ("abc", Path, None),
        ("abc", list[int], None),
        ([1], int, None),
    ],
)
def test_what_a_value_should_have_been(value: Any, hint: Any, said: str | None) -> None:
    assert expected(value, hint if hint is not None else type(None)) == said


class Annotated:
    def __init__(self, width: int, name: Literal["a"] | None = None) -> None: ...


def broken(width: int) -> None:
    """Its annotation is imported for type checkers only, say."""


broken.__annotations__ = {"width": "NoSuchName"}


def test_annotations_of_classes_and_functions() -> None:
    assert hints(Annotated)["width"] is int
    assert hints(test_what_a_value_should_have_been)["value"] is Any
    assert hints(broken) == {}
    assert hints(len) == {}
