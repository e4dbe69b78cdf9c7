"""Plain data to bytes and back: what messages and graphs are made of. Nothing is pickled, nothing names a class freely.

    | length, 8 bytes | JSON of that length | the bytes of each tensor, in order |

JSON has ``None``, ``bool``, ``int`` and ``str`` as they are, and everything else as a list that begins with a tag.
Records (named tuples and dataclasses) are known by name to who encodes and to who decodes. A tensor keeps its strides,
by which operators choose how they compute, down to the last bits. It arrives on the host, and tensors that shared
memory do so no longer.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_hetpipe.pipeline import left_out  # noqa: F401  # a structure may have its nodes
from lightning_hetpipe.torch_private.tensors import pytree

_LENGTH = struct.Struct(">Q")
_NAMED = {kind.__name__: kind for kind in (list, tuple)}
_OF_TORCH = (torch.dtype, torch.layout, torch.memory_format)


class NotPlain(TypeError):
    """A value that has no place in messages or graphs, or bytes that are neither."""


class PlainCode:
    """Encodes and decodes plain data, with the record classes ``kinds`` in it."""

    def __init__(self, kinds: Iterable[type[Any]] = ()) -> None:
        self._kinds = {kind.__name__: kind for kind in kinds}

    def encode(self, value: Any) -> bytes:
        """
        Raises:
            NotPlain: for a value of any other kind.
        """
        tensors: list[Tensor] = []
        text = json.dumps(self._written(value, tensors), separators=(",", ":")).encode()
        return b"".join([_LENGTH.pack(len(text)), text, *map(_bytes_of, tensors)])

    def decode(self, data: bytes | memoryview) -> Any:
        """
        Raises:
            NotPlain: if ``data`` is nothing that :meth:`encode` gives.
        """
        view = memoryview(bytearray(data))  # tensors lie in it, and may be changed
        try:
            (length,) = _LENGTH.unpack_from(view)
            start = _LENGTH.size + length
            value, end = self._read(json.loads(bytes(view[_LENGTH.size : start])), view, start)
        except (KeyError, IndexError, ValueError, TypeError, struct.error) as error:
            raise NotPlain(f"bytes that are no message ({error})") from error
        if end != len(view):
            raise NotPlain(f"{len(view) - end} bytes are left over")
        return value

    def _written(self, value: Any, tensors: list[Tensor]) -> Any:
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            return ["float", value.hex()]
        if isinstance(value, Tensor):
            tensors.append(value)
            return ["tensor", str(value.dtype)[6:], list(value.shape), list(value.stride())]
        if isinstance(value, torch.device):
            return ["device", str(value)]
        if isinstance(value, _OF_TORCH):
            return ["torch", str(value)[6:]]
        if isinstance(value, pytree.TreeSpec):
            return ["spec", pytree.treespec_dumps(value)]
        name = type(value).__name__
        if self._kinds.get(name) is type(value):
            return ["record", name, *(self._written(field, tensors) for field in _fields(value))]
        if isinstance(value, slice):
            return ["slice", *(self._written(each, tensors) for each in (value.start, value.stop, value.step))]
        if isinstance(value, dict):
            return ["dict", *([self._written(k, tensors), self._written(v, tensors)] for k, v in value.items())]
        if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
            return ["list" if isinstance(value, list) else "tuple", *(self._written(each, tensors) for each in value)]
        raise NotPlain(f"a {type(value).__module__}.{type(value).__qualname__} has no place in a message")

    def _read(self, written: Any, data: memoryview, at: int) -> tuple[Any, int]:
        """The value of ``written``, whose tensors begin ``at`` that byte, and where they end."""
        if not isinstance(written, list):
            return written, at
        tag, *rest = written
        if tag == "tensor":
            dtype, shape, stride = rest
            return _tensor_of(dtype, shape, stride, data, at)
        if tag == "float":
            return float.fromhex(rest[0]), at
        if tag == "device":
            return torch.device(rest[0]), at
        if tag == "torch":
            found = getattr(torch, rest[0])
            if not isinstance(found, _OF_TORCH):
                raise NotPlain(f"torch.{rest[0]} has no place in a message")
            return found, at
        if tag == "spec":
            return pytree.treespec_loads(rest[0]), at
        name = rest.pop(0) if tag == "record" else None
        parts = []
        for each in rest if tag != "dict" else [half for pair in rest for half in pair]:
            part, at = self._read(each, data, at)
            parts.append(part)
        if tag == "record":
            return self._kinds[str(name)](*parts), at
        if tag == "dict":
            return dict(zip(parts[::2], parts[1::2], strict=True)), at
        return (slice(*parts) if tag == "slice" else _NAMED[tag](parts)), at


def _fields(record: Any) -> Iterable[Any]:
    """Arguments of its class: each field of a named tuple or dataclass; any other tuple as one argument."""
    if dataclasses.is_dataclass(record):
        return [getattr(record, field.name) for field in dataclasses.fields(record)]
    return record if hasattr(record, "_fields") else [tuple(record)]


def _stored(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    """The sizes of what is sent of a tensor: of a dimension along which it repeats itself, one place."""
    return [min(size, 1) if step == 0 else size for size, step in zip(shape, stride, strict=True)]


def _bytes_of(tensor: Tensor) -> bytes:
    if tensor.layout is not torch.strided:
        raise NotPlain(f"a tensor of layout {tensor.layout} has no place in a message")
    stored = tensor.detach()
    for dim, size in enumerate(_stored(tensor.shape, tensor.stride())):
        stored = stored.narrow(dim, 0, size)
    packed = torch.empty(stored.shape, dtype=stored.dtype)
    packed.copy_(stored)
    return bytes(packed.view(-1).view(torch.uint8).numpy()) if packed.numel() else b""


def _tensor_of(dtype: str, shape: list[int], stride: list[int], data: memoryview, at: int) -> tuple[Tensor, int]:
    kind = getattr(torch, dtype)
    if not isinstance(kind, torch.dtype):
        raise NotPlain(f"torch.{dtype} is no dtype")
    sizes = _stored(shape, stride)
    length = math.prod(sizes) * kind.itemsize
    found = torch.empty_strided(sizes, stride, dtype=kind)
    if length:
        sent = torch.frombuffer(data, dtype=torch.uint8, count=length, offset=at).clone()
        found.copy_(sent.view(kind).view(sizes))
    return found.as_strided(shape, stride), at + length
