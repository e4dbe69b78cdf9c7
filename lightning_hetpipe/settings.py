"""The settings model: an annotation declares a setting once. Its check, its errors and its row in the docs follow.

    def __init__(self, in_flight: Annotated[int | Literal["auto"], Bounds(1, 1000)] = "auto") -> None:
        given = read(HetPipeStrategy, locals())

``Annotated`` takes predicates (:class:`Bounds`, :class:`Length`, :class:`Choices`, or any function of the value). It
takes a text that describes allowed values if the types are not enough. :class:`Reads` makes "24 GiB" bytes.

Records are dataclasses and named tuples. They are read from mappings: of a program (:func:`take`), of a configuration,
and of JSON files (``planning/plan/json_file.py``). Relations between values are not declared: settings have them in
``strategy/relations.py``, and plans in ``planning/plan/``.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from datetime import timedelta
from enum import Enum
from functools import cache
from types import NoneType, SimpleNamespace, UnionType
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin, get_type_hints

from lightning_hetpipe.errors import SettingError, closest

MOST = 10**9
"""Largest number of a setting that counts waves, minibatches or steps. Messages carry it in 64 bits."""

_YEAR = 365 * 24 * 3600.0
"""Longest time of a setting, in seconds. Threads cannot wait for much longer."""

_OWN = ("lightning", "lightning_hetpipe")
"""Packages whose annotations are reliable. Other code may take text for ``Path``."""


@dataclass(frozen=True)
class Bounds:
    """Smallest and largest number. Infinity is not allowed."""

    least: float
    most: float = sys.float_info.max

    def __call__(self, value: Any) -> bool:
        return isinstance(value, bool) or not isinstance(value, int | float) or self.least <= value <= self.most

    def __str__(self) -> str:
        return f" of at least {self.least}" + ("" if self.most == sys.float_info.max else f" and at most {self.most}")


Size = Annotated[int, Bounds(1)]


def is_positive(value: float) -> bool:
    return value > 0


@dataclass(frozen=True)
class Length:
    """Smallest number of items. A text has no items."""

    least: int = 1

    def __call__(self, value: Any) -> bool:
        has_items = isinstance(value, Sequence | Mapping) and not isinstance(value, str)
        return not has_items or len(value) >= self.least


@dataclass(frozen=True)
class Reads:
    """Function that makes a value from, for example, "24 GiB". It is also given the setting's name for errors."""

    read: Callable[[Any, str], Any]


@dataclass(frozen=True)
class Key:
    """Key of a record's field in a document."""

    name: str


@dataclass(frozen=True)
class Choices:
    """Allowed texts, if ``Literal`` would repeat a list that is defined elsewhere."""

    names: Sequence[str]

    def __call__(self, value: Any) -> bool:
        return not isinstance(value, str) or value in self.names


def seconds(value: timedelta | float) -> float:
    return value.total_seconds() if isinstance(value, timedelta) else float(value)


Duration = Annotated[
    timedelta | float,
    lambda value: 0 < seconds(value) <= _YEAR,
    "a datetime.timedelta, or a number of seconds, positive and at most a year",
]


@dataclass(frozen=True)
class Style:
    """Way in which a source writes settings: Python, YAML, JSON or messages.

    Attributes:
        show: Formats a setting's path and value.
        literals: Words for True, False and None.
        made: Returns the class of the object that a mapping stands for, Any if unknown, and other values unchanged.
        builds: Whether records are made from mappings.
        whole: Name of the whole source, which has no path. If empty, the name of the class that is read.
    """

    show: Callable[[str, Any], str]
    literals: Mapping[Any, str]
    made: Callable[[Any], Any] = lambda value: value
    builds: bool = True
    whole: str = ""


PYTHON = Style(lambda path, value: f"{path}={value!r}", {True: "True", False: "False", None: "None"})


@dataclass(frozen=True)
class Declared:
    """Arguments of a class or function that may be given by name.

    Attributes:
        parameters: Parameters by name or by :class:`Key`.
        hints: Annotations by the same names, if they can be evaluated.
        takes_any: True if any other name is also allowed (``**kwargs``).
        trusted: True if annotations that name classes are reliable.
        secrets: Names of arguments whose values are not shown.
    """

    owner: Callable[..., Any]
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
            return cls(owner, {}, {}, takes_any=True)
        has_constructor = inspect.isclass(owner) and owner.__init__ is not object.__init__  # a named tuple has none
        hints = dict(_hints(owner.__init__ if has_constructor else owner, owner.__module__))
        by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        names = {name: mark.name for name, hint in hints.items() for mark in _parts(hint)[1] if isinstance(mark, Key)}
        return cls(
            owner,
            {names.get(each.name, each.name): each for each in signature if each.kind in by_name},
            {names.get(name, name): hint for name, hint in hints.items()},
            any(each.kind is each.VAR_KEYWORD for each in signature),
            owner.__module__.partition(".")[0] in _OWN,
            frozenset(each.name for each in fields(owner) if not each.repr) if is_dataclass(owner) else frozenset(),
        )

    def check(
        self, values: Mapping[str, Any], path: str = "", owner: str = "", style: Style = PYTHON
    ) -> dict[str, Any]:
        """Check ``values`` of arguments by name, and return what they stand for.

        ``path`` is the setting that has these arguments, or empty for a call. Errors name the ``owner`` of the
        arguments.

        Raises:
            SettingError: for an undeclared name, or a value that the declaration does not allow.
        """
        found = dict(values)
        for name, value in values.items():
            if (parameter := self.parameters.get(name)) is None:
                if not self.takes_any:
                    raise unknown(name, path, list(self.parameters), owner)
            elif value is not parameter.default and name in self.hints:
                hint = self.hints[name]
                if self.trusted or (is_plain(hint) and style.made(value) is value):
                    found[name] = check(inner(path, name), value, hint, style, secret=name in self.secrets)
        return found

    def check_whole(self, values: Mapping[str, Any], path: str, owner: str) -> None:
        """Refuse ``values`` that lack an argument without a default."""
        for name, each in self.parameters.items():
            if each.default is each.empty and name not in values:
                setting = inner(path, name)
                raise SettingError(f"{setting} is missing, {owner} needs it", f"give {setting}=...")

    def record(self, values: Mapping[str, Any], path: str, style: Style) -> Any:
        """Make the owner from ``values``. If the style builds no records, return ``values``."""
        found = replace(self, trusted=True).check(
            values, path, name := path or style.whole or self.owner.__name__, style
        )
        self.check_whole(values, path, name)
        given = {self.parameters[key].name: each for key, each in found.items()}
        return self.owner(**given) if style.builds else values


declared: Callable[[Callable[..., Any]], Declared] = cache(Declared.by)


def _hints(function: Any, module: str | None) -> Iterator[tuple[str, Any]]:
    """Yield names and evaluated annotations. ``module`` may have names that another imports for type checkers only."""
    names = getattr(sys.modules.get(module or ""), "__dict__", {})
    for name, written in inspect.get_annotations(function).items():
        with suppress(Exception):  # a class of Lightning's that is not loaded, say
            alone = SimpleNamespace(__annotations__={name: written})
            yield from get_type_hints(alone, getattr(function, "__globals__", names), names, True).items()


def read(owner: type, values: Mapping[str, Any]) -> SimpleNamespace:
    """Check the arguments of ``owner`` among ``values``, the variables of its constructor, and return them.

    Raises:
        SettingError: one sentence that names the setting, its value and what it must be.
    """
    own = declared(owner)
    return SimpleNamespace(**own.check({name: values[name] for name in own.parameters if name in values}))


class KnownNames:
    """Base of classes with declared settings: an unknown name is refused, and the nearest setting is suggested."""

    def __new__(cls, *args: Any, **settings: Any) -> Self:
        # Of a subclass, which may have settings of its own. Only names: its constructor checks values.
        replace(declared(cls), hints={}).check(settings, cls.__name__)
        return super().__new__(cls)


def take(record: object, values: Mapping[str, Any]) -> None:
    """Set fields of a frozen dataclass from ``values``, the variables of its constructor, checked as by :func:`read`.

    Errors begin with the class, and with the record's name if it has one.
    """
    own, kind, name = declared(type(record)), type(record).__name__, values.get("name")
    given = {each: values[each] for each in own.parameters}
    for field, value in own.check(given, f"{kind}({name!r})" if name and isinstance(name, str) else kind).items():
        object.__setattr__(record, field, value)


class CheckedRecord:
    """Base of dataclasses whose values are checked when they are made."""

    def __post_init__(self) -> None:
        take(self, vars(self))


class _Misfit(Exception):
    """Error that a hint does not allow a value."""


def check(path: str, value: Any, hint: Any, style: Style = PYTHON, *, secret: bool = False) -> Any:
    """Check one value, and return what it stands for.

    Raises:
        SettingError: if ``hint`` does not allow ``value``. It names an item that has its own declaration.
    """
    try:
        return _read(path, value, hint, style)
    except _Misfit:
        names = [name for mark in _parts(hint)[1] if isinstance(mark, Choices) for name in mark.names]
        near = closest(value, names) if isinstance(value, str) else None
        shown = path if secret else style.show(path, value)
        raise SettingError(f"{shown} must be {words(hint, style)}", f"did you mean '{near}'?" if near else "") from None


def inner(path: str, name: str) -> str:
    """Return the path of an argument of the setting at ``path``."""
    return f"{path}.{name}" if path else name


def unknown(key: str, path: str, known: list[str], owner: str = "", rest: str = "") -> SettingError:
    """Make the error for the unknown ``key`` at ``path`` with ``rest``, which suggests one of ``known``."""
    name = f"{inner(path, key)}{rest}"
    if (near := closest(key, known)) is not None:
        return SettingError(f"{name} is not a setting", f"did you mean {inner(path, near)}{rest}?")
    place = owner or path or "the configuration"
    return SettingError(f"{name} is not a setting, and {place} has {', '.join(known) or 'none'}")


def words(hint: Any, style: Style = PYTHON) -> str:
    """Describe what ``hint`` allows, as the end of "must be"."""
    said = [*dict.fromkeys(_words(hint, style))]
    if any(each.startswith("a mapping of ") for each in said):
        said = [each for each in said if each != "a mapping"]
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

Parts = tuple[list[tuple[Any, Any]], tuple[Any, ...]]
_known: dict[int, tuple[Any, Parts]] = {}
"""Cache of hints and their parts by the hint's ``id``, because some hints have no hash."""


def _parts(hint: Any) -> Parts:
    """Return the members of a union, each with its origin, and the marks of ``Annotated`` for all members."""
    if (known := _known.get(id(hint))) is None:
        known = _known[id(hint)] = hint, _take_apart(hint)
    return known[1]


def _take_apart(hint: Any) -> Parts:
    if get_origin(hint) is Annotated:
        inner, *marks = get_args(hint)
        members, others = _take_apart(inner)
        return members, (*marks, *others)
    union = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)  # whose members are no unions
    return [(member, get_origin(member) or member) for member in union], ()


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
    if is_record(kind) and not is_public:
        return f"a mapping of {', '.join(declared(kind).parameters)}"
    name = f"{__package__}.{kind.__name__}" if is_public else kind.__name__
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


def is_record(kind: Any) -> bool:
    """Return True for a dataclass or a named tuple."""
    return inspect.isclass(kind) and (is_dataclass(kind) or (issubclass(kind, tuple) and hasattr(kind, "_fields")))


def _read(path: str, value: Any, hint: Any, style: Style) -> Any:
    """Return what ``value`` stands for by ``hint``, or raise :class:`_Misfit`, or SettingError for an item."""
    members, marks = _parts(hint)
    for member, kind in members:
        with suppress(_Misfit):
            made = _as(path, value, member, kind, style)
            break
    else:
        raise _Misfit
    for mark in marks:
        if isinstance(mark, Reads):
            made = mark.read(made, path) if style.builds or isinstance(made, str | int | float) else made
        elif callable(mark) and not mark(made):
            raise _Misfit
    return made


def _as(path: str, value: Any, member: Any, kind: Any, style: Style) -> Any:
    """Return ``value`` as a ``member``, or unchanged if its type cannot be checked."""
    if kind is Annotated:
        return _read(path, value, member, style)
    if kind is Literal:
        fits = any(type(value) is type(each) and value == each for each in get_args(member))
    elif inspect.isclass(kind) and issubclass(kind, Enum) and value in [each.value for each in kind]:
        return kind(value)
    elif (made := style.made(value)) is Any or not inspect.isclass(kind) or kind in (Any, object, type, Callable):
        return value  # or the hint is a type variable, say
    elif made is not value:
        fits = issubclass(made, (int, float) if kind is float else kind)
    elif is_record(kind):
        if isinstance(value, Mapping):
            return declared(kind).record(value, path, style)
        fits = isinstance(value, kind)
    elif isinstance(value, Mapping | Sequence) and not isinstance(value, str | bytes):  # a list may be a tuple
        is_other = isinstance(value, Sequence) and issubclass(kind, str | Mapping)
        if is_other or not issubclass(kind, Mapping if isinstance(value, Mapping) else Iterable):
            raise _Misfit
        return _items(path, value, get_args(member), kind, style)
    elif isinstance(value, bool | str) and (kind in (int, float) or kind is not member):
        raise _Misfit  # True is no number; a text's letters are no Iterable[str]
    else:
        try:
            fits = isinstance(value, (int, float) if kind is float else kind)
        except TypeError:  # a protocol that cannot be asked
            fits = True
    if not fits:
        raise _Misfit
    return value


def _items(path: str, values: Any, hints: Sequence[Any], kind: type, style: Style) -> Any:
    """Return the items of a list or mapping as ``list[int]`` or ``tuple[float, float]`` says."""
    hints = [hint for hint in hints if hint is not ...]
    if not hints:
        return values
    if isinstance(values, Mapping):
        for key in values:
            try:
                _read(path, key, hints[0], style)
            except _Misfit:
                raise SettingError(f"{path} has the key {key!r}, which must be {words(hints[0], style)}") from None
        items = [*values.items()]
        hints = hints[1:] or [Any]
    else:
        items = [*enumerate(values)]
    every = hints * len(items) if len(hints) == 1 else hints
    if len(every) != len(items):
        raise _Misfit
    made = {}
    for (key, value), hint in zip(items, every, strict=True):
        reader = check if get_origin(hint) is Annotated or is_record(hint) else _read
        made[key] = reader(f"{path}[{key!r}]", value, hint, style)
    return made if isinstance(values, Mapping) else tuple(made.values()) if kind is tuple else [*made.values()]
