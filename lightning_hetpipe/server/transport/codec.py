"""JSON code of dataclasses, checked strictly at decoding: the only encoding on the wire. Nothing is unpickled.

    {"Kind": {"field": value, ...}}

A kind is a frozen dataclass. Its annotations are the schema, which the settings model reads. Fields are ``bool``,
``int`` (64 bits), ``str``, enums of strings, dataclasses, tuples of these types, and ``X | None``. Decoding raises
`Malformed` for unknown or repeated fields, missing fields without a default, values of other types, and numbers out of
range. The transport's frames carry length and version (``frames``).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable
from enum import Enum
from functools import partial
from types import NoneType, UnionType
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.server.transport.security import printable
from lightning_hetpipe.settings import Style, check

_WIRE = Style(lambda path, value: path, {True: "true", False: "false", None: "null"})
"""Wording of errors that go back to the sender of a message. They repeat no value."""


class Malformed(Exception):
    """Error for received bytes that this version does not send. The sender is at fault."""


class Codec:
    """Encoder and decoder of the dataclasses ``kinds``, known by name, in messages of at most ``limit`` bytes."""

    def __init__(self, kinds: Iterable[type[Any]], limit: int) -> None:
        self._kinds = {kind.__name__: kind for kind in kinds}
        self._readers = {name: _reader(kind) for name, kind in self._kinds.items()}
        self._limit = limit

    def encode(self, message: object) -> bytes:
        """Encode ``message``. Raise ValueError if the receiver would not accept it."""
        kind = type(message)
        if self._kinds.get(kind.__name__) is not kind:
            raise ValueError(f"{kind.__name__} is not a message")
        options: Any = {"allow_nan": False, "ensure_ascii": False, "separators": (",", ":"), "default": _plain}
        try:
            text = json.dumps({kind.__name__: message}, **options).encode()
        except (TypeError, ValueError) as error:
            raise ValueError(f"{kind.__name__} cannot be sent: {error}") from error
        if len(text) > self._limit:
            raise ValueError(f"a {kind.__name__} of {len(text)} bytes is more than the {self._limit} that are allowed")
        return text

    def decode(self, data: bytes | memoryview) -> Any:
        """Decode ``data``. Raise Malformed if it is not exactly one well-formed message."""
        if len(data) > self._limit:
            _refuse(f"{len(data)} bytes are too many")
        try:
            value = json.loads(
                bytes(data).decode(),
                object_pairs_hook=_once,
                parse_constant=_refuse,
                parse_float=_refuse,
                parse_int=_integer,
            )
            json.dumps(value, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:  # ValueError: not UTF-8, not JSON, or a number of many digits
            raise Malformed(f"a message is malformed: {type(error).__name__}") from error
        if not isinstance(value, dict) or len(value) != 1:
            _refuse("it is not one object of one kind")
        ((name, fields),) = value.items()
        kind = self._kinds.get(name)
        if kind is None:
            _refuse(f"its kind is {name[:40]!r}")
        try:
            return self._readers[name](fields)
        except (KeyError, TypeError, SettingError):
            pass  # below, the settings model finds what is wrong
        try:
            return check(name, fields, kind, _WIRE)
        except SettingError as error:
            _refuse(printable(str(error)))  # it may contain a stranger's key


def _refuse(why: str) -> NoReturn:
    raise Malformed(f"a message is malformed: {why}")


def _reader(hint: Any) -> Callable[[Any], Any]:
    """Make a function that reads values of type ``hint``, several times as fast as the settings model. The function
    raises TypeError, KeyError or SettingError for values that `Codec.encode` does not send."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is UnionType:
        (present,) = [_reader(part) for part in parts if part is not NoneType]
        return lambda value: None if value is None else present(value)
    if origin is tuple:
        item = _reader(parts[0])
        return lambda value: tuple([item(each) for each in _of_type(list, value)])
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        hints = get_type_hints(hint, include_extras=True)
        readers = [(field.name, _reader(hints[field.name])) for field in dataclasses.fields(hint)]

        def record(value: Any) -> Any:
            if len(_of_type(dict, value)) != len(readers):
                raise TypeError
            return hint(*[read(value[name]) for name, read in readers])

        return record
    if hint in (bool, int, str):
        return partial(_of_type, hint)
    return lambda value: check("", value, hint, _WIRE)


def _of_type(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError
    return value


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value):
        return vars(value)
    if isinstance(value, Enum):
        return value.value
    raise TypeError(f"a field of type {type(value).__name__} is not supported")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        _refuse("a field is repeated")
    return found


def _integer(digits: str) -> int:
    if not -(1 << 63) <= (value := int(digits)) < 1 << 63:
        _refuse("a number does not fit into 64 bits")
    return value
