"""Messages to bytes and back: a small, versioned, length-checked schema. Nothing is unpickled.

    | magic "HPWS" | version, 2 bytes | length, 4 bytes | JSON of that length: {"Kind": {field: value, ...}} |

A kind is a frozen dataclass; its annotations are the schema. Fields are ``bool``, ``int`` (64 bits), ``str``, enums of
strings, dataclasses, tuples of these, and ``X | None``. What does not fit to the letter (unknown, missing or repeated
fields, other types, numbers too large, bytes left over) is a ``RemoteFault``: whoever sent it is at fault.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import struct
import types
import typing
from enum import Enum
from typing import Any, NoReturn

from lightning_hetpipe.server.protocol.identifiers import LocalFault, Refusal, RemoteFault

MAGIC = b"HPWS"
VERSION = 1
PREFIX = struct.Struct(">4sHI")
MAX_LENGTH = (1 << 20) - PREFIX.size
"""Bytes of JSON in one message; with what precedes it, a transport's limit for headers. The largest message lists the
parameters of a model: some 100 bytes for each."""


class Codec:
    """Encodes and decodes the message classes in ``kinds``, each known by its name."""

    def __init__(self, kinds: typing.Iterable[type[Any]]) -> None:
        self._kinds = {kind.__name__: kind for kind in kinds}

    def encode(self, message: object) -> bytes:
        """
        Raises:
            LocalFault: if ``message`` would not be understood.
        """
        kind = type(message)
        if self._kinds.get(kind.__name__) is not kind:
            raise LocalFault(f"{kind.__name__} is not a message")
        value = {kind.__name__: dataclasses.asdict(message)}  # type: ignore[call-overload]  # the kinds are dataclasses
        try:
            text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"), default=_enum).encode()
        except (TypeError, ValueError) as error:
            raise LocalFault(f"{kind.__name__} cannot be sent: {error}") from error
        if len(text) > MAX_LENGTH:
            raise LocalFault(f"a {kind.__name__} of {len(text)} bytes is more than the {MAX_LENGTH} that are allowed")
        return PREFIX.pack(MAGIC, VERSION, len(text)) + text

    def decode(self, data: bytes | memoryview) -> Any:
        """The message in ``data``, all of it.

        Raises:
            RemoteFault: if ``data`` is anything but one whole, well-formed message of this version.
        """
        if len(data) > PREFIX.size + MAX_LENGTH:
            _refuse(f"{len(data)} bytes are too many")
        data = bytes(data)
        if len(data) < PREFIX.size:
            _refuse(f"{len(data)} bytes are too few")
        magic, version, length = PREFIX.unpack_from(data)
        if magic != MAGIC:
            _refuse(f"it begins with {magic!r}")
        if version != VERSION:
            _refuse(f"it speaks version {version} of the protocol, and this is version {VERSION}")
        if length != len(data) - PREFIX.size:
            _refuse(f"it says {length} bytes and has {len(data) - PREFIX.size}")
        try:
            value = json.loads(
                data[PREFIX.size :].decode(), object_pairs_hook=_once, parse_constant=_refuse, parse_float=_refuse
            )
        except (ValueError, RecursionError) as error:  # ValueError: not UTF-8, not JSON, or a number of many digits
            raise RemoteFault(Refusal.MALFORMED, f"a message is malformed: {type(error).__name__}") from error
        if not isinstance(value, dict) or len(value) != 1:
            _refuse("it is not one object of one kind")
        ((name, fields),) = value.items()
        kind = self._kinds.get(name)
        if kind is None:
            _refuse(f"its kind is {name[:40]!r}")
        return _read(kind, fields, name)


def _refuse(why: str) -> NoReturn:
    raise RemoteFault(Refusal.MALFORMED, f"a message is malformed: {why}")


def _enum(value: object) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    raise TypeError(f"a {type(value).__name__} has no place in a message")


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
    """``value`` as a ``kind``, to the letter."""
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
