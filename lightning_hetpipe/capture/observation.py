"""Observation of one call of a layer: facts that copies in stages must reproduce, and refusals where they cannot.

The leaves that a loss reaches are checked, too: leaves that would get no gradient, or one of another version, are
refused.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from lightning_hetpipe.capture.contents import AttributesBefore, opaque_in, sets_attribute
from lightning_hetpipe.capture.pieces import class_of, refuse_hooks
from lightning_hetpipe.capture.prepared_modules import refuse_compiled, refuse_scripted
from lightning_hetpipe.errors import PipelineRefusal, SettingError
from lightning_hetpipe.pipeline.reentrant_checkpoints import is_reentrant_checkpoint, reentrant_checkpoint
from lightning_hetpipe.pipeline.stage import Layer
from lightning_hetpipe.pipeline.values import blocks, tensors_of
from lightning_hetpipe.torch_private.autograd import graph_leaves, graph_nodes, graph_start
from lightning_hetpipe.torch_private.tensors import behind_functorch, version_counter


def refuse_leaves(root: nn.Module, allowed: Collection[int], loss: Tensor, made_inside: bool = False) -> None:
    """Refuses a leaf that ``loss`` reaches, in ``root`` or not, whose gradient would be of another version or lost.

    Args:
        root: The LightningModule, which names parameters.
        allowed: Leaves, by ``id``.
        loss: What is differentiated.
        made_inside: Whether modules that run as user code make leaves, whose gradients nobody wants, themselves.

    Raises:
        SettingError: which names the parameter.
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
    """Refuses ``leaf``, from which ``layer`` has computed its output, and which is none of its inputs and weights.

    Raises:
        SettingError: which names the leaf, if it is a parameter of ``root``.
    """
    found = next((f"the parameter '{name}'" for name, parameter in root.named_parameters() if parameter is leaf), None)
    what = found or (
        f"a tensor of shape {tuple(leaf.shape)} that requires a gradient (as with torch.func.functional_call)"
    )
    raise PipelineRefusal(
        f"layer '{layer}' computes with {what}, which is not its own, so that its stage would neither follow nor train"
        " it; let a module in the layer hold it as a parameter, too, or give it to the call as an argument"
    )


class Observation:
    """One call of ``module``, a part of the model at the path ``name``, with ``value``; made just before the call.

    Attributes:
        name: The module's path.
        module: The live module.
        mutates: Whether the call changed a tensor of ``value`` in place, once :meth:`end` was called.
        foreign: The leaves from which it has computed its output, and which are none of its inputs and parameters.
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
        """Note what has changed; the call is over, and gave ``output``."""
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
        """Make the module a layer, of which stages run copies.

        Args:
            root: The LightningModule, which names parameters.
            attributes: Those of the module, taken before the call.

        Raises:
            SettingError: if copies could not do as the module does.
        """
        refuse_compiled(self.name, self.module)
        self.check(root)
        if (set_one := attributes.changed()) is not None:
            raise sets_attribute(self.name, *set_one)
        aliases = not blocks(self._given).keys().isdisjoint(blocks(self._outputs))
        return Layer(self.name, self.module, self.mutates, aliases, class_of(self.module))

    def check(self, root: nn.Module) -> None:
        """Refuse what neither copies nor a graph of the module could do as it does; ``root`` names parameters.

        Whether a graph may stand for a module that sets attributes is seen when it is captured.
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
        """Refuse a ``torch.autograd.Function`` of the user's between its inputs and its output: a graph lacks it."""
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
    """Refuse an object in ``value`` that holds tensors; ``what`` is said to be or have it."""
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
