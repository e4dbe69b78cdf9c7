"""Plain data to bytes and back, for messages and graphs. Nothing is pickled, and nothing names a class freely.

The bytes are JSON, then the bytes of each tensor in order. JSON has ``None``, ``bool``, numbers and ``str`` as they
are, and all else as a list that begins with a tag. Encoder and decoder know records (named tuples and dataclasses) by
name. An error travels as its class's name, its text and its notes. A tensor keeps its strides, which decide on the last
bits of operators. It arrives on the host, and tensors that shared memory no longer do.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from lightning_hetpipe.errors import Discarded, SettingError
from lightning_hetpipe.pipeline import values  # noqa: F401  # a structure may have nodes that it registers
from lightning_hetpipe.torch_private.tensors import pytree

Take = Callable[[int], Tensor]
"""Returns the next so many bytes as a tensor of ``torch.uint8`` in memory of its own."""

_NAMED = {kind.__name__: kind for kind in (list, tuple)}
_FACTORIES = ("list", "dict", "set", "tuple", "int", "float", "str", "bool")
_OF_TORCH = (torch.dtype, torch.layout, torch.memory_format)


class NotPlain(TypeError):
    """A value that has no place in messages or graphs, or bytes that are no message."""


class RemoteFailure(RuntimeError):
    """Error of another process, unless :data:`STAYING` has its class."""


STAYING: Mapping[str, type[Exception]] = {
    SettingError.__name__: SettingError,  # its text is for users
    torch.OutOfMemoryError.__name__: torch.OutOfMemoryError,
}
"""Errors that keep their class, by name."""


class PlainCode:
    """Encoder and decoder of plain data, with the record classes ``kinds``."""

    def __init__(self, kinds: Iterable[type[Any]] = ()) -> None:
        self._kinds = {kind.__name__: kind for kind in kinds}

    def write(self, value: Any) -> tuple[bytes, list[memoryview]]:
        """Return JSON and the bytes of each tensor, without a copy if they lie in order in its memory.

        Raises:
            NotPlain: for a value of any other kind.
        """
        tensors: list[Tensor] = []
        text = json.dumps(self._written(value, tensors), separators=(",", ":")).encode()
        return text, [*map(_bytes_of, tensors)]

    def read(self, text: bytes, take: Take) -> Any:
        """Return the value that :meth:`write` was given. ``take`` returns the bytes of one tensor after the other.

        Raises:
            NotPlain: if :meth:`write` cannot have made the bytes.
        """
        try:
            return self._read(json.loads(text), take)
        except (KeyError, IndexError, ValueError, TypeError, AttributeError) as error:
            raise NotPlain(f"bytes that are no message ({error})") from error

    def _written(self, value: Any, tensors: list[Tensor]) -> Any:
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, complex):
            return ["complex", value.real, value.imag]
        if isinstance(value, Tensor):
            tensors.append(value)
            return ["tensor", str(value.dtype)[6:], list(value.shape), list(value.stride())]
        if isinstance(value, torch.device):
            return ["device", str(value)]
        if isinstance(value, _OF_TORCH):
            return ["torch", str(value)[6:]]
        if isinstance(value, pytree.TreeSpec):
            return ["spec", _checked(pytree.treespec_dumps(value))]
        name = type(value).__name__
        if isinstance(value, BaseException):
            return ["error", name, str(value), *map(str, getattr(value, "__notes__", ()))]
        if self._kinds.get(name) is type(value):
            return ["record", name, *(self._written(field, tensors) for field in _fields(value))]
        if isinstance(value, slice):
            return ["slice", *(self._written(each, tensors) for each in (value.start, value.stop, value.step))]
        if isinstance(value, dict):
            return ["dict", *([self._written(k, tensors), self._written(v, tensors)] for k, v in value.items())]
        if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
            return ["list" if isinstance(value, list) else "tuple", *(self._written(each, tensors) for each in value)]
        raise NotPlain(f"a {type(value).__module__}.{type(value).__qualname__} has no place in a message")

    def _read(self, written: Any, take: Take) -> Any:
        if not isinstance(written, list):
            return written
        tag, *rest = written
        if tag == "tensor":
            dtype, shape, stride = rest
            return _tensor_of(dtype, shape, stride, take)
        if tag == "complex":
            return complex(*rest)
        if tag == "device":
            return torch.device(rest[0])
        if tag == "torch":
            found = getattr(torch, rest[0])
            if not isinstance(found, _OF_TORCH):
                raise NotPlain(f"torch.{rest[0]} has no place in a message")
            return found
        if tag == "spec":
            return pytree.treespec_loads(_checked(rest[0]))
        if tag == "error":
            return _error_of(*rest)
        name = rest.pop(0) if tag == "record" else None
        if tag == "dict":
            return {self._read(key, take): self._read(value, take) for key, value in rest}
        parts = [self._read(each, take) for each in rest]
        if tag == "record":
            return self._kinds[str(name)](*parts)
        return slice(*parts) if tag == "slice" else _NAMED[tag](parts)


def _error_of(name: str, text: str, *notes: str) -> BaseException:
    if name == Discarded.__name__:
        return Discarded()
    error = STAYING[name](text) if name in STAYING else RemoteFailure(f"{name}: {text}")
    for note in notes:
        error.add_note(note)
    return error


def _checked(spec: str) -> str:
    """Return ``spec`` after a check that torch imports for it only what each process has."""
    _check(json.loads(spec))
    return spec


def _check(part: Any) -> None:
    """Refuse a spec that names what torch would import: an enum, or functions that are not Python's own."""
    if isinstance(part, str) and part[:1] in ("[", "{"):  # contexts are JSON in JSON
        with suppress(ValueError):
            _check(json.loads(part))
    elif isinstance(part, list):
        for each in part:
            _check(each)
    elif isinstance(part, dict):
        module, name = part.get("default_factory_module", "builtins"), part.get("default_factory_name", "list")
        if "__enum__" in part or module != "builtins" or name not in _FACTORIES:
            raise NotPlain(
                f"a structure with {name if '__enum__' not in part else 'an enum'} has no place in a message"
            )
        for each in part.values():
            _check(each)


def _fields(record: Any) -> Iterable[Any]:
    """Return the arguments of a record's class: each field, or for any other tuple the tuple itself."""
    if dataclasses.is_dataclass(record):
        return [getattr(record, field.name) for field in dataclasses.fields(record)]
    return record if hasattr(record, "_fields") else [tuple(record)]


def _stored(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    """Return the sizes of the sent part of a tensor: one place along a dimension in which it repeats itself."""
    return [min(size, 1) if step == 0 else size for size, step in zip(shape, stride, strict=True)]


def _order(sizes: Sequence[int], stride: Sequence[int]) -> list[int] | None:
    """Return the dimensions from the slowest to the fastest, or None if elements do not lie one behind the other."""
    order = sorted(range(len(sizes)), key=lambda dim: (stride[dim], sizes[dim]), reverse=True)
    step = 1
    for dim in reversed(order):
        if sizes[dim] != 1:
            if stride[dim] != step:
                return None
            step *= sizes[dim]
    return order


def _bytes_of(tensor: Tensor) -> memoryview:
    if tensor.layout is not torch.strided:
        raise NotPlain(f"a tensor of layout {tensor.layout} has no place in a message")
    packed = tensor.detach()
    sizes = _stored(tensor.shape, tensor.stride())
    for dim, size in enumerate(sizes):
        packed = packed.narrow(dim, 0, size)
    if (order := _order(sizes, tensor.stride())) is not None:
        packed = packed.permute(order)
    if packed.device.type != "cpu" or not packed.is_contiguous() or packed.is_conj() or packed.is_neg():
        packed = torch.empty(packed.shape, dtype=packed.dtype).copy_(packed)
    if not packed.numel():
        return memoryview(b"")
    found: Any = packed.as_strided((packed.numel(),), (1,)).view(torch.uint8).numpy()
    return memoryview(found)


def _tensor_of(dtype: str, shape: list[int], stride: list[int], take: Take) -> Tensor:
    kind = getattr(torch, dtype)
    if not isinstance(kind, torch.dtype):
        raise NotPlain(f"torch.{dtype} is no dtype")
    sizes = _stored(shape, stride)
    if not (length := math.prod(sizes) * kind.itemsize):
        return torch.empty_strided(shape, stride, dtype=kind)
    found = take(length).view(kind)
    if _order(sizes, stride) is None:
        found = torch.empty_strided(sizes, stride, dtype=kind).copy_(found.view(sizes))
    return found.as_strided(shape, stride)
