"""The settings model: an annotation declares a setting once; its check, its errors and its row in the docs follow.

    def __init__(self, in_flight: Annotated[int | Literal["auto"], Bounds(1, 1000)] = "auto") -> None:
        given = read(HetPipeStrategy, locals())

``Annotated`` takes predicates (:class:`Bounds`, :class:`Length`, :class:`Choices`, or any function of the value), and a
text that says what the setting must be, where the types do not say enough. Relations between settings are not declared:
``strategy/relations.py`` has them.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from datetime import timedelta
from functools import cache
from types import NoneType, SimpleNamespace, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from lightning_hetpipe.errors import SettingError, closest, nearest

MOST = 10**9
"""Largest number of a setting that counts waves, minibatches or steps; messages carry it in 64 bits."""

_YEAR = 365 * 24 * 3600.0
"""Longest time of a setting, in seconds; threads cannot wait for much longer."""

_OWN = ("lightning", "lightning_hetpipe")
"""Packages whose annotations hold. Other code may take text where it says ``Path``."""


@dataclass(frozen=True)
class Bounds:
    """Least and largest number."""

    least: float
    most: float = math.inf

    def __call__(self, value: Any) -> bool:
        return isinstance(value, bool) or not isinstance(value, int | float) or self.least <= value <= self.most

    def __str__(self) -> str:
        return f" of at least {self.least}" + ("" if self.most == math.inf else f" and at most {self.most}")


Size = Annotated[int, Bounds(1)]


@dataclass(frozen=True)
class Length:
    """Least and largest number of items; a text has none."""

    least: int = 1
    most: float = math.inf

    def __call__(self, value: Any) -> bool:
        has_items = isinstance(value, Sequence | Mapping) and not isinstance(value, str)
        return not has_items or self.least <= len(value) <= self.most


@dataclass(frozen=True)
class Choices:
    """Texts that are taken, where ``Literal`` would repeat a list that stands elsewhere."""

    names: Sequence[str]

    def __call__(self, value: Any) -> bool:
        return not isinstance(value, str) or value in self.names


def seconds(value: timedelta | float) -> float:
    return value.total_seconds() if isinstance(value, timedelta) else float(value)


def _is_duration(value: Any) -> bool:
    return 0 < seconds(value) <= _YEAR


Duration = Annotated[
    timedelta | float, _is_duration, "a datetime.timedelta, or a number of seconds, positive and at most a year"
]


@dataclass(frozen=True)
class Style:
    """Words of a program, or of a configuration.

    Attributes:
        show: Writes a setting at a path with its value.
        literals: Words for True, False and None.
        inner: Path of an argument inside the setting at a path.
        made: Class of the object that a mapping stands for, Any if nobody can tell; other values as they are.
    """

    show: Callable[[str, Any], str]
    literals: Mapping[Any, str]
    inner: Callable[[str, str], str]
    made: Callable[[Any], Any] = lambda value: value


PYTHON = Style(
    lambda path, value: f"{path}={value!r}",
    {True: "True", False: "False", None: "None"},
    lambda path, name: f"{path}[{name!r}]" if path else name,
)


@dataclass(frozen=True)
class Declared:
    """Arguments of a class or function that may be given by name.

    Attributes:
        parameters: By name.
        hints: Annotations by name; none if they cannot be evaluated.
        takes_any: True if any other name is taken as well (``**kwargs``).
        trusted: True if annotations that name classes hold.
        secrets: Names of arguments whose values are not shown.
    """

    parameters: Mapping[str, inspect.Parameter]
    hints: Mapping[str, Any]
    takes_any: bool = False
    trusted: bool = False
    secrets: frozenset[str] = frozenset()

    @classmethod
    def by(cls, owner: Callable[..., Any]) -> Declared:
        try:
            signature = inspect.signature(owner).parameters.values()
        except (TypeError, ValueError):  # some builtins have none
            return cls({}, {}, takes_any=True)
        try:
            hints = get_type_hints(owner.__init__ if inspect.isclass(owner) else owner, include_extras=True)
        except Exception:  # a name that is imported for type checkers only, say
            hints = {}
        by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        return cls(
            {each.name: each for each in signature if each.kind in by_name},
            hints,
            any(each.kind is each.VAR_KEYWORD for each in signature),
            owner.__module__.partition(".")[0] in _OWN,
            frozenset(each.name for each in fields(owner) if not each.repr) if is_dataclass(owner) else frozenset(),
        )

    def check(self, values: Mapping[str, Any], path: str = "", owner: str = "", style: Style = PYTHON) -> None:
        """Check ``values`` of arguments.

        Args:
            values: By name.
            path: Setting that has these arguments; empty for a call.
            owner: Name of what takes them.
            style: Words of the error.

        Raises:
            SettingError: for a name that is not declared, and for a value that the declaration does not allow.
        """
        for name, value in values.items():
            if (parameter := self.parameters.get(name)) is None:
                if not self.takes_any:
                    raise unknown(name, path, list(self.parameters), owner, style)
            elif value is not parameter.default and name in self.hints:
                hint = self.hints[name]
                if self.trusted or (is_plain(hint) and style.made(value) is value):
                    check(style.inner(path, name), value, hint, style, secret=name in self.secrets)


declared = cache(Declared.by)


def read(owner: type, values: Mapping[str, Any]) -> SimpleNamespace:
    """Check the arguments of ``owner`` among ``values``, the variables of its constructor, and return them.

    Raises:
        SettingError: one sentence that names the setting, its value and what it must be.
    """
    own = declared(owner)
    given = {name: values[name] for name in own.parameters if name in values}
    own.check(given)
    return SimpleNamespace(**given)


def check(path: str, value: Any, hint: Any, style: Style = PYTHON, *, secret: bool = False) -> None:
    """Check one value.

    Raises:
        SettingError: unless ``value`` is what ``hint`` says; of a list or mapping, the item is named that has a
            declaration of its own and does not fit it.
    """
    if not _fits(path, value, hint, style):
        names = [name for mark in _parts(hint)[1] if isinstance(mark, Choices) for name in mark.names]
        near = nearest(value, names) if isinstance(value, str) else ""
        raise SettingError(f"{path if secret else style.show(path, value)} must be {words(hint, style)}{near}")


def unknown(
    key: str, path: str, known: list[str], owner: str = "", style: Style = PYTHON, rest: str = ""
) -> SettingError:
    """Make the error for a key that nothing reads: ``key`` at ``path`` with ``rest``, instead of one of ``known``."""
    name = f"{style.inner(path, key)}{rest}"
    if (near := closest(key, known)) is not None:
        return SettingError(f"{name} is not a setting; did you mean {style.inner(path, near)}{rest}?")
    place = owner or path or "the configuration"
    return SettingError(f"{name} is not a setting; {place} has {', '.join(known) or 'none'}")


def words(hint: Any, style: Style = PYTHON) -> str:
    """Say what ``hint`` allows, as the end of "must be"."""
    said = [*dict.fromkeys(_words(hint, style))]
    if len(said) == 1:
        return said[0]
    comma = "," if any("," in each for each in said) else ""
    return f"{', '.join(said[:-1])}{comma} or {said[-1]}"


def is_plain(hint: Any) -> bool:
    """Return True if ``hint`` is made of bool, int, float, str, None and Literal."""
    return all(
        is_plain(member) if kind is Annotated else member in _PLAIN or kind is Literal
        for member, kind in _parts(hint)[0]
    )


_NOUNS = {int: "a whole number", float: "a number", str: "text"}
_PLAIN = {*_NOUNS, bool, NoneType}


def _parts(hint: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
    """Return the members of a union, each with its origin, and what ``Annotated`` says of all of them."""
    if get_origin(hint) is Annotated:
        inner, *marks = get_args(hint)
        members, others = _parts(inner)
        return members, (*marks, *others)
    members = [hint]
    while unions := [each for each in members if get_origin(each) in (Union, UnionType)]:
        members = [part for each in members for part in (get_args(each) if each in unions else (each,))]
    return [(member, get_origin(member) or member) for member in members], ()


def _words(hint: Any, style: Style) -> Iterator[str]:
    members, marks = _parts(hint)
    if (text := next((mark for mark in marks if isinstance(mark, str)), None)) is not None:
        yield text
        return
    choices = [repr(name) for mark in marks if isinstance(mark, Choices) for name in mark.names]
    bounds = "".join(str(mark) for mark in marks if isinstance(mark, Bounds))
    kinds = [kind for _, kind in members]
    for member, kind in members:
        if kind is Annotated:
            yield from _words(member, style)
        elif kind is Literal:
            yield from map(repr, get_args(member))
        elif kind in (bool, NoneType):
            yield from [style.literals[each] for each in ((True, False) if kind is bool else (None,))]
        elif kind is str and choices:
            yield from choices
        elif kind in (int, float):
            yield f"{_NOUNS[float if float in kinds else kind]}{bounds}"
        elif kind in _NOUNS:
            yield _NOUNS[kind]
        else:
            yield _noun(member, kind, style)


def _noun(member: Any, kind: Any, style: Style) -> str:
    if not inspect.isclass(kind):
        return "anything"
    if issubclass(kind, Mapping):
        return "a mapping"
    if get_args(member):
        items = [words(each, style) for each in get_args(member) if each is not ...]
        return f"[{', '.join(items)}{', ...' if len(items) == 1 else ''}]"
    is_ours = kind.__module__.startswith(f"{__package__}.")
    is_public = is_ours and kind.__name__ in sys.modules[__package__].__all__
    name = f"{__package__}.{kind.__name__}" if is_public else kind.__name__
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


def _fits(path: str, value: Any, hint: Any, style: Style) -> bool:
    members, marks = _parts(hint)
    fits = any(_is(path, value, member, kind, style) for member, kind in members)
    return fits and all(mark(value) for mark in marks if callable(mark))


def _is(path: str, value: Any, member: Any, kind: Any, style: Style) -> bool:
    """Return True if ``value`` is a ``member``, or if nobody can tell."""
    if kind is Annotated:
        return _fits(path, value, member, style)
    if kind is Literal:
        return any(type(value) is type(each) and value == each for each in get_args(member))
    made = style.made(value)
    if made is Any or not inspect.isclass(kind) or kind in (Any, object, type, Callable):  # or a type variable, say
        return True
    kinds = (int, float) if kind is float else kind
    if made is not value:
        return issubclass(made, kinds)
    if isinstance(value, Mapping | Sequence) and not isinstance(value, str | bytes):  # a list may be a tuple
        of_items = Mapping if isinstance(value, Mapping) else Iterable
        is_other = isinstance(value, Sequence) and issubclass(kind, str | Mapping)
        return issubclass(kind, of_items) and not is_other and _items_fit(path, value, get_args(member), style)
    if isinstance(value, bool | str) and (kind in (int, float) or kind is not member):
        return False  # True is no number; a text's letters are no Iterable[str]
    try:
        return isinstance(value, kinds)
    except TypeError:  # a protocol that cannot be asked
        return True


def _items_fit(path: str, values: Any, hints: Sequence[Any], style: Style) -> bool:
    """Return True if the items of a list are what ``list[int]`` or ``tuple[float, float]`` says, and a mapping's, too.

    Raises:
        SettingError: for an item with a declaration of its own.
    """
    hints = [hint for hint in hints if hint is not ...]
    if not hints:
        return True
    if isinstance(values, Mapping):
        for key in values:
            if not _fits(path, key, hints[0], style):
                raise SettingError(f"{path} has the key {key!r}, which must be {words(hints[0], style)}")
        items = [*values.items()]
        hints = hints[1:] or [Any]
    else:
        items = [*enumerate(values)]
    every = hints * len(items) if len(hints) == 1 else hints
    if len(every) != len(items):
        return False
    for (key, value), hint in zip(items, every, strict=True):
        if get_origin(hint) is Annotated:
            check(f"{path}[{key!r}]", value, hint, style)
        elif not _fits(f"{path}[{key!r}]", value, hint, style):
            return False
    return True
