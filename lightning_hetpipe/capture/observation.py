"""Calls of modules in the watched step: their inner calls, what each call shows, and what copies cannot reproduce.

Copies in stages must reproduce the observed facts, and a call is refused if they cannot. Leaves that a loss reaches are
also checked: a leaf that would get no gradient, or the gradient of another version, is refused.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from lightning_hetpipe.capture.contents import AttributesBefore, SetsState, opaque_in, sets_attribute
from lightning_hetpipe.capture.effects import FrozenValues
from lightning_hetpipe.capture.pieces import Piece, class_of, refuse_hooks
from lightning_hetpipe.capture.prepared_modules import refuse_compiled, refuse_scripted
from lightning_hetpipe.errors import PipelineRefusal, SettingError
from lightning_hetpipe.pipeline.dtypes import Autocast
from lightning_hetpipe.pipeline.stage import Layer
from lightning_hetpipe.pipeline.values import Value, blocks, is_reentrant_checkpoint, reentrant_checkpoint, tensors_of
from lightning_hetpipe.planning.model.profile import UserBytes
from lightning_hetpipe.torch_private.tensors import (
    address_of,
    behind_functorch,
    graph_leaves,
    graph_nodes,
    graph_start,
    version_counter,
)


def refuse_leaves(root: nn.Module, allowed: Collection[int], loss: Tensor, made_inside: bool = False) -> None:
    """Refuse a leaf that ``loss`` reaches if its gradient would be lost or belong to another version.

    ``root``, the LightningModule, names parameters in errors. ``allowed`` has the ``id`` of allowed leaves. If
    ``made_inside``, modules that run as user code make leaves themselves, whose gradients nobody needs.
    """
    leaves = (leaf for leaf in graph_leaves([graph_start(loss)]) if id(leaf) not in allowed)
    reached = next((leaf for leaf in leaves if isinstance(leaf, nn.Parameter) or not made_inside), None)
    if reached is None:
        return
    name = next((name for name, parameter in root.named_parameters() if parameter is reached), None)
    if name is None:
        raise PipelineRefusal(
            f"the loss depends on a tensor of shape {tuple(reached.shape)} that requires a gradient and is no"
            f" parameter of {type(root).__name__}, and the pipeline would give it none; register a parameter in a"
            " module that training_step calls, and leave requires_grad_() of a batch out"
        )
    for path, module in root.named_modules():
        if any(parameter is reached for parameter in module.parameters(recurse=False)):
            refuse_scripted(path, module)
    raise PipelineRefusal(
        f"training_step gives the parameter '{name}' to a compiled function, or to one written in C++, where the"
        f" pipeline cannot put this minibatch's version in its place; give it {name}.clone(), or move what uses it into"
        " a module that training_step calls"
    )


def refuse_foreign_leaf(layer: str, root: nn.Module, leaf: Tensor) -> None:
    """Refuse ``leaf``, from which ``layer`` computed its output, but which is neither its input nor its weight."""
    found = next((f"the parameter '{name}'" for name, parameter in root.named_parameters() if parameter is leaf), None)
    what = found or (
        f"a tensor of shape {tuple(leaf.shape)} that requires a gradient (as with torch.func.functional_call)"
    )
    raise PipelineRefusal(
        f"layer '{layer}' computes with {what}, which is not its own, so that its stage would neither follow nor train"
        " it; let a module in the layer hold it as a parameter, too, or give it to the call as an argument"
    )


class Observation:
    """One call of ``module``, a part of the model at the path ``name``, with ``value``. Make it just before the call.

    After :meth:`end`, ``mutates`` is True if the call changed a tensor of ``value`` in place. ``foreign`` has leaves
    that reach its output, but are neither inputs nor parameters.
    """

    def __init__(self, name: str, module: nn.Module, value: Any) -> None:
        self.name = name
        self.module = module
        self.mutates = False
        self.foreign: list[Tensor] = []
        self._given = tensors_of(value)
        self._parameters = list(module.parameters())
        self._starts = [graph_start(tensor) for tensor in self._given]
        self._output: Any = None
        self._outputs: list[Tensor] = []
        self._gave: list[Node | Tensor | None] = []
        self._before = _counters(self._given)
        self._weights = _counters(self._parameters)
        self._changes_weights = False

    def end(self, output: Any) -> None:
        """Record what the call, which returned ``output``, has changed."""
        self._output, self._outputs = output, tensors_of(output)
        self._gave = [graph_start(tensor) for tensor in self._outputs]
        # A view that the call has changed in place has another place in the graph now.
        starts = [*self._starts, *map(graph_start, self._given)]
        known = {id(tensor) for tensor in (*starts, *self._parameters)}
        ends = [start for start in starts if not isinstance(start, Tensor)]
        self.foreign = [leaf for leaf in graph_leaves(self._gave, ends) if id(leaf) not in known]
        self.mutates = self._before != _counters(self._given)
        self._changes_weights = self._weights != _counters(self._parameters)

    def layer(self, root: nn.Module, attributes: AttributesBefore) -> Layer:
        """Make the module a layer, of which stages run copies. ``attributes`` are from before the call.

        Raises:
            SettingError: if copies could not do what the module does.
        """
        refuse_compiled(self.name, self.module)
        self.check(root)
        if (set_one := attributes.changed()) is not None:
            raise sets_attribute(self.name, *set_one)
        aliases = not blocks(self._given).keys().isdisjoint(blocks(self._outputs))
        return Layer(self.name, self.module, self.mutates, aliases, class_of(self.module))

    def check(self, root: nn.Module) -> None:
        """Refuse what neither copies nor a graph of the module can do. ``root`` names parameters.

        The capture itself shows whether a graph may replace a module that sets attributes.
        """
        name, module = self.name, self.module
        refuse_hooks(name, module)
        if any(behind_functorch(tensor) is not None for tensor in self._given):
            raise PipelineRefusal(
                f"layer '{name}' is called in a function of torch.func (grad or vmap, say), whose tensors cannot be"
                " handed on to a stage; call it outside of that function"
            )
        if owner := next((part for part in module.modules() if _holds_generator(part)), None):
            raise PipelineRefusal(
                f"layer '{name}' keeps a random generator of its own (in {type(owner).__name__}), which the copies of"
                " the layer would not share; draw without it, then every minibatch has its own random numbers"
            )
        for leaf in self.foreign[:1]:
            refuse_foreign_leaf(name, root, leaf)
        if self._changes_weights:
            raise PipelineRefusal(
                f"layer '{name}' changes its own weights in forward (as nn.Embedding(max_norm=...) does), which only"
                " its copies would see; change them in a callback, after the optimizer's step"
            )
        refuse_opaque(f"layer '{name}' gives", self._output)

    def refuse_custom_function(self) -> None:
        """Refuse a user's ``torch.autograd.Function`` between inputs and output, which a graph lacks."""
        gave, given = ([None if isinstance(s, Tensor) else s for s in each] for each in (self._gave, self._starts))
        nodes: Iterator[Any] = graph_nodes(gave, given)
        if (node := next((node for node in nodes if isinstance(node, BackwardCFunction)), None)) is not None:
            if is_reentrant_checkpoint(node):
                raise reentrant_checkpoint()
            function = type(node).__name__.removesuffix("Backward")
            raise PipelineRefusal(
                f"'{self.name}' has a backward pass of its own, the torch.autograd.Function {function}, which"
                " torch.export does not keep; write it with torch's operators, or call it in training_step between two"
                " modules"
            )


def changes_input(layer: str, piece: str) -> SettingError:
    return PipelineRefusal(
        f"layer '{layer}' changes the input of the pipelined module '{piece}' in place, which training_step could not"
        " see; make it work out of place (inplace=False)"
    )


def refuse_opaque(what: str, value: Any) -> None:
    """Refuse an object in ``value`` that holds tensors. ``what`` is the beginning of the error."""
    if (opaque := opaque_in(value)) is not None:
        raise PipelineRefusal(
            f"{what} a {type(opaque).__name__} that holds tensors, whose gradients would be lost on the way through"
            " the pipeline; put tensors into tuples, lists, dicts or plain dataclasses"
        )


def _counters(tensors: Sequence[Tensor]) -> list[int]:
    return [version_counter(tensor) for tensor in tensors]


def _holds_generator(module: nn.Module) -> bool:
    kinds = [torch.Generator, random.Random]
    if (numpy := sys.modules.get("numpy")) is not None:
        kinds += [numpy.random.Generator, numpy.random.RandomState]
    return any(isinstance(value, tuple(kinds)) for value in vars(module).values())


T = TypeVar("T")


class Checked:
    """Subject of checks that may be refused, with the first reason."""

    refusal: Exception | None

    def check(self, check: Callable[[], T]) -> T | None:
        """Call ``check``, unless there is a refusal already, and keep the error that it raises."""
        if self.refusal is None:
            try:
                return check()
            except SettingError as error:
                self.refusal = error
        return None


@dataclass
class CallNode(Checked):
    """One call of a module.

    Attributes:
        piece: The module, as a piece if a pipeline can run it.
        inner: Calls that it made of modules with trainable parameters, in order.
        seconds: Its duration, including inner calls.
        refusal: Why no pipeline can run it, as far as the call has shown.
        graph: Data needed for its graph, or None if it gets no graph.
        inputs, outputs: Nodes of autograd's graph that made its arguments and its results.
        blocks: Blocks of memory in which its output lies.
    """

    piece: Piece
    inner: list[CallNode] = field(default_factory=list)
    seconds: float = 0.0
    refusal: Exception | None = None
    graph: WatchedCall | None = None
    inputs: list[Any] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    blocks: Collection[Any] = ()
    training: bool = True

    def ends(self, given: Any, output: Any) -> None:
        """Record where the call lies in autograd's graph."""
        given, made = tensors_of(given), tensors_of(output)
        self.inputs = [tensor.grad_fn for tensor in given if tensor.grad_fn is not None]
        self.outputs = [tensor.grad_fn for tensor in made if tensor.grad_fn is not None]
        self.blocks = blocks(made)

    def all(self) -> Iterator[CallNode]:
        """Yield this call and all calls below it, in order."""
        yield self
        for each in self.inner:
            yield from each.all()


@dataclass
class WatchedCall(Checked):
    """The watched call of a module of which a graph is to be made.

    Attributes:
        given: Its (args, kwargs).
        inputs, outputs: Tensors in ``given`` and ``gave``, where they are in autograd's graph.
        buffers, memory: Copies, and addresses, of the module's buffers before the call, by path.
        gave: Its result, or None until it is over.
        frozen: Python values that it may have read outside itself.
        autocast: State of autocast at the call.
        counters: For each tensor of ``given`` and ``gave``, the count of changes in place at the end of the call.
        lent: Path of a buffer that shared memory with one of these tensors at the end of the call.
        refusal: Why an ``nn.Sequential`` gets no graph, although it can run without one, or None.
    """

    given: Value
    inputs: Sequence[Tensor]
    buffers: dict[str, Tensor]
    memory: Mapping[str, int | None]
    frozen: FrozenValues
    autocast: Autocast = field(default_factory=Autocast.current)
    gave: Value | None = None
    outputs: Sequence[Tensor] = ()
    counters: list[int] = field(default_factory=list)
    lent: str | None = None
    refusal: Exception | None = None

    def end(self, module: nn.Module, gave: Any) -> None:
        """Record that the call of ``module`` is over and returned ``gave``."""
        self.gave, self.outputs = Value.of(gave), tensors_of(gave)
        self.counters = _counters(self._tensors())
        seen = {address_of(tensor) for tensor in self._tensors()} - {None}
        for path, buffer in module.named_buffers():
            if path not in self.buffers or self.buffers[path].shape != buffer.shape:
                self.buffers[path] = buffer.clone()  # it is made in the first forward
            if address_of(buffer) in seen:
                self.lent = path

    def own_buffers(self, name: str, module: nn.Module) -> None:
        """Give the buffers of ``module``, called ``name``, memory of their own, because stages write to them.

        Raises:
            SetsState: if later code has changed a buffer in place, through arguments or results of the call.
        """
        if self.lent is not None and self.was_changed:
            raise SetsState(
                f"'{name}' shares the memory of its buffer '{name}.{self.lent}' with what it is given or returns, which"
                " is changed in place later in training_step; give it, or return, a clone()"
            )
        for path, buffer in module.named_buffers():
            if address_of(buffer) != self.memory.get(path):  # it was assigned, maybe a view of a batch
                buffer.data = buffer.detach().clone()

    @property
    def was_changed(self) -> bool:
        """True if later code has changed arguments or results in place."""
        return self.counters != _counters(self._tensors())

    def _tensors(self) -> Sequence[Tensor]:
        return self.given.tensors + (() if self.gave is None else self.gave.tensors)


def user_bytes(
    root: nn.Module, loss: Tensor, batch: Any, calls: Sequence[CallNode], pieces: Collection[nn.Module]
) -> UserBytes:
    """Count the bytes on the last stage's device besides layers.

    ``loss`` is the watched step's before its backward, ``batch`` has its arguments, ``calls`` its calls of ``pieces``.
    """
    inside = {id(tensor) for piece in pieces for tensor in (*piece.parameters(), *piece.buffers())}
    outside = [each for each in (*root.parameters(), *root.buffers()) if id(each) not in inside]
    trained = sum(each.nbytes for each in outside if each.requires_grad)
    ends = {node for call in calls for node in call.outputs}
    behind = {*graph_nodes([loss.grad_fn], ends)}
    before = {*graph_nodes((node for call in calls for node in call.inputs), ends)}
    own = blocks(tensors_of(batch))
    counted = {*own, *blocks((*root.parameters(), *root.buffers())), *(each for call in calls for each in call.blocks)}
    kept, saved = _saved(before), _saved(behind - before)
    return UserBytes(
        trained,
        sum(each.nbytes for each in outside) - trained,
        sum(own.values()),
        sum(size for block, size in kept.items() if block not in counted),
        sum(size for block, size in saved.items() if block not in counted and block not in kept),
    )


def _saved(nodes: Iterable[Any]) -> dict[tuple[torch.device, int], int]:
    """Return the blocks of what ``nodes`` keep, packed if hooks have packed it, since unpacking would run user code."""
    values = [getattr(node, name) for node in nodes for name in _names(node.__class__)]
    kept = [each for value in values for each in (value if isinstance(value, tuple) else [value])]
    packed = [getattr(each, "data", None) for each in kept]
    return blocks([each for each in packed if isinstance(each, Tensor)])


@cache
def _names(kind: Any) -> list[str]:
    """Return the attributes of nodes of this ``kind`` that hold saved tensors, as torch documents them."""
    return [name for name in dir(kind) if name.startswith("_raw_saved_")]
