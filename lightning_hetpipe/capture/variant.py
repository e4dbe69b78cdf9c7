"""Conditions under which a call of a module may run one of its graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from lightning_hetpipe.capture.data_checks import DataChecks
from lightning_hetpipe.capture.reached_values import Moment
from lightning_hetpipe.pipeline.values import Value, tensors_of
from lightning_hetpipe.torch_private.autograd import graph_nodes
from lightning_hetpipe.torch_private.graphs import GRAPH_GUARDS
from lightning_hetpipe.torch_private.tensors import pytree


@dataclass(frozen=True)
class AutogradNodes:
    """Autograd nodes of one call of a module: a ``detach()`` or ``no_grad()`` in it changes nothing else.

    Attributes:
        inputs: The shape of each input, and whether it requires a gradient.
        nodes: How many nodes of each kind autograd goes through. (Casts are left out, as autocast remembers some.)
    """

    inputs: tuple[tuple[torch.Size, bool], ...]
    nodes: Counter[str]

    @staticmethod
    def of(inputs: Value, output: Any) -> AutogradNodes:
        nodes = graph_nodes([tensor.grad_fn for tensor in tensors_of(output)], [])
        shapes = [tensor.shape for tensor in inputs.tensors]
        return AutogradNodes(
            tuple(zip(shapes, inputs.requires_grad, strict=True)),
            Counter(name for name in (node.name() for node in nodes) if not name.startswith("ToCopy")),
        )

    def differs(self, before: AutogradNodes | None) -> bool:
        """Tell whether it goes through other nodes than ``before``, for inputs of the same shapes."""
        return before is not None and self.inputs == before.inputs and self.nodes != before.nodes


FITTED = 256
"""Combinations of sizes that are remembered to fit a graph."""

Mode = tuple[bool, bool, tuple[tuple[str, torch.dtype | None], ...]]
"""The module's mode (to be trained or not), whether gradients are wanted, and the dtypes of autocast."""


class Variant:
    """Conditions under which a call may run one graph.

    Attributes:
        mode: Whether the module was to be trained, whether gradients were wanted, and the dtypes of autocast.
        held: The Python values outside the module with which it gave what the module gives, once this was seen.
        autograd: The nodes by which the module computed then, if that was in a minibatch in flight.
    """

    def __init__(
        self,
        graph: fx.GraphModule,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        mode: Mode,
        checks: DataChecks,
        numbers: frozenset[int],
    ) -> None:
        self.mode = mode
        self.held: Moment | None = None
        self.autograd: AutogradNodes | None = None
        self._keywords = [*kwargs]
        leaves, self._spec = pytree.tree_flatten((args, kwargs))
        self._kinds = [_kind(leaf) for leaf in leaves]
        self._places = _places(leaves)
        self._checks = checks
        self._numbers = numbers
        self._guards = getattr(graph, GRAPH_GUARDS, None)
        self._fitted: dict[Any, None] = {}  # sizes that are known to fit, as checking guards takes its time

    @property
    def decides(self) -> str | None:
        """The first line that decides by the values of data; None if there is none."""
        return self._checks.lines[0] if self._checks.answers else None

    def fitting(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
        """The tensors and other parts of a call, in the order of the graph's inputs; None if it is for others."""
        leaves = self._leaves(args, kwargs)
        if leaves is None or _places(leaves) != self._places:
            return None
        if not self._others([_kind(leaf) for leaf in leaves]) <= self._numbers:
            return None
        sizes = tuple(leaf.shape for leaf in leaves if isinstance(leaf, Tensor))
        if self._guards is not None and sizes not in self._fitted:
            try:
                self._guards(*leaves)
            except (AssertionError, RuntimeError):
                return None
            if len(self._fitted) == FITTED:
                del self._fitted[next(iter(self._fitted))]
            self._fitted[sizes] = None
        return leaves if self._checks.of(leaves) == self._checks.answers else None

    def changing_numbers(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[int]:
        """The places of numbers that are others in a call that is else of this kind; empty if it is of another kind."""
        if (leaves := self._leaves(args, kwargs)) is None:
            return frozenset()
        others = self._others([_kind(leaf) for leaf in leaves])
        return others | self._numbers if all(number >= 0 for number in others) else frozenset()

    def _others(self, kinds: Sequence[Any]) -> frozenset[int]:
        """The places of inputs of other ``kinds`` than this graph's; a number of another class has no place."""
        pairs = enumerate(zip(kinds, self._kinds, strict=True))
        return frozenset(n if one[0] is other[0] in (float, int) else -1 for n, (one, other) in pairs if one != other)

    def _leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
        """The parts of a call in the order of the graph's inputs; None if it has another structure."""
        if set(kwargs) != set(self._keywords):
            return None
        leaves, spec = pytree.tree_flatten((args, {name: kwargs[name] for name in self._keywords}))
        return leaves if spec == self._spec else None


def _places(leaves: Sequence[Any]) -> list[int]:
    """The place at which each of ``leaves`` is met first: a graph of one tensor given twice is not one of two tensors.

    Modules also ask for that, as attention does to a sequence itself.
    """
    first: dict[int, int] = {}
    return [
        first.setdefault(id(leaf), place) if isinstance(leaf, Tensor) else place for place, leaf in enumerate(leaves)
    ]


def _kind(leaf: Any) -> Any:
    """Part of the input that a graph depends on: of a tensor its dtype, dimensions, and which of them are 0 or 1.

    Layers move from device to device, and inputs with them, so that no more counts than whether one is an accelerator.
    """
    if isinstance(leaf, Tensor):
        return (leaf.dtype, leaf.device.type, tuple(size if size < 2 else -1 for size in leaf.shape))
    # 1, 1.0 and True are equal, and so are 0.0 and -0.0, but graphs of them differ; NaN is not equal to itself.
    return (type(leaf), repr(leaf) if isinstance(leaf, float) else leaf)
