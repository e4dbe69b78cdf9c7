"""Finds out, on one step of an evaluation, which of the modules that it calls a pipeline can run.

If a pipeline would not answer a call exactly as the module does, the module runs itself. Only a side effect that cannot
be put back is refused. A module that cannot be captured is taken apart, as in training: the calls that it makes are
tried instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hetpipe.capture.captured import Captured
from lightning_hetpipe.capture.compiled_modules import is_compiled, is_scripted, refuse_scripted
from lightning_hetpipe.capture.effects import SideEffect, refuse_noticed, untouched
from lightning_hetpipe.capture.export import decides
from lightning_hetpipe.capture.frozen import FrozenValues
from lightning_hetpipe.capture.interceptor import NOT_TAKEN, ModuleCall
from lightning_hetpipe.capture.noticed_calls import OUTPUT, SEED, STATE
from lightning_hetpipe.capture.opaque_containers import opaque_in, unknown_in, without_opaque
from lightning_hetpipe.capture.parity_check import equal_outputs
from lightning_hetpipe.capture.piece_search import CAPTURE_TIMEOUT, without_graph
from lightning_hetpipe.capture.pieces import Piece, class_of, refuse_hooks
from lightning_hetpipe.capture.plain_attributes import AttributesBefore
from lightning_hetpipe.capture.watch import Watch
from lightning_hetpipe.errors import SettingError, reason_of
from lightning_hetpipe.pipeline.random.generators import RandomGenerators
from lightning_hetpipe.pipeline.stage import Layer
from lightning_hetpipe.pipeline.user.user_section import ProcessState, own_state
from lightning_hetpipe.pipeline.values import Value, equal
from lightning_hetpipe.torch_private.tensors import pytree, version_counter


class EvaluationWatch(Watch):
    """Watches one step of an evaluation, for modules that it calls from outside every other one that has parameters.

    Args:
        root, names, generators: As :class:`Watch` takes them.
        batch: Names the batch, for its random numbers.
        known: The pieces of the training that goes on; then no others are looked for.
        capture_timeout: Seconds after which nothing more is taken apart.
        calls: Gets each module that was called.
        on_apart: Told of each module before it is run again to be taken apart.

    Attributes:
        reasons: Why a pipeline cannot run the others, by their names.
        without_graph: Why Sequentials of the user's modules have no graph, a line for each.
        apart: Modules that were taken apart, by their names.
        shares: Whether a module has a side effect that batches in flight would see of each other.
    """

    def __init__(
        self,
        root: nn.Module,
        names: Collection[str] | None,
        generators: RandomGenerators,
        batch: str,
        known: Sequence[Piece] = (),
        capture_timeout: float = CAPTURE_TIMEOUT,
        calls: list[nn.Module] | None = None,
        on_apart: Callable[[nn.Module], None] = lambda module: None,
    ) -> None:
        super().__init__(root, names, generators)
        self.reasons: dict[str, str] = {}
        self.without_graph: list[str] = []
        self.apart: dict[str, nn.Module] = {}
        self.shares = False
        self._batch = batch
        self._known = {piece.module: piece for piece in known}
        self._called: list[nn.Module] = []
        self._capture_timeout = capture_timeout
        self._calls = [] if calls is None else calls
        self._on_apart = on_apart
        self._apart_since: float | None = None
        self._refused: set[type[nn.Module]] = set()

    def candidates(self) -> Iterator[tuple[str, nn.Module]]:
        modules = ((name, module) for name, module in self.root.named_modules() if module is not self.root)
        return ((name, module) for name, module in modules if self._is_wanted(name, module))

    def answer(self, call: ModuleCall) -> Any:
        try:
            return self._answer(call)
        finally:
            self._calls.append(call.module)

    def _answer(self, call: ModuleCall) -> Any:
        module, ordinal = call.module, self._called.count(call.module)
        if ordinal:
            piece = next((piece for piece in self.pieces if piece.module is module), None)
            if piece is None:
                return NOT_TAKEN
            self._called.append(module)
            with call.own_forward():
                return piece.run(self.generators, self._batch, call.args, call.kwargs, ordinal)
        overlaps = any(part in other.modules() for other in self._called for part in module.modules())
        self._called.append(module)
        if overlaps:  # it is left to user code, which may run it while stages run the other
            return call.run()
        with call.own_forward():
            return self._try(self._known.get(module) or Piece.of(call.name, module), call)

    def _is_wanted(self, name: str, module: nn.Module) -> bool:
        if self._known:
            return module in self._known
        if is_compiled(module) or is_scripted(module) or (self.names is not None and name not in self.names):
            return False
        return any(True for _ in module.parameters())

    def _try(self, piece: Piece, call: ModuleCall) -> Any:
        """Run the module of ``piece`` as it is, then try whether its layers do the same one by one."""
        args, kwargs = call.args, call.kwargs
        parts = list(piece.module.modules())
        buffers = [(buffer, version_counter(buffer), buffer.clone()) for buffer in piece.module.buffers()]
        attributes = AttributesBefore(piece.module)
        # A module may change what it is given.
        own_args, own_kwargs = pytree.tree_map_only(Tensor, torch.clone, (args, kwargs))
        frozen = FrozenValues(piece.module) if piece.captured is None else piece.captured.frozen
        with frozen.answers.noted(), frozen.noted():
            output = piece.run(self.generators, self._batch, args, kwargs)
        apart = False
        try:
            if torch.is_grad_enabled():
                raise SettingError("it is called with gradients")
            if any(part.training for part in parts):
                raise SettingError("it is in training mode")
            if any(map(_is_other, buffers, piece.module.buffers())):
                raise SettingError("it changes its buffers")
            scripted = any(map(is_scripted, parts))
            writes = frozen.noticed.told(OUTPUT) is not None  # and would write again
            apart = self.names is None and not self._known and piece.needs_graph() and not scripted and not writes
            if (set_one := attributes.changed()) is not None:
                raise SettingError(f"it changes its attribute '{set_one[1]}' (of {type(set_one[0]).__name__})")
            refuse_noticed(piece.name, frozen, OUTPUT, SEED, STATE)
            if (opaque := opaque_in((args, kwargs))) is not None:
                raise SettingError(f"it is given a {type(opaque).__name__} that holds tensors")
            if type(piece.module) in self._refused or self._is_late():
                raise SettingError("another one could not be captured, or there was no time left to try")
            if piece.module in self._known or not piece.may_have_graph():
                handed_on = self._handed_on(piece, own_args, own_kwargs, frozen, output, graph=piece.needs_graph())
            else:
                try:
                    handed_on = self._handed_on(piece, own_args, own_kwargs, frozen, output, graph=True)
                except (torch.OutOfMemoryError, SideEffect):  # which the layers would have without a graph, too
                    raise
                except Exception as error:  # whatever torch.export raises
                    piece.captured, piece.layers = None, []
                    handed_on = self._handed_on(piece, own_args, own_kwargs, frozen, output, graph=False)
                    self.without_graph.append(without_graph(piece, error))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever it is, the module itself has computed
            if isinstance(error, SideEffect) and error.is_lost:
                raise
            self.shares |= isinstance(error, SideEffect) and error.is_shared
            self.reasons[piece.name] = reason_of(error)
            # It would add once more to what it is given, such as a cache, and to what batches share.
            if apart and not self.shares and unknown_in((args, kwargs)) is None:
                self._take_apart(call, own_args, own_kwargs, frozen)
            return output
        self.pieces.append(piece)
        return handed_on

    def _handed_on(
        self,
        piece: Piece,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        frozen: FrozenValues,
        output: Any,
        *,
        graph: bool,
    ) -> Any:
        """Find the layers of ``piece``, unless they are known, and return what they hand on of the module's ``output``.

        Args:
            graph: Whether they are parts of a graph.

        Raises:
            SettingError: where they give something else than the module has given.
        """
        if piece.module not in self._known:
            _find_layers(piece, args, kwargs, frozen, graph)
        value = piece.value(args, kwargs)
        handed_on = without_opaque(piece.name, output) if piece.captured is not None else output
        if (opaque := opaque_in(handed_on)) is not None:
            raise SettingError(f"it gives a {type(opaque).__name__} that holds tensors")
        self._compare(piece, value, handed_on)
        if piece.captured is not None:
            if piece.captured.decides is not None and not piece.needs_graph() and not self._known:
                raise decides(piece.name, f" at {piece.captured.decides}")
            piece.captured.take_equal(value)
        return handed_on

    def _take_apart(
        self, call: ModuleCall, args: tuple[Any, ...], kwargs: dict[str, Any], frozen: FrozenValues
    ) -> None:
        """Try the calls that a module makes which cannot be captured, by running it again on these copies."""
        outermost, before = self._apart_since is None, len(self.pieces)
        if outermost:
            self._apart_since = time.perf_counter()
        self._refused.add(type(call.module))
        self._called.remove(call.module)
        self.apart[call.name] = call.module
        self._on_apart(call.module)
        # What it gives is of no use.
        with (
            own_state(ProcessState.seeded(0, 0, "capture")),
            untouched(call.module, frozen),
            call.intercepting(),
            suppress(Exception),
        ):
            call.run_with(args, kwargs)
        if outermost:
            self._apart_since = None
            inner = [name for name in self.reasons if name.startswith(f"{call.name}.")]
            self.reasons = {name: why for name, why in self.reasons.items() if name not in inner}
            if found := len(self.pieces) - before:
                self.reasons[call.name] += f" ({found} of the modules in it {'do' if found > 1 else 'does'})"

    def _is_late(self) -> bool:
        """Tell whether the time for taking a module apart is over."""
        return self._apart_since is not None and time.perf_counter() - self._apart_since > self._capture_timeout

    def _compare(self, piece: Piece, value: Any, output: Any) -> None:
        inputs: list[Value] = []
        with self.generators.watch({layer.name: layer.module for layer in piece.layers}, self._batch) as calls:
            for layer in piece.layers:
                inputs.append(Value.of(value))
                value = calls[layer.name](value)
        if not equal_outputs(Value.of(value), Value.of(output)):
            raise _other_values(piece.module)
        if not self._known:
            piece.inputs = [inputs]


def _find_layers(
    piece: Piece, args: tuple[Any, ...], kwargs: dict[str, Any], frozen: FrozenValues, graph: bool
) -> None:
    refuse_scripted(piece.name, piece.module)
    if graph:
        refuse_hooks(piece.name, piece.module)
        piece.captured = Captured(piece.name, piece.module, args, kwargs, frozen)
        piece.layers = piece.captured.layers
    for name, layer in [] if graph else piece.modules_of_layers():
        refuse_hooks(name, layer)
        piece.layers.append(Layer(name, layer, kind=class_of(layer)))


def _is_other(before: tuple[Tensor, int, Tensor], now: Tensor) -> bool:
    buffer, counter, value = before  # which writes by .data change without a count
    return now is not buffer or version_counter(now) != counter or not equal(now, value)


def _other_values(module: nn.Module) -> SettingError:
    said = "its layers give other values, one by one, than the module itself"
    if any(isinstance(part, nn.TransformerEncoder) and part.use_nested_tensor for part in module.modules()):
        said += (
            ", as nn.TransformerEncoder computes with nested tensors where it is given a padding mask; make it with"
            " enable_nested_tensor=False"
        )
    elif torch.is_inference_mode_enabled():
        said += (
            ", as attention to other tokens does, which torch computes otherwise in inference mode while it is watched;"
            " set Trainer(inference_mode=False)"
        )
    return SettingError(said)
