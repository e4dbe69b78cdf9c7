"""The settings model: values are held against declarations, strictly, and the errors say what was declared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, SupportsIndex, TypeVar

import pytest
from omegaconf import ListConfig

from lightning_hetpipe import settings
from lightning_hetpipe.cli.targets import YAML
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.settings import PYTHON, Bounds, Choices, Declared, Duration, Length, Style


class Quacks(Protocol):
    def quack(self) -> None: ...


Count = Annotated[int | Literal["auto"], Bounds(1, 9)]
AT_LEAST = "a whole number of at least 1 and at most 9"


def said(value: Any, hint: Any, style: Style) -> str | None:
    """Return what the error says that ``value`` must be; None if there is none."""
    try:
        settings.check("x", value, hint, style)
    except SettingError as error:
        return str(error).partition(" must be ")[2]
    return None


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        ("4", int, "a whole number"),
        (1.5, int, "a whole number"),
        (True, int, "a whole number"),
        (True, float, "a number"),
        (None, int, "a whole number"),
        ("abc", int | None, "a whole number or None"),
        ("abc", float | int | None, "a number or None"),
        (1, bool, "True or False"),
        (7, str | None, "text or None"),
        ("abc", int | Literal["auto"], "a whole number or 'auto'"),
        (1, Literal[True, "off"], "True or 'off'"),
        ("of", bool | Literal["warn", "off"], "True, False, 'warn' or 'off'"),
        (1, int, None),
        (1, float, None),
        (None, int | None, None),
        ("auto", int | Literal["auto"], None),
        (True, bool | int, None),
        ("abc", Any, None),
        ([1], int, "a whole number"),
        ({"a": 1}, float, "a number"),
        (0, Count, f"{AT_LEAST} or 'auto'"),
        (10, Count | None, f"{AT_LEAST}, 'auto' or None"),
        (float("nan"), Annotated[float, Bounds(0)], "a number of at least 0"),
        ("auto", Count, None),
        (9, Count, None),
        ([], Annotated[list[int], Length(1), "some numbers"], "some numbers"),
        ("sun", Annotated[str | None, Choices(("sum", "mean"))], "'sum', 'mean' or None; did you mean 'sum'?"),
        ("sum", Annotated[str, Choices(("sum", "mean"))], None),
        (timedelta(0), Duration, "a datetime.timedelta, or a number of seconds, positive and at most a year"),
        (True, Duration, "a datetime.timedelta, or a number of seconds, positive and at most a year"),
        (0.5, Duration, None),
        (timedelta(days=3), Duration | None, None),
        (ListConfig([1, 2]), Sequence[int], None),
        (ListConfig([1, "2"]), Sequence[int], "[a whole number, ...]"),
    ],
)
def test_what_a_value_must_be(value: Any, hint: Any, expected: str | None) -> None:
    assert said(value, hint, PYTHON) == expected


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        (3, Path | bool | None, "a Path, true, false or null"),
        (3, OSError, "an OSError"),
        ("abc", timedelta | float, "a timedelta or a number"),
        ("abc", list[int], "[a whole number, ...]"),
        ("abc", Iterable[str], "[text, ...]"),
        ([1, "abc"], list[int] | None, "[a whole number, ...], or null"),
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
def test_what_a_value_of_a_configuration_must_be(value: Any, hint: Any, expected: str) -> None:
    assert said(value, hint, YAML) == expected


@pytest.mark.parametrize(
    ("value", "hint", "sentence"),
    [
        ([1, 0], Count | Sequence[Count], f"x[1]=0 must be {AT_LEAST} or 'auto'"),
        ({"a": 0}, Mapping[str, Count], f"x['a']=0 must be {AT_LEAST} or 'auto'"),
        ({0: 1}, Mapping[Annotated[str, "a name"], int], "x has the key 0, which must be a name"),
    ],
)
def test_items_with_a_declaration_of_their_own_are_named(value: Any, hint: Any, sentence: str) -> None:
    with pytest.raises(SettingError) as caught:
        settings.check("x", value, hint)
    assert str(caught.value) == sentence


@dataclass
class Declares:
    width: int
    token: str | None = field(default=None, repr=False)
    depth: Annotated[float, Bounds(0)] = -1


def test_a_constructor_reads_its_arguments() -> None:
    assert settings.read(Declares, {"self": 3, "width": 4}).width == 4
    with pytest.raises(SettingError, match=r"^width='4' must be a whole number$"):
        settings.read(Declares, {"width": "4"})


def test_a_default_may_be_what_nobody_may_give() -> None:
    settings.read(Declares, {"depth": Declares.depth})


@pytest.mark.parametrize(
    ("values", "style", "sentence"),
    [
        ({"dept": 3}, YAML, "a.dept is not a setting; did you mean a.depth?"),
        ({"dept": 3}, PYTHON, "a.dept is not a setting; did you mean a.depth?"),
        ({"zzz": 3}, PYTHON, "a.zzz is not a setting, and Declares has width, token, depth"),
        ({"token": 3}, PYTHON, "a.token must be text or None"),
        ({"width": None}, YAML, "a.width=null must be a whole number"),
    ],
)
def test_arguments_inside_a_setting(values: Mapping[str, Any], style: Style, sentence: str) -> None:
    with pytest.raises(SettingError) as caught:
        Declared.by(Declares).check(values, "a", "Declares", style)
    assert str(caught.value) == sentence


def foreign(path: Path, width: int = 1) -> None: ...


foreign.__module__ = "elsewhere"


def test_of_others_only_plain_annotations_are_judged() -> None:
    """Their code may take text where it says ``Path``."""
    declared = Declared.by(foreign)
    declared.check({"path": "text", "width": {"_target_": "builtins.int"}}, style=YAML)
    with pytest.raises(SettingError, match=r"^width=abc must be a whole number$"):
        declared.check({"width": "abc"}, style=YAML)


def broken(width: int) -> None:
    """Its annotation is imported for type checkers only, say."""


broken.__annotations__ = {"width": "NoSuchName"}


def test_what_classes_and_functions_declare() -> None:
    def target(first: int, /, second: int, *rest: int, third: int = 3) -> None: ...

    def anything(**named: int) -> None: ...

    assert Declared.by(Declares).hints["width"] is int
    assert Declared.by(broken).hints == {}
    assert Declared.by(len).hints == {}
    assert list(Declared.by(target).parameters) == ["second", "third"]
    assert not Declared.by(target).takes_any
    assert (Declared.by(anything).parameters, Declared.by(anything).takes_any) == ({}, True)
