"""Conditions under which a call of a module may run one of its graphs.

They include decisions of the module by values of its data, such as torch's own question whether a transformer's mask is
causal. Such a decision is a ``bool`` of a tensor. While a graph is made, each decision gets the answer that was seen
before, and its tensor becomes an additional output of the graph. The part of the graph that computes these tensors is
split off and runs on the inputs of each call. If its answers differ, the call needs another graph.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from lightning_hetpipe.capture.grouping import base_of, compute_nodes, written_by
from lightning_hetpipe.capture.noticed_calls import line_for_people
from lightning_hetpipe.capture.reached_values import Moment
from lightning_hetpipe.pipeline.values import Value, tensors_of
from lightning_hetpipe.torch_private.graphs import GRAPH_GUARDS, READ_VALUE, split_outputs
from lightning_hetpipe.torch_private.modes import ThreadDispatchMode
from lightning_hetpipe.torch_private.tensors import graph_nodes, pytree

UNSEEN = 64
"""Largest number of unseen answers in one graph, because a loop without an end would be traced for ever."""

Answers = tuple[bool, ...]

_Place = tuple[str, int]

_AS_TENSOR = (torch.as_tensor, torch.asarray)
_ASK = {Tensor.__bool__, Tensor.item, Tensor.is_nonzero, torch.is_nonzero}
_PACKAGE = f"{Path(__file__).parent.parent}{os.sep}"
_TORCH = Path(torch.__file__).parent
_BETWEEN = tuple(str(_TORCH / name) for name in ("overrides.py", "_ops.py", "utils/_python_dispatch.py", "_tensor.py"))


class SeenAnswers(ThreadDispatchMode):
    """Answers that the module got when it last ran in Python, by the line of code that asked."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._found: dict[_Place, list[bool]] = {}

    def noted(self) -> Self:
        """Return a context manager that records the answers that the module gets, in place of earlier answers."""
        self._found.clear()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, bool) and func is READ_VALUE:
            self._found.setdefault(_place(sys._getframe()), []).append(result)
        return result

    def at(self, place: _Place, ordinal: int) -> bool:
        """Return the answer when the line at ``place`` asked for the ``ordinal``-th time.

        If it asked less often, return its last answer, because that has ended a loop. If it never asked, return False.
        """
        return self._found.get(place, [False])[: ordinal + 1][-1]

    def count(self, place: _Place) -> int:
        """Return how often the line was seen to ask."""
        return len(self._found.get(place, []))


class Decisions(TorchFunctionMode):
    """Mode that answers a module's questions, since tensors have no values while its graph is made.

    ``known`` has the answers to its first questions, in order, and ``seen`` to all others. The mode records the tensors
    ``asked``, the ``answers``, and the ``lines`` for people.
    """

    def __init__(self, known: Answers, seen: SeenAnswers) -> None:
        super().__init__()
        self.asked: list[Tensor] = []
        self.answers: list[bool] = []
        self.lines: list[str] = []
        self._known = known
        self._seen = seen
        self._times: dict[_Place, int] = {}
        self._unseen = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _AS_TENSOR and isinstance(args[0], torch.SymInt | torch.SymFloat):
            func = torch.tensor  # the same for a number, and known to torch.export
        if func not in _ASK or args[0].dtype != torch.bool or args[0].numel() != 1:
            return func(*args, **(kwargs or {}))
        place = _place(sys._getframe())
        ordinal = self._times.get(place, 0)
        self._times[place] = ordinal + 1
        number = len(self.asked)
        answer = self._known[number] if number < len(self._known) else self._seen.at(place, ordinal)
        self.asked.append(args[0].detach().clone())
        self.answers.append(answer)
        self.lines.append(line_for_people(*place))
        self._unseen += number >= len(self._known) and ordinal >= self._seen.count(place)
        if self._unseen > UNSEEN:
            raise Undecidable(self.lines[-1])
        return answer


class Undecidable(Exception):
    """A decision that depends on more than inputs and constants, or that is made for ever. The argument is its line."""


class DataChecks:
    """The part of a graph that computes the tensors by which its module decides.

    The last outputs of ``graph``, which ``decisions`` recorded, are removed from it.

    Raises:
        Undecidable: if an answer depends on weights, on buffers that change, or on random numbers.
    """

    def __init__(self, graph: fx.GraphModule, module: nn.Module, decisions: Decisions) -> None:
        self.answers: Answers = tuple(decisions.answers)
        self.lines = decisions.lines
        self._module = module
        self._run: fx.GraphModule | None = None
        self._buffers: list[str] = []
        asked = split_outputs(graph)
        if not asked:
            return
        nodes = list(compute_nodes(graph.graph))
        for node, line in zip(asked, decisions.lines, strict=True):
            _check(_needed([node], nodes), nodes, dict(module.named_parameters(remove_duplicate=False)), line)
        needed = _needed(asked, nodes)
        self._device: torch.device = asked[0].meta["val"].device
        self._run = self._part(graph, needed, asked)
        for node in reversed(nodes):
            if node in needed and not node.users and not written_by(node):
                graph.graph.erase_node(node)

    def of(self, leaves: Sequence[Any]) -> Answers:
        """Return the answers for a call with these inputs."""
        if self._run is None:
            return ()
        with torch.no_grad(), torch.autocast(self._device.type, enabled=False):
            buffers = [self._module.get_buffer(path).to(self._device) for path in self._buffers]
            found = self._run(*leaves, *buffers)
            return tuple(torch.stack([each.reshape(()).to(self._device) for each in found]).tolist())

    def _part(self, graph: fx.GraphModule, needed: set[fx.Node], asked: Sequence[fx.Node]) -> fx.GraphModule:
        part, buffers = fx.Graph(), {path for path, _ in self._module.named_buffers(remove_duplicate=False)}
        new = {node: part.placeholder(node.name) for node in graph.graph.find_nodes(op="placeholder")}
        for node in graph.graph.nodes:
            if node in needed and node.op == "get_attr" and str(node.target) in buffers:
                new[node] = part.placeholder(f"buffer_{len(self._buffers)}")
                self._buffers.append(str(node.target))
        for node in graph.graph.nodes:
            if node in needed and node not in new:
                new[node] = part.node_copy(node, new.__getitem__)
        part.output(tuple(new[node] for node in asked))
        return fx.GraphModule(graph, part)


def _needed(asked: Sequence[fx.Node], nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Return the nodes on which ``asked`` depend, including nodes that change values of others in place."""
    needed: set[fx.Node] = set()
    pending = list(asked)
    while pending:
        while pending:
            node = pending.pop()
            if node not in needed:
                needed.add(node)
                pending.extend(node.all_input_nodes)
        bases = {base_of(node) for node in needed}
        pending = [n for n in nodes if n not in needed and any(base_of(written) in bases for written in written_by(n))]
    return needed


def _check(needed: set[fx.Node], nodes: Sequence[fx.Node], parameters: dict[str, nn.Parameter], line: str) -> None:
    changed = {base_of(written) for node in nodes for written in written_by(node)}
    for node in needed:
        draws = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if draws or (node.op == "get_attr" and (str(node.target) in parameters or node in changed)):
            raise Undecidable(line)


def _place(frame: FrameType | None) -> _Place:
    """Return the innermost line outside of this package and of torch's code between an operator and its caller."""
    while frame is not None and frame.f_code.co_filename.startswith((_PACKAGE, *_BETWEEN)):
        frame = frame.f_back
    return ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


@dataclass(frozen=True)
class AutogradNodes:
    """Autograd nodes of one call of a module. A ``detach()`` or ``no_grad()`` in it changes nothing else.

    ``inputs`` has the shape of each input, and whether it requires a gradient. ``nodes`` counts autograd's nodes by
    kind, without casts, because autocast caches some.
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
        """Return True if its nodes differ from ``before``, for inputs of the same shapes."""
        return before is not None and self.inputs == before.inputs and self.nodes != before.nodes


FITTED = 256
"""Largest number of combinations of sizes that are remembered to fit a graph."""

Mode = tuple[bool, bool, tuple[tuple[str, torch.dtype | None], ...]]
"""The module's mode (training or not), whether gradients are wanted, and the dtypes of autocast."""


class Variant:
    """Conditions under which a call may run one graph, in the mode ``mode``.

    ``held`` has the Python values outside the module with which the graph was seen to equal the module. ``autograd``
    has the module's nodes then, if that was in a minibatch in flight.
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
        """The first line that decides by the values of data, or None."""
        return self._checks.lines[0] if self._checks.answers else None

    def fitting(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
        """Return the parts of a call in the order of the graph's inputs, or None if the graph does not fit."""
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
        """Return the places of numbers that differ in a call that otherwise fits. Empty if it does not fit."""
        if (leaves := self._leaves(args, kwargs)) is None:
            return frozenset()
        others = self._others([_kind(leaf) for leaf in leaves])
        return others | self._numbers if all(number >= 0 for number in others) else frozenset()

    def _others(self, kinds: Sequence[Any]) -> frozenset[int]:
        """Return the places of inputs whose ``kinds`` differ. The place -1 means that not only a number differs."""
        pairs = enumerate(zip(kinds, self._kinds, strict=True))
        return frozenset(n if one[0] is other[0] in (float, int) else -1 for n, (one, other) in pairs if one != other)

    def _leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
        """Return the parts of a call in the order of the graph's inputs, or None if it has another structure."""
        if set(kwargs) != set(self._keywords):
            return None
        leaves, spec = pytree.tree_flatten((args, {name: kwargs[name] for name in self._keywords}))
        return leaves if spec == self._spec else None


def _places(leaves: Sequence[Any]) -> list[int]:
    """Return the place at which each of ``leaves`` occurs first: one tensor given twice needs another graph.

    Modules also ask whether arguments are identical, as attention does.
    """
    first: dict[int, int] = {}
    return [
        first.setdefault(id(leaf), place) if isinstance(leaf, Tensor) else place for place, leaf in enumerate(leaves)
    ]


def _kind(leaf: Any) -> Any:
    """Return the properties of an input on which a graph depends: a tensor's dtype, dimensions, and which are 0 or 1.

    Of its device, only the type counts, since layers and inputs move between devices.
    """
    if isinstance(leaf, Tensor):
        return (leaf.dtype, leaf.device.type, tuple(size if size < 2 else -1 for size in leaf.shape))
    # 1, 1.0 and True are equal, and so are 0.0 and -0.0, but their graphs differ. NaN is not equal to itself.
    return (type(leaf), repr(leaf) if isinstance(leaf, float) else leaf)
