"""Plain attributes of modules, which no ``state_dict`` knows: copies of a layer in stages do not share them."""

from __future__ import annotations

import operator
from collections import Counter, deque
from collections.abc import Sequence
from types import MemberDescriptorType
from typing import Any

from torch import nn

from lightning_hetpipe.errors import PipelineRefusal
from lightning_hetpipe.pipeline.computed_weights import computed_names
from lightning_hetpipe.pipeline.random import generators
from lightning_hetpipe.redirect import Redirect

_ABSENT = object()
PLAIN = (int, float, complex, str, bytes, bool, type(None))
CONTAINERS = (dict, list, set, deque)
"""Containers whose items may be exchanged."""
# What torch keeps for itself. An RNN rebuilds its lists of weights as it likes; on meta, it draws no random numbers.
_TORCHS_OWN = {
    name
    for owner in (nn.Module(), nn.RNN(1, 1, device="meta"), nn.Module)
    for name in vars(owner)
    if name.startswith("_") or name == "training"
}


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """The entries of ``vars(module)`` that a user's code may set.

    Left out are parameters, buffers, submodules, hooks and what else ``nn.Module`` keeps for itself, ``training``, and
    tensors that ``torch.nn.utils`` computes from parameters (``weight`` from ``weight_g`` and ``weight_v``). Where an
    object of ours stands in for a method, what it has replaced is given.
    """
    computed = computed_names(module)
    found: dict[str, Any] = {}
    for name, value in vars(module).items():
        if name in _TORCHS_OWN or name in computed:
            continue
        value = _behind_stand_ins(name, value)
        if value is not _ABSENT:
            found[name] = value
    return found


def attributes_with_contents(module: nn.Module) -> dict[str, Any]:
    """``plain_attributes``, to be compared: a list, dict, set or deque is given as a tuple of itself and its items."""
    return {name: with_contents(value) for name, value in plain_attributes(module).items()}


def changed_attribute(before: dict[str, Any], after: dict[str, Any]) -> str | None:
    """The name of the first attribute that was added, removed or changed; None if there is none.

    Values are the same if they are the same object, or equal numbers, strings or tuples of such. Others, tensors among
    them, are never compared with ``==``.
    """
    for name in (*before, *after):
        if not same(before.get(name, _ABSENT), after.get(name, _ABSENT)):
            return name
    return None


def refuse_changes(layer: str, module: nn.Module, before: dict[str, Any]) -> None:
    """Refuses what ``module``'s forward, in ``layer``, has changed of ``attributes_with_contents``."""
    if changed := changed_attribute(before, attributes_with_contents(module)):
        raise sets_attribute(layer, module, changed)


class SetsState(PipelineRefusal):
    """Refusal of a module that sets an attribute, or puts a tensor in the place of a buffer, in forward."""


def sets_attribute(layer: str, module: nn.Module, attribute: str, line: str | None = None) -> SetsState:
    """The forward of ``layer`` changes an ``attribute`` of ``module`` in it, in this ``line`` of the user's."""
    where = f" ({line})" if line else ""
    return SetsState(
        f"layer '{layer}' sets its attribute '{attribute}' (of {type(module).__name__}) in forward{where}, which only"
        " its copies in the stages would see; make it a buffer (register_buffer), or return it with the output"
    )


def _behind_stand_ins(name: str, value: Any) -> Any:
    """Attribute as the user has set it, behind what random generators and redirects have put in its place."""
    while isinstance(value, Redirect) or (name == "forward" and type(value).__module__ == generators.__name__):
        replaced = getattr(value, "replaced", None)
        value = _ABSENT if replaced is None else replaced
    return value


def with_contents(value: Any) -> Any:
    """``value``, of a container with its items."""
    return (value, *items_of(value)) if isinstance(value, CONTAINERS) else value


def items_of(container: Any) -> tuple[Any, ...]:
    """The items of one of ``CONTAINERS``; of a dict its keys, then its values."""
    return (*container, *container.values()) if isinstance(container, dict) else tuple(container)


def refill(container: Any, items: Sequence[Any]) -> None:
    """Give one of ``CONTAINERS`` the ``items`` that :func:`items_of` has given earlier, and no others."""
    container.clear()
    if isinstance(container, dict):
        half = len(items) // 2
        (dict if isinstance(container, Counter) else type(container)).update(
            container, zip(items[:half], items[half:], strict=True)
        )
    elif isinstance(container, set):
        container.update(items)
    else:
        container.extend(items)


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes that ``value`` itself holds, in its ``__dict__`` and in slots."""
    found = dict(getattr(value, "__dict__", {}))
    for owner in type(value).__mro__:
        slots = (name for name, each in vars(owner).items() if isinstance(each, MemberDescriptorType))
        found |= {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return found


def bytes_of(value: Any) -> bytes:
    """The contents of a ``bytearray``, an ``array``, or an array of numpy."""
    return bytes(value) if isinstance(value, bytearray) else bytes(value.tobytes())


def same_objects(ones: Sequence[Any], others: Sequence[Any]) -> bool:
    """Tell whether both are the same objects in the same order."""
    return len(ones) == len(others) and all(map(operator.is_, ones, others))


def same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) in PLAIN and bool(one == other)
