"""Watch of one step of an evaluation, which finds the called modules that a pipeline can run.

If a pipeline would not answer a call exactly as the module does, the module runs itself. Only a side effect that cannot
be put back is refused. A module that cannot be captured is taken apart, as in training: the calls in it are tried.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hetpipe.capture.captured import Captured
from lightning_hetpipe.capture.contents import AttributesBefore, opaque_in, unknown_in, without_opaque
from lightning_hetpipe.capture.effects import FrozenValues, SideEffect, refuse_noticed, untouched
from lightning_hetpipe.capture.export import decides
from lightning_hetpipe.capture.noticed_calls import OUTPUT, SEED, STATE
from lightning_hetpipe.capture.parity_check import equal_outputs
from lightning_hetpipe.capture.piece_search import without_graph
from lightning_hetpipe.capture.pieces import Piece, class_of, refuse_hooks
from lightning_hetpipe.capture.prepared_modules import is_compiled, is_scripted, refuse_scripted
from lightning_hetpipe.capture.watch import Watch
from lightning_hetpipe.errors import SettingError, reason_of
from lightning_hetpipe.pipeline.stage import Layer
from lightning_hetpipe.pipeline.user.user_section import ProcessState, own_state
from lightning_hetpipe.pipeline.values import Value, equal
from lightning_hetpipe.redirect import NOT_TAKEN, ModuleCall
from lightning_hetpipe.torch_private.tensors import pytree, version_counter


@dataclass(eq=False)
class EvaluationWatch(Watch):
    """Watch of one step of an evaluation, for its outermost calls of modules with parameters.

    Attributes:
        known: Pieces of the running training. If given, no other pieces are searched.
        calls: List to which each called module is appended.
        on_apart: Called with each module before it is run again to be taken apart.
        reasons: Why a pipeline cannot run the other modules, by their names.
        apart: Modules that were taken apart, by their names.
        shares: Whether a module has a side effect that batches in flight would share.
    """

    known: Sequence[Piece]
    calls: list[nn.Module]
    on_apart: Callable[[nn.Module], None]
    reasons: dict[str, str] = field(default_factory=dict, init=False)
    apart: dict[str, nn.Module] = field(default_factory=dict, init=False)
    shares: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._known = {piece.module: piece for piece in self.known}
        self._called: list[nn.Module] = []
        self._until = math.inf  # while a module is taken apart, when the time for that is over
        self._refused: set[type[nn.Module]] = set()

    def candidates(self) -> Iterator[tuple[str, nn.Module]]:
        modules = ((name, module) for name, module in self.root.named_modules() if module is not self.root)
        return ((name, module) for name, module in modules if self._is_wanted(name, module))

    def answer(self, call: ModuleCall) -> Any:
        try:
            return self._answer(call)
        finally:
            self.calls.append(call.module)

    def _answer(self, call: ModuleCall) -> Any:
        module, ordinal = call.module, self._called.count(call.module)
        if ordinal:
            piece = next((piece for piece in self.pieces if piece.module is module), None)
            if piece is None:
                return NOT_TAKEN
            self._called.append(module)
            with call.own_forward():
                return piece.run(self.generators, self.batch, call.args, call.kwargs, ordinal)
        overlaps = any(part in other.modules() for other in self._called for part in module.modules())
        self._called.append(module)
        if overlaps:  # it is left to user code, which may run it while stages run the other
            return call.run()
        with call.own_forward():
            return self._try(self._known.get(module) or Piece(call.name, module), call)

    def _is_wanted(self, name: str, module: nn.Module) -> bool:
        if self._known:
            return module in self._known
        if is_compiled(module) or is_scripted(module) or (self.names is not None and name not in self.names):
            return False
        return any(True for _ in module.parameters())

    def _try(self, piece: Piece, call: ModuleCall) -> Any:
        """Run the module of ``piece`` unchanged, then try whether its layers one by one compute the same."""
        args, kwargs = call.args, call.kwargs
        parts = list(piece.module.modules())
        buffers = [(buffer, version_counter(buffer), buffer.clone()) for buffer in piece.module.buffers()]
        attributes = AttributesBefore(piece.module)
        # A module may change what it is given.
        own = pytree.tree_map_only(Tensor, torch.clone, (args, kwargs))
        frozen = FrozenValues(piece.module) if piece.captured is None else piece.captured.frozen
        with frozen.answers.noted(), frozen.noted():
            output = piece.run(self.generators, self.batch, args, kwargs)
        apart = False
        try:
            if torch.is_grad_enabled():
                raise SettingError("it is called with gradients")
            if any(part.training for part in parts):
                raise SettingError("it is in training mode")
            pairs = zip(buffers, piece.module.buffers(), strict=False)  # writes by .data change values without a count
            if any(b is not now or version_counter(b) != n or not equal(b, value) for (b, n, value), now in pairs):
                raise SettingError("it changes its buffers")
            scripted = any(map(is_scripted, parts))
            writes = frozen.noticed.told(OUTPUT) is not None  # and would write again
            apart = self.names is None and not self._known and piece.needs_graph() and not scripted and not writes
            if (set_one := attributes.changed()) is not None:
                raise SettingError(f"it changes its attribute '{set_one[1]}' (of {type(set_one[0]).__name__})")
            refuse_noticed(piece.name, frozen, OUTPUT, SEED, STATE)
            if (opaque := opaque_in((args, kwargs))) is not None:
                raise SettingError(f"it is given a {type(opaque).__name__} that holds tensors")
            if type(piece.module) in self._refused or time.perf_counter() > self._until:
                raise SettingError("another one could not be captured, or there was no time left to try")
            may_have_graph = piece.may_have_graph() and piece.module not in self._known
            handed_on_by = partial(self._handed_on, piece, own, frozen, output)
            try:
                handed_on = handed_on_by(graph=piece.needs_graph() or may_have_graph)
            except Exception as error:  # whatever torch.export raises
                # The layers would have this side effect without a graph, too.
                if isinstance(error, torch.OutOfMemoryError | SideEffect) or not may_have_graph:
                    raise
                piece.captured, piece.layers = None, []
                handed_on = handed_on_by(graph=False)
                self.without_graph.append(without_graph(piece, error))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever it is, the module itself has computed
            if isinstance(error, SideEffect) and error.is_lost:
                raise
            self.shares |= isinstance(error, SideEffect) and error.is_shared
            self.reasons[piece.name] = reason_of(error)
            # Another run would add again to its arguments, such as a cache, and to what batches share.
            if apart and not self.shares and unknown_in((args, kwargs)) is None:
                self._take_apart(call, own, frozen)
            return output
        self.pieces.append(piece)
        return handed_on

    def _handed_on(
        self, piece: Piece, given: tuple[Any, Any], frozen: FrozenValues, output: Any, *, graph: bool
    ) -> Any:
        """Find the layers of ``piece``, if unknown, as parts of a ``graph`` or not, and run them on ``given``.

        Return what they hand on of the module's ``output``, or raise SettingError if they compute other values.
        """
        if piece.module not in self._known:
            refuse_scripted(piece.name, piece.module)
            found = [(piece.name, piece.module)] if graph else piece.modules_of_layers()
            for name, part in found:
                refuse_hooks(name, part)
            if graph:
                piece.captured = Captured(piece.name, piece.module, *given, frozen)
                piece.layers = piece.captured.layers
            else:
                piece.layers = [Layer(name, part, kind=class_of(part)) for name, part in found]
        value = first = piece.value(*given)
        handed_on = without_opaque(piece.name, output) if piece.captured is not None else output
        if (opaque := opaque_in(handed_on)) is not None:
            raise SettingError(f"it gives a {type(opaque).__name__} that holds tensors")
        inputs: list[Value] = []
        with self.generators.watch({layer.name: layer.module for layer in piece.layers}, self.batch) as calls:
            for layer in piece.layers:
                inputs.append(Value.of(value))
                value = calls[layer.name](value)
        if not equal_outputs(Value.of(value), Value.of(handed_on)):
            raise _other_values(piece.module)
        if not self._known:
            piece.inputs = [inputs]
        if piece.captured is not None:
            if piece.captured.decides is not None and not piece.needs_graph() and not self._known:
                raise decides(piece.name, f" at {piece.captured.decides}")
            piece.captured.take_equal(first)
        return handed_on

    def _take_apart(self, call: ModuleCall, given: tuple[Any, Any], frozen: FrozenValues) -> None:
        """Run a module again, which cannot be captured, on copies of its arguments, to try the calls that it makes."""
        outermost, before = self._until == math.inf, len(self.pieces)
        if outermost:
            self._until = time.perf_counter() + self.capture_timeout
        self._refused.add(type(call.module))
        self._called.remove(call.module)
        self.apart[call.name] = call.module
        self.on_apart(call.module)
        # Its output is not used.
        with (
            own_state(ProcessState.seeded(0, 0, "capture")),
            untouched(call.module, frozen),
            call.intercepting(),
            suppress(Exception),
        ):
            call.run_with(*given)
        if outermost:
            self._until = math.inf
            inner = [name for name in self.reasons if name.startswith(f"{call.name}.")]
            self.reasons = {name: why for name, why in self.reasons.items() if name not in inner}
            if found := len(self.pieces) - before:
                self.reasons[call.name] += f" ({found} of the modules in it {'do' if found > 1 else 'does'})"


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
