"""Decisions of a captured module by values of its data, such as torch's own, whether a transformer's mask is causal.

Such a decision is a ``bool`` of a tensor. While a graph is made, each is answered as it was seen to be, and the tensor
that it asks is given out beside the graph's outputs. The part of the graph that computes these tensors is then split
off: it is run on the inputs of each call, and a call for which it gives other answers is one for another graph.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from lightning_hetpipe.capture.grouping import base_of, compute_nodes, written_by
from lightning_hetpipe.capture.noticed_calls import line_for_people
from lightning_hetpipe.torch_private.graphs import READ_VALUE, split_outputs
from lightning_hetpipe.torch_private.modes import ThreadDispatchMode

UNSEEN = 64
"""Most answers in one graph that nobody has seen: a loop that none of them ends would be traced for ever."""

Answers = tuple[bool, ...]

_Place = tuple[str, int]

_AS_TENSOR = (torch.as_tensor, torch.asarray)
_ASK = {Tensor.__bool__, Tensor.item, Tensor.is_nonzero, torch.is_nonzero}
_PACKAGE = f"{Path(__file__).parent.parent}{os.sep}"
_TORCH = Path(torch.__file__).parent
_BETWEEN = tuple(str(_TORCH / name) for name in ("overrides.py", "_ops.py", "utils/_python_dispatch.py", "_tensor.py"))


class SeenAnswers:
    """Answers that the module was given when it last ran with Python around it, by the line of code that asks."""

    def __init__(self) -> None:
        self._found: dict[_Place, list[bool]] = {}

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note the answers that the module is given within it, in place of those before."""
        self._found.clear()
        with _Noting(self._found):
            yield

    def at(self, place: _Place, ordinal: int) -> bool:
        """The answer when that line asked for the ``ordinal``-th time.

        Where it was seen to ask less often, its last answer, as that has ended a loop; False if it never was.
        """
        return self._found.get(place, [False])[: ordinal + 1][-1]

    def count(self, place: _Place) -> int:
        """Number of times that line was seen to ask."""
        return len(self._found.get(place, []))


class _Noting(ThreadDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, found: dict[_Place, list[bool]]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, bool) and func is READ_VALUE:
            self._found.setdefault(_place(sys._getframe()), []).append(result)
        return result


class Decisions(TorchFunctionMode):
    """Mode in which a module's questions are answered, since tensors have no values while its graph is made.

    Args:
        known: The answers to its first questions, in order.
        seen: Has those to all others.

    Attributes:
        asked: The tensors that were asked for, as they were then.
        answers: What was said.
        lines: Where it was asked, for people.
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
    """A decision that depends on more than inputs and constants, or is made for ever: the argument is its line."""


class DataChecks:
    """The part of a graph that computes what its module decides by.

    Args:
        graph: The exported graph, whose last outputs are what ``decisions`` has noted; they are taken from it.
        module: The live module.
        decisions: Has answered the module.

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
        """The answers for a call with these inputs."""
        if self._run is None:
            return ()
        with torch.no_grad(), torch.autocast(self._device.type, enabled=False):
            buffers = [self._module.get_buffer(path).to(self._device) for path in self._buffers]
            found = self._run(*leaves, *buffers)
            return tuple(torch.stack([each.reshape(()).to(self._device) for each in found]).tolist())

    def _part(self, graph: fx.GraphModule, needed: set[fx.Node], asked: Sequence[fx.Node]) -> fx.GraphModule:
        part, buffers = fx.Graph(), {path for path, _ in self._module.named_buffers(remove_duplicate=False)}
        new: dict[fx.Node, fx.Node] = {}
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                new[node] = part.placeholder(node.name)
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
    """The nodes that ``asked`` depend on, also those that change in place what others have made."""
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
    """The innermost line that is neither ours nor what torch has between an operator and its caller."""
    while frame is not None and frame.f_code.co_filename.startswith((_PACKAGE, *_BETWEEN)):
        frame = frame.f_back
    return ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
