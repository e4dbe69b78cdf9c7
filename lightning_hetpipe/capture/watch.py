"""Finds the pieces of a LightningModule and their layers, by watching one ordinary step of the user's.

The watched step runs as it would without us, so nothing is guessed: which modules are called, in which order, with what
inputs, whether a layer changes its input in place, and what no stage could do as it does.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from lightning_hetpipe.capture.compiled_modules import is_compiled, is_looked_through, refuse_compiled, refuse_scripted
from lightning_hetpipe.capture.frozen import FrozenValues
from lightning_hetpipe.capture.gradient_checkpointing import without_checkpoints
from lightning_hetpipe.capture.interceptor import NOT_TAKEN, Interceptor, ModuleCall
from lightning_hetpipe.capture.leaves import refuse_foreign_leaves, refuse_leaves
from lightning_hetpipe.capture.opaque_containers import opaque_in, without_opaque
from lightning_hetpipe.capture.parity_check import WatchedCall, capture
from lightning_hetpipe.capture.pieces import Piece, class_of, never_called, refuse_hooks
from lightning_hetpipe.capture.plain_attributes import attributes_with_contents, refuse_changes
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.pipeline.random.generators import RandomGenerators
from lightning_hetpipe.pipeline.stage import Layer
from lightning_hetpipe.pipeline.user.parameter_view import changes_parameter
from lightning_hetpipe.pipeline.values import Value, blocks, equal, tensors_of
from lightning_hetpipe.torch_private import behind_compile, graph_nodes, has_global_hooks, version_counter


class Watch:
    """Watches one step of ``root``: calls of modules in it go to :meth:`answer`.

    Args:
        root: The LightningModule.
        names: Modules that may be pipelined; None for all.
        generators: The run's random generators; layers draw from them in the watched step too.

    Attributes:
        pieces: Modules that a pipeline is to run, in the order of their first calls.
        called: The pieces that were called, by their places among these, in the order of the calls.
    """

    def __init__(self, root: nn.Module, names: Collection[str] | None, generators: RandomGenerators) -> None:
        self.pieces: list[Piece] = []
        self.called: list[int] = []
        self.root = root
        self.names = names
        self.generators = generators

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within it, calls of modules are seen. Nothing of it remains in the modules afterwards."""
        with Interceptor(list(self.candidates()), self.answer, one_step=True):
            yield

    def candidates(self) -> Iterator[tuple[str, nn.Module]]:
        """Modules whose calls may matter."""
        raise NotImplementedError

    def answer(self, call: ModuleCall) -> Any:
        """Run the module that is called, or return ``NOT_TAKEN``."""
        raise NotImplementedError


class TrainingWatch(Watch):
    """Watches one ``training_step``, and refuses what cannot be pipelined.

    Args:
        root, names, generators: As :class:`Watch` takes them.
        minibatch: The number of the watched minibatch.
        frozen_too: Whether a Sequential with frozen parameters is a piece as well, as a callback unfreezes it later. (A
            named one always is.)
    """

    def __init__(
        self,
        root: nn.Module,
        names: Collection[str] | None,
        generators: RandomGenerators,
        minibatch: int,
        frozen_too: bool = False,
    ) -> None:
        super().__init__(root, names, generators)
        self._minibatch = minibatch
        self._frozen_too = frozen_too
        self._boundaries: dict[Any, list[Tensor]] = {}
        self._calls: dict[str, list[WatchedCall]] = {}
        self._counters: dict[str, int] = {}
        self._buffers: dict[str, Tensor] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        self._counters = {name: version_counter(weight) for name, weight in self.root.named_parameters()}
        self._buffers = {name: buffer.clone() for name, buffer in self.root.named_buffers()}
        with super().watching():
            yield

    def candidates(self) -> Iterator[tuple[str, nn.Module]]:
        left_out: set[nn.Module] = {self.root}
        for module in self.root.modules():
            if module is not self.root and is_compiled(module):
                wrapper = [module] if behind_compile(module) is not None else []
                left_out.update(wrapper if is_looked_through(module) else module.modules())
        return ((name, module) for name, module in self.root.named_modules() if module not in left_out)

    def check(self, loss: Tensor) -> None:
        """Refuses what cannot be pipelined, after the watched step has given ``loss``."""
        called = [piece.name for piece in self.pieces]
        if missing := [name for name in self.names or () if name not in called]:
            raise never_called(self.names or (), missing[0])
        if not any(p.requires_grad for piece in self.pieces for p in piece.module.parameters()):
            asked = f" (of module={list(self.names)!r})" if self.names else ""
            raise SettingError(
                f"training_step called no module with trainable parameters{asked}; call one, or use another strategy"
            )
        for name, weight in self.root.named_parameters():
            if version_counter(weight) != self._counters.get(name, version_counter(weight)):
                raise changes_parameter(name)
        refuse_leaves(self.root, {id(parameter) for parameter in self.root.parameters()}, loss, self._boundaries)
        self._boundaries.clear()
        for piece in self.pieces:
            if (calls := self._calls.pop(piece.name, None)) is not None:
                capture(piece, calls, self.generators, self._minibatch)

    def changed_buffers(self) -> set[int]:
        """The ``id`` of each buffer that the watched step has changed."""
        # By value: batch norm changes its statistics without counting it.
        before = self._buffers
        return {id(b) for name, b in self.root.named_buffers() if name not in before or not equal(before[name], b)}

    def answer(self, call: ModuleCall) -> Any:
        name, module = call.name, call.module
        if not self._is_wanted(name, module):
            return NOT_TAKEN
        place = next((place for place, piece in enumerate(self.pieces) if piece.module is module), len(self.pieces))
        if place == len(self.pieces):
            self._add(name, module)
        piece, ordinal = self.pieces[place], self.called.count(place)
        self.called.append(place)
        if piece.needs_graph():
            return self._run_whole(piece, (call.args, call.kwargs), ordinal)
        return self._run_layers(piece, piece.value(call.args, call.kwargs), ordinal)

    def _add(self, name: str, module: nn.Module) -> None:
        if (part := next((piece for piece in self.pieces if piece.module in module.modules()), None)) is not None:
            raise SettingError(
                f"training_step calls '{name}' and, before it, '{part.name}', which is a part of it; call the whole,"
                " or its parts"
            )
        refuse_scripted(name, module)
        self.pieces.append(Piece.of(name, module))

    def _is_wanted(self, name: str, module: nn.Module) -> bool:
        if self.names is not None:
            return name in self.names
        if any(module is not piece.module and module in piece.module.modules() for piece in self.pieces):
            return False  # if the loss depends on it so, it is refused as used beside the piece
        return any(p.requires_grad or self._frozen_too for p in module.parameters())

    def _run_whole(self, piece: Piece, given: tuple[tuple[Any, ...], dict[str, Any]], ordinal: int) -> Any:
        """Runs a module of which stages will run a graph."""
        _refuse_global_hooks()
        _refuse_opaque(f"the pipelined module '{piece.name}' is given", given)
        name, module = piece.name, piece.module
        buffers = {path: buffer.clone() for path, buffer in module.named_buffers()}

        def call(given: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
            args, kwargs = given
            with without_checkpoints(module):  # whose backward would draw random numbers of its own
                return module.forward(*args, **kwargs)  # not through __call__, whose hooks are running already

        calls = self._calls.setdefault(name, [])
        frozen = calls[0].frozen if calls else FrozenValues(module)
        with (
            self.generators.watch({name: module}, self._minibatch, ordinal),
            frozen.answers.noted(),
            frozen.noted(),
        ):
            output, layer = _run_observed(self.root, name, module, call, given, is_graph=True)
        for path, buffer in module.named_buffers():
            if path not in buffers or buffers[path].shape != buffer.shape:
                buffers[path] = buffer.clone()  # it is made in the first forward
        if layer.mutates_input:
            raise _changes_input(name, name)
        if (function := _custom_function(tensors_of(output), tensors_of(given))) is not None:
            raise SettingError(
                f"'{name}' has a backward pass of its own, the torch.autograd.Function {function}, which torch.export"
                " does not keep; write it with torch's operators, or call it in training_step between two modules"
            )
        calls.append(WatchedCall(Value.of(given), buffers, Value.of(output), frozen))
        return self._joined(tensors_of(given), output)

    def _run_layers(self, piece: Piece, value: Any, ordinal: int) -> Any:
        _refuse_global_hooks()
        _refuse_opaque(f"the pipelined module '{piece.name}' is given", value)
        given = tensors_of(value)
        before = [version_counter(tensor) for tensor in given]
        found, inputs, layers = piece.modules_of_layers(), list[Value](), list[Layer]()
        with self.generators.watch(dict(found), self._minibatch, ordinal) as calls:
            for name, module in found:
                refuse_compiled(name, module)
                inputs.append(Value.of(value))
                value, layer = _run_observed(self.root, name, module, calls[name], value)
                layers.append(layer)
                if before != [version_counter(tensor) for tensor in given]:
                    raise _changes_input(name, piece.name)
        piece.inputs.append(inputs)
        piece.layers = [one.joined(other) for one, other in zip(piece.layers or layers, layers, strict=True)]
        return self._joined(given, value)

    def _joined(self, given: list[Tensor], output: Any) -> Any:
        """``output``, behind a boundary in the graph where a search for leaves goes on at ``given``."""
        value = Value.of(output)
        outputs = tensors_of(output)
        joined = {id(tensor): tensor for tensor in outputs if tensor.requires_grad}
        if not joined or not torch.is_grad_enabled():
            return output
        join: Any = _WatchedBoundary.apply  # torch has no types here
        joined = dict(zip(joined, join(*joined.values()), strict=True))
        self._boundaries[next(iter(joined.values())).grad_fn] = given
        return value.tree([joined.get(id(tensor), tensor) for tensor in outputs])


class _WatchedBoundary(torch.autograd.Function):
    """The identity: the user's graph ends here in the watched step as it will in the pipeline."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return gradients


def _run_observed(
    root: nn.Module, name: str, module: nn.Module, call: Callable[..., Any], value: Any, is_graph: bool = False
) -> tuple[Any, Layer]:
    """Runs a layer, tells what it did, and refuses what its copies in stages could not do as it does.

    Whether a graph may stand for a module that sets attributes is seen when it is captured.
    """
    refuse_hooks(name, module)
    if owner := next((part for part in module.modules() if _holds_generator(part)), None):
        raise SettingError(
            f"layer '{name}' keeps a random generator of its own (in {type(owner).__name__}), which the copies of the"
            " layer would not share; draw without it, then every minibatch has its own random numbers"
        )
    given, parameters, parts = tensors_of(value), list(module.parameters()), list(module.modules())
    before = [version_counter(tensor) for tensor in given]
    weights = [version_counter(parameter) for parameter in parameters]
    attributes = [attributes_with_contents(part) for part in parts]
    output = call(value)
    refuse_foreign_leaves(name, root, output, given, parameters)
    if weights != [version_counter(parameter) for parameter in parameters]:
        raise SettingError(
            f"layer '{name}' changes its own weights in forward (as nn.Embedding(max_norm=...) does), which only its"
            " copies would see; change them in a callback, after the optimizer's step"
        )
    if is_graph:
        output = without_opaque(name, output)
    else:
        for part, earlier in zip(parts, attributes, strict=True):
            refuse_changes(name, part, earlier)
        _refuse_opaque(f"layer '{name}' gives", output)
    mutates = before != [version_counter(tensor) for tensor in given]
    aliases = not blocks(given).keys().isdisjoint(blocks(tensors_of(output)))
    return output, Layer(name, module, mutates, aliases, class_of(module))


def _custom_function(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> str | None:
    """Name a ``torch.autograd.Function`` between ``inputs`` and ``outputs``; None if there is none."""
    nodes: Iterator[Any] = graph_nodes([tensor.grad_fn for tensor in outputs], [tensor.grad_fn for tensor in inputs])
    found = next((node for node in nodes if isinstance(node, BackwardCFunction)), None)
    return None if found is None else type(found).__name__.removesuffix("Backward")


def _changes_input(layer: str, piece: str) -> SettingError:
    return SettingError(
        f"layer '{layer}' changes the input of the pipelined module '{piece}' in place, which training_step could not"
        " see; make it work out of place (inplace=False)"
    )


def _refuse_global_hooks() -> None:
    if has_global_hooks():
        raise SettingError(
            "a hook on all modules is set (torch.nn.modules.module.register_module_...), which stages would run at"
            " the same time as other user code; remove it before fit"
        )


def _refuse_opaque(what: str, value: Any) -> None:
    if (opaque := opaque_in(value)) is not None:
        raise SettingError(
            f"{what} a {type(opaque).__name__} that holds tensors, whose gradients would be lost on the way through"
            " the pipeline; put tensors into tuples, lists, dicts or plain dataclasses"
        )


def _holds_generator(module: nn.Module) -> bool:
    kinds = [torch.Generator, random.Random]
    if (numpy := sys.modules.get("numpy")) is not None:
        kinds += [numpy.random.Generator, numpy.random.RandomState]
    return any(isinstance(value, tuple(kinds)) for value in vars(module).values())
