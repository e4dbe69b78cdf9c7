"""Objects that hold tensors: dataclasses, which are registered with pytree, and opaque ones, which do not cross."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hetpipe.capture.contents import PLAIN, attributes_of
from lightning_hetpipe.pipeline.left_out import LeftOut
from lightning_hetpipe.torch_private.tensors import pytree

_INPUTS = (Tensor, *PLAIN, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.ScriptObject, nn.Module)
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)  # sizes, while a graph is made


def opaque_in(value: Any) -> Any | None:
    """The first object in ``value`` that holds tensors and is no nesting of tuples, lists and dicts; None if none is.

    Such are subclasses of ``dict`` and objects with attributes, unless they are registered with torch's pytree (as
    Hugging Face's outputs are). Dataclasses are registered here, if their fields are all that there is of them.
    """
    return next(filter(_is_opaque, _leaves(value)), None)


def unknown_in(value: Any) -> Any | None:
    """The first object in ``value`` of which torch.export makes no input, whether it holds tensors or not; None if
    there is none."""
    return next((leaf for leaf in _leaves(value) if not isinstance(leaf, _INPUTS)), None)


def without_opaque(name: str, output: Any) -> Any:
    """``output`` of the module ``name``, with a placeholder for each object such as :func:`opaque_in` finds."""
    if not any(map(_is_opaque, _leaves(output))):
        return output
    return pytree.tree_map(lambda leaf: LeftOut(type(leaf).__name__, name) if _is_opaque(leaf) else leaf, output)


def _leaves(value: Any) -> list[Any]:
    """The leaves of ``value``; registers the classes of plain dataclasses in it, for the whole process."""
    while classes := {type(leaf) for leaf in pytree.tree_leaves(value) if _is_plain_dataclass(leaf)}:
        for each in classes:
            torch.export.register_dataclass(each)
    return pytree.tree_leaves(value)


def _is_opaque(leaf: Any) -> bool:
    return not isinstance(leaf, (Tensor, *_SYMBOLS)) and _holds_tensors(leaf, set())


def _is_plain_dataclass(item: Any) -> bool:
    """Tell whether ``item`` can be made again from its fields."""
    if not dataclasses.is_dataclass(item) or isinstance(item, (type, Mapping)):
        return False
    fields = {field.name: getattr(item, field.name, None) for field in dataclasses.fields(item)}
    return (
        set(inspect.signature(type(item)).parameters) == set(fields)
        and set(getattr(item, "__dict__", ())) <= set(fields)
        and _holds_tensors(item, set())
        and _keeps(type(item), fields)
    )


def _keeps(kind: type, fields: Mapping[str, Any]) -> bool:
    """Tell whether a ``kind`` that is made of ``fields`` holds these very objects, and ``__post_init__`` no others."""
    try:
        made = kind(**fields)
    except Exception:  # whatever __post_init__ raises
        return False
    return all(getattr(made, name, None) is value for name, value in fields.items())


def _holds_tensors(item: Any, seen: set[int]) -> bool:
    if isinstance(item, Tensor):
        return True
    if id(item) in seen or isinstance(item, (str, bytes, type)) or callable(item):
        return False
    seen.add(id(item))
    return any(_holds_tensors(part, seen) for part in _parts(item))


def _parts(item: Any) -> Iterable[Any]:
    if isinstance(item, Mapping):
        yield from item.values()
    elif isinstance(item, (tuple, list, set, frozenset)):
        yield from item
    yield from attributes_of(item).values()
