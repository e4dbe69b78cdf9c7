"""Finds out, on one step of an evaluation, which of the modules that it calls a pipeline can run.

A call that a pipeline would not answer exactly as the module does is left to the module: nothing is refused here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hetpipe.capture.captured import Captured
from lightning_hetpipe.capture.compiled_modules import is_compiled, is_scripted, refuse_scripted
from lightning_hetpipe.capture.frozen import FrozenValues
from lightning_hetpipe.capture.interceptor import NOT_TAKEN, Interceptor, ModuleCall
from lightning_hetpipe.capture.opaque_containers import stranger_in
from lightning_hetpipe.capture.pieces import Piece, is_plain_sequential, refuse_hooks
from lightning_hetpipe.capture.plain_attributes import attributes_with_contents, changed_attribute
from lightning_hetpipe.capture.seeded_forward import run_drawing
from lightning_hetpipe.capture.single_layer import SingleLayer, is_single
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.pipeline.random.generators import RandomGenerators
from lightning_hetpipe.pipeline.stage import Layer
from lightning_hetpipe.pipeline.values import Value, equal
from lightning_hetpipe.torch_private import pytree, version_counter


class Calls:
    """The modules that one step calls from outside every other one that has parameters.

    Args:
        root: The LightningModule.
        names: Which modules may be pipelined; None for all.
        chance: The run's random numbers.
        batch: Names the batch, for its random numbers.
        known: The pieces of the training that goes on; then no others are looked for.

    Attributes:
        pieces: Those that a pipeline can run, in the order of their first calls.
        reasons: Why it cannot run the others, by their names.
    """

    def __init__(
        self,
        root: nn.Module,
        names: Collection[str] | None,
        chance: RandomGenerators,
        batch: str,
        known: Sequence[Piece] = (),
    ) -> None:
        self.pieces: list[Piece] = []
        self.reasons: dict[str, str] = {}
        self._root = root
        self._names = names
        self._chance = chance
        self._batch = batch
        self._known = {piece.module: piece for piece in known}
        self._seen: list[nn.Module] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within it, calls of modules are seen. Nothing of it remains in the modules afterwards."""
        modules = [
            (name, module)
            for name, module in self._root.named_modules()
            if module is not self._root and self._is_wanted(name, module)
        ]
        with Interceptor(modules, self._seen_call):
            yield

    def _is_wanted(self, name: str, module: nn.Module) -> bool:
        if self._known:
            return module in self._known
        if is_compiled(module) or is_scripted(module) or (self._names is not None and name not in self._names):
            return False
        return any(True for _ in module.parameters())

    def _seen_call(self, call: ModuleCall) -> Any:
        module = call.module
        if module in self._seen:
            return NOT_TAKEN
        overlaps = any(part in other.modules() for other in self._seen for part in module.modules())
        self._seen.append(module)
        if overlaps:  # it is left to user code, which may run it while stages run the other
            return call.run()
        with call.aside():
            return self._try(call.name, module, call.args, call.kwargs)

    def _try(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the module as it is, then tries whether its layers do the same one by one."""
        parts, buffers = list(module.modules()), list(module.buffers())
        counters = [_counter(buffer) for buffer in buffers]
        attributes = [attributes_with_contents(part) for part in parts]
        # A module may change what it is given.
        own_args, own_kwargs = pytree.tree_map_only(Tensor, torch.clone, (args, kwargs))
        known = self._known.get(module)
        frozen = FrozenValues(module) if known is None or known.captured is None else known.captured.frozen
        with frozen.noted():
            output = run_drawing(name, module, self._chance, self._batch, args, kwargs)
        try:
            if torch.is_grad_enabled():
                raise SettingError("it is called with gradients")
            if any(part.training for part in parts):
                raise SettingError("it is in training mode")
            if counters != [_counter(buffer) for buffer in buffers]:
                raise SettingError("it changes its buffers")
            for part, earlier in zip(parts, attributes, strict=True):
                if attribute := changed_attribute(earlier, attributes_with_contents(part)):
                    raise SettingError(f"it changes its attribute '{attribute}' (of {type(part).__name__})")
            if (stranger := stranger_in((args, kwargs, output))) is not None:
                raise SettingError(f"a {type(stranger).__name__} that holds tensors goes in or out")
            piece = known or _new(name, module, own_args, own_kwargs, frozen)
            value = piece.value(own_args, own_kwargs)
            self._compare(piece, value, output)
            if piece.captured is not None:
                piece.captured.take_equal(value)
        except Exception as error:  # whatever it is, the module itself has computed
            self.reasons[name] = str(error).strip() or type(error).__name__
        else:
            self.pieces.append(piece)
        return output

    def _compare(self, piece: Piece, value: Any, output: Any) -> None:
        inputs: list[Value] = []
        with self._chance.watch({layer.name: layer.module for layer in piece.layers}, self._batch) as calls:
            for layer in piece.layers:
                inputs.append(Value.of(value))
                value = calls[layer.name](value)
        found, wanted = Value.of(value).tensors, Value.of(output).tensors
        if len(found) != len(wanted) or not all(map(_same, found, wanted)):
            raise SettingError("its layers give other values, one by one, than the module itself")
        if not self._known:
            piece.inputs = inputs


def _new(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], frozen: FrozenValues) -> Piece:
    refuse_scripted(name, module)
    piece = Piece(name, module)
    if is_single(module):
        piece.single = SingleLayer(module)
    if piece.single is not None or is_plain_sequential(module):
        for path, layer in piece.modules_of_layers():
            refuse_hooks(path, layer)
            piece.layers.append(Layer(path, layer))
    else:
        refuse_hooks(name, module)
        piece.captured = Captured(name, module, args, kwargs, piece.autocast, frozen)
        piece.layers = piece.captured.layers
    return piece


def _counter(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else version_counter(tensor)


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and equal(one, other)
