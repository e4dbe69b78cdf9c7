"""Side effects of a module: what its forward does besides returning a value, found and undone around additional runs.

A module runs again to be traced, and to be compared with its graph. Changes beside its weights are then put back: of
its attributes and buffers, of their contents, and of what its functions reach outside of it (``frozen.py``). A change
that it makes in each run is a side effect, which no graph has.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hetpipe.capture.contents import (
    CONTAINERS,
    AttributesBefore,
    items_of,
    plain_attributes,
    refill,
    same_objects,
)
from lightning_hetpipe.capture.frozen import FrozenValues
from lightning_hetpipe.errors import PipelineRefusal
from lightning_hetpipe.pipeline.values import equal
from lightning_hetpipe.torch_private.subclasses import address_of
from lightning_hetpipe.torch_private.tensors import pytree, unseen_change


class SideEffect(PipelineRefusal):
    """Refusal of a graph for a module that does something besides returning a value.

    Attributes:
        paths: What it changes below its attributes, or outside of itself, while it is traced.
        is_shared: Whether it changes something outside its own attributes: a global, a closure, a class.
        is_lost: True if the module cannot be taken apart either. User code runs in another thread, which has other
            context variables. Or a comparison cannot put the change back, as for an iterator.
    """

    def __init__(
        self,
        name: str,
        what: str,
        line: str | None = None,
        paths: Sequence[str] = (),
        *,
        is_shared: bool = False,
        is_lost: bool = False,
    ) -> None:
        where = f" ({line})" if line else ""
        super().__init__(
            f"'{name}' {what} in forward{where}, which its graph would not; do it in training_step, or return it with"
            " the output"
        )
        self.paths = paths
        self.is_shared = is_shared
        self.is_lost = is_lost


class StateBefore:
    """The state of ``module``, and of what its functions reach (``frozen``), before an additional run.

    If it ``runs`` on values and not only on shapes, buffers may change. Then ``buffers`` has copies of them by path.
    """

    def __init__(self, module: nn.Module, frozen: FrozenValues, runs: bool) -> None:
        parts = [*module.modules()]
        self.attributes = AttributesBefore(module)
        self.buffers = {path: buffer.clone() for path, buffer in module.named_buffers()} if runs else {}
        self._frozen = frozen
        self._before = frozen.reached.now(copied=True)
        self._memory = [(buffer, buffer.data) for buffer in module.buffers()]
        self._names = _with_items(vars(part)["_buffers"] for part in parts)
        owned = (value for part in parts for value in plain_attributes(part).values() if isinstance(value, CONTAINERS))
        self._containers = _with_items([*map(vars, parts), *owned])

    def changed(self) -> list[str]:
        """Return the paths of changes outside the module's own attributes, and inside them below their first level."""
        return self._frozen.changes(self._before)

    def undo_buffers(self) -> None:
        """Give the modules the buffers that they held, with their memory and values.

        A forward may have replaced them by views of its inputs, or of data.
        """
        _refill(self._names)
        for buffer, data in self._memory:
            if address_of(buffer) != address_of(data):
                buffer.data = data
        put_back(zip((buffer for buffer, _ in self._memory), self.buffers.values(), strict=False))

    def undo(self) -> None:
        """Put everything back."""
        self.undo_buffers()
        _refill(self._containers)
        self._before.put_back()


def _with_items(containers: Iterable[Any]) -> list[tuple[Any, tuple[Any, ...]]]:
    return [(container, items_of(container)) for container in containers]


def _refill(containers: Iterable[tuple[Any, tuple[Any, ...]]]) -> None:
    for container, items in containers:
        if not same_objects(items_of(container), items):
            refill(container, items)


@contextmanager
def untouched(module: nn.Module, frozen: FrozenValues, *, runs: bool = False) -> Iterator[StateBefore]:
    """Context manager that puts back all changes of ``module`` and of what it reaches, except weights."""
    before_run = StateBefore(module, frozen, runs)
    with ExitStack() as stack:
        reached = frozen.reached
        for each in (*reached.plain.values(), *reached.parameters, *(module.buffers() if runs else ())):
            if isinstance(each, Tensor) and not each.is_inference():
                stack.enter_context(unseen_change(each))  # a backward that is still to come may have saved it
        stack.callback(before_run.undo)
        yield before_run


def put_back(buffers: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Give buffers the values that they had earlier."""
    with torch.no_grad():
        for buffer, earlier in buffers:
            if not equal(buffer, earlier):  # to write what it has would count as a change of it
                buffer.copy_(earlier)


class Given:
    """Containers in the arguments of ``forward`` of the module ``name`` before a call."""

    def __init__(self, name: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._name = name
        try:
            bound = inspect.signature(forward).bind(*args, **kwargs).arguments
        except TypeError:  # the call itself will say so
            bound = {}
        self._containers = [(path, value, _items(value)) for path, value in _containers(bound, "")]

    def refuse_changes(self) -> None:
        """Refuse, by a :class:`SideEffect` that names the argument, a container that has other items now."""
        for path, value, earlier in self._containers:
            if not same_objects(_items(value), earlier):
                raise SideEffect(self._name, f"changes its argument '{path}' (a {type(value).__name__})")


def refuse_noticed(name: str, frozen: FrozenValues, *kinds: str) -> None:
    """Refuse, by a :class:`SideEffect`, a graph for the module ``name`` if its forward made calls of ``kinds``."""
    if (told := frozen.noticed.told(*kinds)) is not None:
        raise SideEffect(name, *told)


def refuse_seeded(name: str) -> None:
    """Refuse to pipeline the module ``name`` because a seed of the user determines its numbers."""
    raise PipelineRefusal(
        f"'{name}' draws random numbers after training_step has set a seed, and in stages each minibatch draws from"
        " generators of its own; set no seed there, or name the other modules to pipeline (module=[...])"
    )


def _containers(value: Any, path: str, depth: int = 4) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Tensor | str | bytes) or depth == 0:
        return
    if path and not isinstance(value, tuple) and (isinstance(value, CONTAINERS) or hasattr(value, "__dict__")):
        yield path, value
    if isinstance(value, dict):
        inner = [(f"{path}[{key!r}]" if path else str(key), each) for key, each in value.items()]
    elif isinstance(value, list | tuple | deque):
        inner = [(f"{path}[{index}]", each) for index, each in enumerate(value)]
    elif type(value) in pytree.SUPPORTED_NODES:
        inner = [(f"{path}.{key}", each) for key, each in getattr(value, "__dict__", {}).items()]
    else:
        return
    for name, each in inner:
        yield from _containers(each, name, depth - 1)


def _items(value: Any) -> tuple[Any, ...]:
    return items_of(value if isinstance(value, CONTAINERS) else vars(value))
