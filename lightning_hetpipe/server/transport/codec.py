"""JSON code of dataclasses, checked to the letter on the way back: the only encoding on the wire. Nothing is unpickled.

    {"Kind": {"field": value, ...}}

A kind is a frozen dataclass; its annotations are the schema. Fields are ``bool``, ``int`` (64 bits), ``str``, enums of
strings, dataclasses, tuples of these, and ``X | None``. Unknown, missing or repeated fields, values of other types and
numbers out of range are `Malformed`. The transport's frames carry length and version (``frames``).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from enum import Enum
from typing import Any, NoReturn


class Malformed(Exception):
    """Received bytes are not what this version sends; the sender is at fault."""


class Codec:
    """Encoder and decoder of the dataclasses in ``kinds``, each known by its name.

    Args:
        limit: bytes of one encoded message, at most.
    """

    def __init__(self, kinds: typing.Iterable[type[Any]], limit: int) -> None:
        self._kinds = {kind.__name__: kind for kind in kinds}
        self._limit = limit

    def encode(self, message: object) -> bytes:
        """
        Raises:
            ValueError: if the other side would not accept ``message``.
        """
        kind = type(message)
        if self._kinds.get(kind.__name__) is not kind:
            raise ValueError(f"{kind.__name__} is not a message")
        value = {kind.__name__: dataclasses.asdict(message)}  # type: ignore[call-overload]  # the kinds are dataclasses
        try:
            text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"), default=_enum).encode()
        except (TypeError, ValueError) as error:
            raise ValueError(f"{kind.__name__} cannot be sent: {error}") from error
        if len(text) > self._limit:
            raise ValueError(f"a {kind.__name__} of {len(text)} bytes is more than the {self._limit} that are allowed")
        return text

    def decode(self, data: bytes | memoryview) -> Any:
        """
        Raises:
            Malformed: if ``data`` is not exactly one well-formed message.
        """
        if len(data) > self._limit:
            _refuse(f"{len(data)} bytes are too many")
        try:
            value = json.loads(
                bytes(data).decode(), object_pairs_hook=_once, parse_constant=_refuse, parse_float=_refuse
            )
        except (ValueError, RecursionError) as error:  # ValueError: not UTF-8, not JSON, or a number of many digits
            raise Malformed(f"a message is malformed: {type(error).__name__}") from error
        if not isinstance(value, dict) or len(value) != 1:
            _refuse("it is not one object of one kind")
        ((name, fields),) = value.items()
        kind = self._kinds.get(name)
        if kind is None:
            _refuse(f"its kind is {name[:40]!r}")
        return _read(kind, fields, name)


def _refuse(why: str) -> NoReturn:
    raise Malformed(f"a message is malformed: {why}")


def _enum(value: object) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    raise TypeError(f"a field of type {type(value).__name__} is not supported")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        _refuse("a field is repeated")
    return found


@functools.cache
def _schema(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _read(kind: Any, value: Any, where: str) -> Any:
    """Return ``value`` as a ``kind``, without any conversion that loses information."""
    origin = typing.get_origin(kind)
    if origin is tuple:
        item, more = typing.get_args(kind)
        assert more is Ellipsis
        if not isinstance(value, list):
            _refuse(f"{where} is not a list")
        return tuple(_read(item, each, where) for each in value)
    if origin in (types.UnionType, typing.Union):
        (other,) = (each for each in typing.get_args(kind) if each is not types.NoneType)
        return None if value is None else _read(other, value, where)
    if dataclasses.is_dataclass(kind):
        schema = _schema(typing.cast(type, kind))
        if not isinstance(value, dict) or value.keys() != schema.keys():
            _refuse(f"{where} has not the fields {', '.join(schema)}")
        return typing.cast(type, kind)(**{name: _read(schema[name], value[name], f"{where}.{name}") for name in schema})
    if issubclass(kind, Enum):
        if not isinstance(value, str) or value not in (each.value for each in kind):
            _refuse(f"{where} is none of its choices")
        return kind(value)
    if type(value) is not kind:  # an int is not a bool, nor the other way round
        _refuse(f"{where} is not of type {kind.__name__}")
    if kind is int and not -(1 << 63) <= value < 1 << 63:
        _refuse(f"{where} does not fit into 64 bits")
    if kind is str:
        try:
            value.encode()
        except UnicodeEncodeError:
            _refuse(f"{where} is not text")
    return value
