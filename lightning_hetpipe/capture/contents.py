"""Contents of containers, objects and namespaces, and plain attributes of modules: read, compared, and put back.

Plain attributes are in no ``state_dict``, and copies of a layer in stages do not share them. Dataclasses that hold
tensors are registered with pytree. Other opaque objects with tensors do not cross from stage to stage.
"""

from __future__ import annotations

import dataclasses
import inspect
import operator
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from types import MemberDescriptorType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_hetpipe.errors import PipelineRefusal
from lightning_hetpipe.pipeline.random import generators
from lightning_hetpipe.pipeline.values import LeftOut, equal
from lightning_hetpipe.pipeline.weight_stash import computed_names
from lightning_hetpipe.redirect import Redirect
from lightning_hetpipe.torch_private.tensors import pytree

Data = Tensor | np.ndarray[Any, Any]

ABSENT = object()
"""Value of a name that a namespace lacks."""

PLAIN = (int, float, complex, str, bytes, bool, type(None))

CONTAINERS = (dict, list, set, deque)
"""Containers whose items can be replaced."""

_KINDS = (OrderedDict, *CONTAINERS, tuple, frozenset)


def kind_of(container: Any) -> Any:
    """Return Python's own class of a container. A subclass may load the results of its methods lazily."""
    return next(kind for kind in _KINDS if isinstance(container, kind))


def items_of(container: Any) -> tuple[Any, ...]:
    """Return the items of a container, for a dict its keys and then its values."""
    kind = kind_of(container)
    items, values = kind.__iter__, getattr(kind, "values", None)
    return tuple(items(container)) if values is None else (*items(container), *values(container))


def refill(container: Any, items: Sequence[Any]) -> None:
    """Replace the contents of one of ``CONTAINERS`` by ``items`` from :func:`items_of`."""
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


def assign(holder: Any, name: str, value: Any) -> None:
    """Set ``name`` in ``holder``, a namespace or a class, or remove it for ``ABSENT``."""
    if isinstance(holder, type):
        delattr(holder, name) if value is ABSENT else setattr(holder, name, value)
    elif value is ABSENT:
        holder.pop(name, None)
    else:
        holder[name] = value


def namespace_of(value: Any) -> dict[str, Any]:
    """Return the ``__dict__`` of ``value``, whatever its class does with attributes, or an empty dict."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, dict) else {}


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes that ``value`` itself holds, in its ``__dict__`` and in slots."""
    found = dict(namespace_of(value))
    for owner in type(value).__mro__:
        slots = (name for name, each in vars(owner).items() if isinstance(each, MemberDescriptorType))
        found |= {name: getattr(value, name) for name in slots if name != "__dict__" and hasattr(value, name)}
    return found


def bytes_of(value: Any) -> bytes:
    """Return the contents of a ``bytearray``, an ``array``, or an array of numpy."""
    return bytes(value) if isinstance(value, bytearray) else bytes(value.tobytes())


def copy_of(data: Data) -> Data:
    return data.copy() if isinstance(data, np.ndarray) else data.detach().clone()


def same_data(one: Data, other: Data) -> bool:
    """Return True if both have the same numbers. NaN equals NaN."""
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and np.array_equal(one, other, equal_nan=one.dtype.kind in "fc")
    return isinstance(other, Tensor) and equal(one, other)


def same_objects(ones: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return True if both are the same objects in the same order."""
    return len(ones) == len(others) and all(map(operator.is_, ones, others))


class Contents:
    """Everything that ``modules`` themselves hold, with the contents of lists, dicts and sets, to compare by identity.
    C code does all of the work, because each minibatch compares thousands of objects."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self.take()

    def take(self) -> None:
        """Take what the modules hold now."""
        values = [value for module in self._modules for value in vars(module).values()]
        self._containers = [value for value in values if type(value) in _OF_MODULES]
        self._tables = [each for each in self._containers if isinstance(each, dict) and each]
        self._lengths = [*map(len, self._containers)]
        self._held = self._now()

    def same(self) -> bool:
        """Return True if the modules hold the same objects, in the same order, as at the last :meth:`take`."""
        return [*map(len, self._containers)] == self._lengths and same_objects(self._now(), self._held)

    def _now(self) -> list[Any]:
        held = [*map(vars, self._modules)]
        parts = (held, map(dict.values, held), self._containers, map(dict.values, self._tables))
        return [*chain.from_iterable(chain(*parts))]


_OF_MODULES = {dict, OrderedDict, list, set}
"""Containers that modules keep their parts in."""


def same(one: Any, other: Any) -> bool:
    """Return True for the same object, for equal numbers or strings, and for tuples of these."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) in PLAIN and bool(one == other)


# Attributes of torch itself. An RNN rebuilds its lists of weights at will. On meta, it draws no random numbers.
_TORCHS_OWN = {
    name
    for owner in (nn.Module(), nn.RNN(1, 1, device="meta"), nn.Module)
    for name in vars(owner)
    if name.startswith("_") or name == "training"
}


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the entries of ``vars(module)`` that user code may set.

    Left out are ``training``, everything that ``nn.Module`` keeps for itself (parameters, buffers, submodules, hooks),
    and tensors that ``torch.nn.utils`` computes from parameters (``weight`` from ``weight_g`` and ``weight_v``). If an
    object of this package replaces a method, the replaced method is returned.
    """
    computed = computed_names(module)
    found: dict[str, Any] = {}
    for name, value in vars(module).items():
        if name in _TORCHS_OWN or name in computed:
            continue
        # The user's attribute is behind replacements by random generators and redirects.
        while isinstance(value, Redirect) or (name == "forward" and type(value).__module__ == generators.__name__):
            replaced = getattr(value, "replaced", None)
            value = ABSENT if replaced is None else replaced
        if value is not ABSENT:
            found[name] = value
    return found


def attributes_with_contents(module: nn.Module) -> dict[str, Any]:
    """Return ``plain_attributes`` to compare: a list, dict, set or deque becomes a tuple of itself and its items."""
    held = plain_attributes(module).items()
    return {name: (value, *items_of(value)) if isinstance(value, CONTAINERS) else value for name, value in held}


def changed_attribute(before: dict[str, Any], after: dict[str, Any]) -> str | None:
    """Return the name of the first attribute that was added, removed or changed, or None.

    Values are compared by :func:`same`. Other values, such as tensors, are never compared with ``==``.
    """
    for name in (*before, *after):
        if not same(before.get(name, ABSENT), after.get(name, ABSENT)):
            return name
    return None


class AttributesBefore:
    """Plain attributes of ``module`` and of its parts before a call."""

    def __init__(self, module: nn.Module) -> None:
        self._parts = [(part, attributes_with_contents(part)) for part in module.modules()]

    def changed(self) -> tuple[nn.Module, str] | None:
        """Return the first attribute that was set, or whose container has other items, with its module."""
        for part, before in self._parts:
            if name := changed_attribute(before, attributes_with_contents(part)):
                return part, name
        return None


class SetsState(PipelineRefusal):
    """Refusal of a module that sets an attribute, or replaces a buffer, in forward."""


def sets_attribute(layer: str, module: nn.Module, attribute: str, line: str | None = None) -> SetsState:
    """Make the error that ``layer`` sets ``attribute`` of ``module`` in forward, at the user's ``line``."""
    where = f" ({line})" if line else ""
    return SetsState(
        f"layer '{layer}' sets its attribute '{attribute}' (of {type(module).__name__}) in forward{where}, which only"
        " its copies in the stages would see; make it a buffer (register_buffer), or return it with the output"
    )


_INPUTS = (Tensor, *PLAIN, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.ScriptObject, nn.Module)
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)  # sizes, while a graph is made


def opaque_in(value: Any) -> Any | None:
    """Return the first object in ``value`` that holds tensors and is no nesting of tuples, lists and dicts, or None.

    Examples are subclasses of ``dict`` and objects with attributes, unless torch's pytree knows them (as it knows
    Hugging Face's outputs). Dataclasses that consist only of their fields are registered here.
    """
    return next(filter(_is_opaque, _leaves(value)), None)


def unknown_in(value: Any) -> Any | None:
    """Return the first object in ``value`` that torch.export does not take as an input, or None."""
    return next((leaf for leaf in _leaves(value) if not isinstance(leaf, _INPUTS)), None)


def without_opaque(name: str, output: Any) -> Any:
    """Return ``output`` of the module ``name`` with a placeholder for each object that :func:`opaque_in` finds."""
    if not any(map(_is_opaque, _leaves(output))):
        return output
    return pytree.tree_map(lambda leaf: LeftOut(type(leaf).__name__, name) if _is_opaque(leaf) else leaf, output)


def _leaves(value: Any) -> list[Any]:
    """Return the leaves of ``value``, and register plain dataclasses in it for the whole process."""
    while classes := {type(leaf) for leaf in pytree.tree_leaves(value) if _is_plain_dataclass(leaf)}:
        for each in classes:
            torch.export.register_dataclass(each)
    return pytree.tree_leaves(value)


def _is_opaque(leaf: Any) -> bool:
    return not isinstance(leaf, (Tensor, *_SYMBOLS)) and _holds_tensors(leaf, set())


def _is_plain_dataclass(item: Any) -> bool:
    """Return True if ``item`` can be made again from its fields."""
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
    """Return True if a ``kind`` made from ``fields`` holds these very objects, unchanged by ``__post_init__``."""
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
