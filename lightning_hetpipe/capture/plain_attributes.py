"""Plain attributes of modules, which no ``state_dict`` knows: copies of a layer in stages do not share them."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_hetpipe.capture.contents import ABSENT, same, with_contents
from lightning_hetpipe.errors import PipelineRefusal
from lightning_hetpipe.pipeline.computed_weights import computed_names
from lightning_hetpipe.pipeline.random import generators
from lightning_hetpipe.redirect import Redirect

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
        if value is not ABSENT:
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
        if not same(before.get(name, ABSENT), after.get(name, ABSENT)):
            return name
    return None


class AttributesBefore:
    """Plain attributes of ``module`` and of its parts, as they are before a call."""

    def __init__(self, module: nn.Module) -> None:
        self._parts = [(part, attributes_with_contents(part)) for part in module.modules()]

    def changed(self) -> tuple[nn.Module, str] | None:
        """The first attribute that was set, or whose container has other items, with its module."""
        for part, before in self._parts:
            if name := changed_attribute(before, attributes_with_contents(part)):
                return part, name
        return None


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
        value = ABSENT if replaced is None else replaced
    return value
