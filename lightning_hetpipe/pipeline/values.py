"""Values between stages and user code: any nesting of tuples, lists and dicts, with tensors in it.

A value crosses a split point detached, with a flag for each tensor that required a gradient. On the other side the
tensor is a fresh leaf. A tensor that occurs twice in a value crosses once, and is one leaf. Gradients cross back as one
optional tensor for each tensor.

Sums associate as autograd's: a plain backward adds the gradients of a tensor's uses one by one, the latest use first.
If uses after a call are still to be added to, the call's own uses are kept apart (:class:`Addends`): their sum would
change last bits.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import CheckpointFunction

from lightning_hetpipe.errors import PipelineRefusal, SettingError
from lightning_hetpipe.pipeline.streams import move
from lightning_hetpipe.torch_private.tensors import behind_functorch, graph_nodes, pytree
from lightning_hetpipe.torch_private.tensors import run_backward as torchs_backward


class Addends(tuple[Tensor, ...]):
    """A gradient as the gradients of a tensor's uses, in the order in which autograd adds them: latest use first."""

    __slots__ = ()


Gradient = Tensor | Addends | None
Gradients = list[Gradient]
"""One entry for each tensor of a value, in order, or None if no gradient reached it."""


@dataclass(slots=True)
class Value:
    """A detached value: its tensors, whether they require gradients, and the structure around them. It never changes,
    but is not frozen, for speed."""

    tensors: tuple[Tensor, ...]
    requires_grad: tuple[bool, ...]
    others: tuple[Any, ...]
    spec: Any

    @staticmethod
    def of(tree: Any) -> Value:
        if isinstance(tree, Tensor):  # the most frequent case, and all below would cost as much as a small layer
            return Value((tree.detach(),), (tree.requires_grad,), _ALONE, _LEAF)
        leaves, spec = pytree.tree_flatten(tree)
        tensors = _distinct(leaves)
        places = {id(tensor): Nth(index) for index, tensor in enumerate(tensors)}
        return Value(
            tensors=tuple(tensor.detach() for tensor in tensors),
            requires_grad=tuple(tensor.requires_grad for tensor in tensors),
            others=tuple(places[id(leaf)] if isinstance(leaf, Tensor) else leaf for leaf in leaves),
            spec=spec,
        )

    def tree(self, tensors: Sequence[Tensor]) -> Any:
        """Return the original nesting, around ``tensors``."""
        if self.others is _ALONE:
            return tensors[0]
        leaves = [tensors[other.index] if isinstance(other, Nth) else other for other in self.others]
        return pytree.tree_unflatten(leaves, self.spec)

    def on(self, device: torch.device) -> Value:
        return Value(tuple(move(tensor, device) for tensor in self.tensors), self.requires_grad, self.others, self.spec)

    def leaves(self, device: torch.device | None = None) -> list[Tensor]:
        """Return fresh leaves on ``device``, or on the tensors' devices. They require gradients as in the value."""
        pairs = zip(self.tensors, self.requires_grad, strict=True)
        return [move(t.detach(), device or t.device).requires_grad_(wanted) for t, wanted in pairs]


@dataclass(frozen=True, slots=True)
class Nth:
    """Place of a tensor among a value's leaves. ``index`` counts the tensors."""

    index: int


_ALONE = (Nth(0),)
_LEAF = pytree.tree_structure(0)
"""Structure of a single tensor."""


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors of a nested value, in the order in which :class:`Value` keeps them."""
    return [tree] if isinstance(tree, Tensor) else _distinct(pytree.tree_leaves(tree))


def nested_tensors(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in mappings, lists and tuples, as often as it occurs. Faster than pytrees for few tensors."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from nested_tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from nested_tensors(part)


def _distinct(leaves: Sequence[Any]) -> list[Tensor]:
    return list({id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}.values())


def equal(a: Tensor, b: Tensor) -> bool:
    """Return True if the tensors are equal. NaN equals NaN."""
    return torch.equal(a, b) or (a.shape == b.shape and not _differ(a, b).any())


def all_equal(pairs: Iterable[tuple[Tensor, Tensor]]) -> bool:
    """Return True if both tensors of each pair are :func:`equal`."""
    return not unequal(pairs)


def unequal(pairs: Iterable[tuple[Tensor, Tensor]]) -> list[int]:
    """Return the places of the ``pairs`` whose tensors are not :func:`equal`. All lie on one device, for which there is
    one wait. If ``pairs`` is an iterator, one pair is held at a time."""
    found, waiting = list[int](), dict[int, Tensor]()
    for place, (one, other) in enumerate(pairs):
        if one.shape == other.shape and _waits(one):
            waiting[place] = _any_differ(one, other)
        elif not equal(one, other):
            found.append(place)
    if waiting and (differ := torch.stack([*waiting.values()])).any():
        found += [place for place, differs in zip(waiting, differ.tolist(), strict=True) if differs]
    return found


_PART = 1 << 22
"""Most elements that a device compares at once, for which it makes a few bytes for each element."""


def _any_differ(one: Tensor, other: Tensor) -> Tensor:
    """Return whether elements differ. Large tensors are compared part by part, so that this takes little memory."""
    if one.numel() <= _PART or not (one.is_contiguous() and other.is_contiguous()):
        return _differ(one, other).any()
    parts = zip(torch.split(one.view(-1), _PART), torch.split(other.view(-1), _PART), strict=True)
    return torch.stack([_differ(*each).any() for each in parts]).any()


def _differ(one: Tensor, other: Tensor) -> Tensor:
    """Return which elements differ. NaN equals NaN."""
    numbers = one == one
    numbers |= other == other
    return numbers.logical_and_(one != other)


def alike(pairs: Iterable[tuple[Tensor, Tensor]]) -> bool:
    """Return True if each pair has one shape, one dtype and one device."""
    return all(a.shape == b.shape and a.dtype == b.dtype and a.device == b.device for a, b in pairs)


_SMALL = 1 << 16
"""Most bytes of a tensor that is copied to be compared with others."""

_GROUP = 1 << 20
"""Most bytes of tensors that are copied and compared at once."""


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0].reshape(-1) if len(tensors) == 1 else torch.cat([tensor.reshape(-1) for tensor in tensors])


class DeviceComparison:
    """Question to a device: which of the ``pairs`` differ? Tensors of a pair must be :func:`alike`. The device answers
    later, and nobody waits meanwhile. It compares all small tensors of a dtype at once, in copies of them. If ``pairs``
    is an iterator, one large pair is held at a time."""

    def __init__(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        small: dict[tuple[torch.dtype, torch.device], list[tuple[int, Tensor, Tensor]]] = defaultdict(list)
        self._groups: list[list[tuple[int, int]]] = []  # place and size of each tensor of a group
        self._found: list[Tensor] = []
        held, devices = Counter[tuple[torch.dtype, torch.device]](), dict[torch.device, None]()
        for place, (one, other) in enumerate(pairs):
            devices[one.device] = None
            if one.nbytes > _SMALL:
                self._ask([(place, 1)], _any_differ(one.detach(), other.detach()).view(1))
            elif one.numel():
                kind = one.dtype, one.device
                small[kind].append((place, one.detach(), other.detach()))
                held[kind] += one.nbytes
                if held[kind] > _GROUP:
                    held[kind] = 0
                    self._ask_together(small.pop(kind))
        for group in small.values():
            self._ask_together(group)
        self._events = [torch.accelerator.current_stream(device).record_event() for device in devices]

    def _ask_together(self, group: Sequence[tuple[int, Tensor, Tensor]]) -> None:
        differ = _differ(_joined([one for _, one, _ in group]), _joined([other for *_, other in group]))
        self._ask([(place, one.numel()) for place, one, _ in group], differ)

    def _ask(self, group: list[tuple[int, int]], differ: Tensor) -> None:
        first = torch.where(differ.any(), differ.byte().argmax(), -1)
        self._groups.append(group)
        self._found.append(torch.empty_like(first, device="cpu", pin_memory=True))
        self._found[-1].copy_(first, non_blocking=True)

    def place(self) -> int | None:
        """Return the place of a pair that differs, or None. Wait for the device if it has yet to answer."""
        for event in self._events:
            if not event.query():
                event.synchronize()
        for group, found in zip(self._groups, self._found, strict=True):
            ends = accumulate(size for _, size in group)
            if (first := int(found)) >= 0:
                return next(place for (place, _), end in zip(group, ends, strict=True) if first < end)
        return None


def _waits(tensor: Tensor) -> bool:
    """Return True if reading its values waits for a device."""
    return tensor.device.type != "cpu"


def blocks(tensors: Iterable[Tensor]) -> dict[tuple[torch.device, int], int]:
    """Return the blocks of memory of ``tensors`` with their bytes. Sparse tensors are left out."""
    inner = [(behind_functorch(tensor), tensor) for tensor in tensors]
    tensors = [tensor if found is None else found for found, tensor in inner]
    strided = [tensor for tensor in tensors if tensor.layout is torch.strided and tensor.numel()]
    storages = [(tensor.device, tensor.untyped_storage()) for tensor in strided]
    return {(device, storage.data_ptr()): storage.nbytes() for device, storage in storages}


def gradients(
    outputs: Sequence[Tensor], output_gradients: Sequence[Gradient], inputs: Sequence[Tensor]
) -> list[Tensor | None]:
    """Return the gradients of ``inputs``, or None for an input that needs or gets no gradient."""
    given = zip(outputs, output_gradients, strict=True)
    pairs = [(o, added(g)) for o, g in given if g is not None and o.requires_grad]
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    if not pairs or not wanted:
        return [None] * len(inputs)
    found = iter(run_backward([o for o, _ in pairs], [g for _, g in pairs], wanted))
    return [next(found) if tensor.requires_grad else None for tensor in inputs]


def gradients_apart(
    outputs: Sequence[Tensor], output_gradients: Sequence[Gradient], inputs: Sequence[Tensor], weights: Sequence[Tensor]
) -> tuple[Gradients, list[Tensor | None]]:
    """Return the gradients of ``inputs``, with the uses of each kept apart, and of ``weights`` as :func:`gradients`
    does. An input that is an output as well was handed on to the next stage: its output gradients are later uses."""
    uses = {id(tensor): list[Tensor]() for tensor in inputs if tensor.requires_grad}
    ends: list[Tensor] = []
    given: list[Gradient] = []
    for output, gradient in zip(outputs, output_gradients, strict=True):
        if gradient is not None and id(output) in uses:
            uses[id(output)] += addends(gradient)
        else:
            ends.append(output)
            given.append(gradient)
    leaves = {get_gradient_edge(tensor).node: uses[id(tensor)] for tensor in inputs if tensor.requires_grad}
    hooks = []
    for node in graph_nodes([end.grad_fn for end in ends], []):
        into = [None if following is None else leaves.get(following) for following, _ in node.next_functions]
        if any(each is not None for each in into):
            hooks.append(node.register_hook(functools.partial(_note, into)))
    try:
        found = gradients(ends, given, [*inputs, *weights])
    finally:
        for hook in hooks:
            hook.remove()
    return [Addends(uses.get(id(tensor), ())) or None for tensor in inputs], found[len(inputs) :]


def _note(into: Sequence[list[Tensor] | None], found: Sequence[Tensor | None], _: Any) -> None:
    """Add the gradients ``found`` by a node to the uses of its inputs."""
    for uses, gradient in zip(into, found, strict=True):
        if uses is not None and gradient is not None:
            uses.append(gradient)


def addends(gradient: Gradient) -> Sequence[Tensor]:
    """Return the parts whose sum is ``gradient``, in order."""
    return gradient if isinstance(gradient, Addends) else () if gradient is None else (gradient,)


def added(gradient: Tensor | Addends) -> Tensor:
    """Return the sum of ``gradient``."""
    return functools.reduce(operator.add, gradient) if isinstance(gradient, Addends) else gradient


def moved(gradient: Gradient, device: torch.device) -> Gradient:
    if isinstance(gradient, Addends):
        return Addends(move(addend, device) for addend in gradient)
    return None if gradient is None else move(gradient, device)


def tensors_in(found: Iterable[Gradient]) -> Iterator[Tensor]:
    return (addend for gradient in found for addend in addends(gradient))


class LeftOut:
    """Placeholder for an object of class ``kind``, such as a key-value cache, in the output of the module ``module``.
    Any use of it raises an error. It may be kept, compared with None, detached and moved, as Lightning does with
    outputs: for pytree it is a node without children."""

    __slots__ = ("_kind", "_module")

    def __init__(self, kind: str, module: str) -> None:
        self._kind = kind
        self._module = module

    def __repr__(self) -> str:
        return f"<{self._kind} of '{self._module}', left out>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols that Python looks for, such as copying
            raise AttributeError(name)
        raise self._error(f"its '{name}'")

    def __getitem__(self, index: Any) -> NoReturn:
        raise self._error("an item of it")

    def __iter__(self) -> NoReturn:
        raise self._error("its items")

    def __len__(self) -> NoReturn:
        raise self._error("its length")

    def __bool__(self) -> NoReturn:
        raise self._error("its truth value")

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise self._error("a call of it")

    def _error(self, used: str) -> SettingError:
        return PipelineRefusal(
            f"the pipelined module '{self._module}' gives a {self._kind}, of which {used} is used; the pipeline hands"
            " on tensors in tuples, lists, dicts and plain dataclasses, and has left that object out; let the module"
            " return the tensors that are needed of it, or name the modules in it to pipeline (module=[...])"
        )


pytree.register_pytree_node(
    LeftOut,
    lambda each: ([], [each._kind, each._module]),
    lambda _, context: LeftOut(*context),
    serialized_type_name="lightning_hetpipe.LeftOut",
    to_dumpable_context=lambda context: context,
    from_dumpable_context=lambda context: context,
)


def is_reentrant_checkpoint(node: Any) -> bool:
    """Return True if ``node`` of autograd's graph is a checkpoint whose own backward sets gradients of weights."""
    return bool(node.name() == f"{CheckpointFunction.__name__}Backward")


def reentrant_checkpoint() -> SettingError:
    return SettingError(
        "the model calls torch.utils.checkpoint with use_reentrant=True, which runs in no backward pass of a part of a"
        " model, as stages and the code around them have it; give it use_reentrant=False, which computes the same"
        " gradients, or set in_flight=1"
    )


def run_backward(outputs: Sequence[Tensor | GradientEdge], *arguments: Any) -> Sequence[Tensor | None]:
    """Compute gradients, as :func:`torch_private.tensors.run_backward` does.

    Raises:
        SettingError: if the pass fails and there is a reentrant checkpoint on its way.
    """
    try:
        return torchs_backward(outputs, *arguments)
    except RuntimeError as error:
        starts = [each.grad_fn if isinstance(each, Tensor) else each.node for each in outputs]
        is_reentrant = any(map(is_reentrant_checkpoint, graph_nodes(starts, [])))
        if is_reentrant and not isinstance(error, torch.OutOfMemoryError):
            raise reentrant_checkpoint() from error
        raise
