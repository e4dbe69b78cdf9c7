"""Plain values are held against annotations; whatever else an annotation names is left alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Protocol, SupportsIndex, TypeVar

import pytest

from lightning_hetpipe.cli.config_checks import expected
from lightning_hetpipe.cli.targets import TargetSignature


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
        ([1], int, "a whole number"),
        ({"a": 1}, float, "a number"),
        ([1], list[str], None),
        ({"_target_": "pathlib.Path"}, int, None),
    ],
)
def test_what_a_value_should_have_been(value: Any, hint: Any, said: str | None) -> None:
    assert expected(value, hint if hint is not None else type(None)) == said


class Quacks(Protocol):
    def quack(self) -> None: ...


@pytest.mark.parametrize(
    ("value", "hint", "said"),
    [
        (3, Path | bool | None, "a Path or true or false or null"),
        (3, OSError, "an OSError"),
        (3, str | Path, "text"),
        ("abc", timedelta | float, "a timedelta or a number"),
        ("abc", list[int], "[a whole number, ...]"),
        ("abc", Iterable[str], "[text, ...]"),
        ([1, "abc"], list[int] | None, "[a whole number, ...] or null"),
        ([1], tuple[float, float], "[a number, a number]"),
        (3, dict[str, int], "a mapping"),
        ({"_target_": "builtins.str"}, Path, "a Path"),
        ({"_target_": "pathlib.Path"}, int, "a whole number"),
        ([{"_target_": "pathlib.Path"}], list[Path], None),
        ({"_target_": "pathlib.PosixPath"}, Path, None),
        ({"_target_": "pathlib.PosixPath"}, str | Path, None),
        ({"_target_": "builtins.print"}, Path, None),
        ({"_target_": "builtins.int"}, float, None),
        ([1, 2], tuple[float, float], None),
        ([1, 2, 3], tuple[int, ...], None),
        ([1, "abc"], Sequence[Any], None),
        ([1], list, None),
        ({"a": 1}, Mapping[str, int], None),
        (3, Any, None),
        (3, object, None),
        (3, Callable[[int], int], None),
        (3, type[int], None),
        (3, SupportsIndex, None),
        (3, Quacks, None),
        (3, TypeVar("T"), None),
    ],
)
def test_classes_and_containers_are_judged_where_annotations_are_known_to_hold(
    value: Any, hint: Any, said: str
) -> None:
    assert expected(value, hint, classes=True) == said


class Annotated:
    def __init__(self, width: int, name: Literal["a"] | None = None) -> None: ...


def broken(width: int) -> None:
    """Its annotation is imported for type checkers only, say."""


broken.__annotations__ = {"width": "NoSuchName"}


def test_annotations_of_classes_and_functions() -> None:
    assert TargetSignature.of(Annotated).hints["width"] is int
    assert TargetSignature.of(test_what_a_value_should_have_been).hints["value"] is Any
    assert TargetSignature.of(broken).hints == {}
    assert TargetSignature.of(len).hints == {}
