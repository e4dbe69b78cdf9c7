"""Watch of one ordinary step of the user's, to find the pieces of a LightningModule and their layers.

The watched step runs once, and as it would without this package, so nothing is guessed. It shows the calls of modules,
their order, callers and inputs, changes of inputs in place, and everything that no stage could do. Conclusions are
drawn when the step is over.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hetpipe.accelerator import is_initialized
from lightning_hetpipe.capture.contents import AttributesBefore, SetsState, without_opaque
from lightning_hetpipe.capture.effects import FrozenValues, refuse_noticed, refuse_seeded
from lightning_hetpipe.capture.noticed_calls import IN_NO_GRAPH, NOWHERE
from lightning_hetpipe.capture.observation import (
    CallNode,
    Observation,
    WatchedCall,
    changes_input,
    refuse_leaves,
    refuse_opaque,
    user_bytes,
)
from lightning_hetpipe.capture.piece_search import CAPTURE_TIMEOUT, PieceSearch, TakenApart
from lightning_hetpipe.capture.pieces import HasHooks, Piece, never_called
from lightning_hetpipe.capture.prepared_modules import (
    is_compiled,
    is_looked_through,
    refuse_scripted,
    without_checkpoints,
)
from lightning_hetpipe.errors import PipelineRefusal, SettingError
from lightning_hetpipe.pipeline.random.generators import RandomGenerators
from lightning_hetpipe.pipeline.stage import Layer
from lightning_hetpipe.pipeline.user.parameter_view import changes_parameter
from lightning_hetpipe.pipeline.user.user_section import ProcessState, has_own_seed, own_state, states_of_torch
from lightning_hetpipe.pipeline.values import (
    Value,
    all_equal,
    equal,
    is_reentrant_checkpoint,
    reentrant_checkpoint,
    tensors_of,
)
from lightning_hetpipe.planning.model.profile import UserBytes
from lightning_hetpipe.redirect import NOT_TAKEN, Interceptor, ModuleCall
from lightning_hetpipe.torch_private.modules import behind_compile, has_global_hooks
from lightning_hetpipe.torch_private.tensors import address_of, graph_nodes, version_counter


@dataclass(eq=False)
class Watch:
    """Watch of one step of ``root``, whose calls of modules go to :meth:`answer`.

    Attributes:
        root: The LightningModule.
        names: Modules that may be pipelined, or None for all.
        generators: The run's random generators, from which layers draw also in the watched step.
        batch: Number of the watched minibatch.
        capture_timeout: Seconds after which nothing more is taken apart.
        pieces: Modules that a pipeline is to run, in the order of their first calls.
        without_graph: Lines that explain why Sequentials of the user's modules have no graph.
    """

    root: nn.Module
    names: Collection[str] | None
    generators: RandomGenerators
    batch: int
    _: KW_ONLY
    capture_timeout: float = CAPTURE_TIMEOUT
    pieces: list[Piece] = field(default_factory=list, init=False)
    without_graph: list[str] = field(default_factory=list, init=False)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context manager in which calls of modules are seen. Nothing of it remains in the modules."""
        with Interceptor(list(self.candidates()), self.answer, one_step=True):
            yield

    def candidates(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield modules whose calls may matter."""
        raise NotImplementedError

    def answer(self, call: ModuleCall) -> Any:
        """Run the called module, or return ``NOT_TAKEN``."""
        raise NotImplementedError


@dataclass(eq=False)
class TrainingWatch(Watch):
    """Watch of one ``training_step`` that finds the pieces that a pipeline can run.

    Named modules are pieces, or refused. Otherwise pieces are the outermost calls that can be captured. If a module
    cannot be captured, calls in its ``forward`` are tried, and its own code runs as user code.

    Attributes:
        frozen_too: Whether a Sequential with frozen parameters is a piece, as a callback unfreezes it. Named ones
            always are.
        changed_later: Describes what a callback will do to a layer, if no graph can follow it.
        wants_graphs: Whether Sequentials of torch's own modules also get graphs.
        called: Called pieces, as indices into ``pieces``, in the order of the calls.
        apart, user: What was taken apart, and what user code takes beside the pieces, after :meth:`check`.
    """

    frozen_too: bool = False
    changed_later: Callable[[nn.Module], str | None] = lambda layer: None
    wants_graphs: bool = False
    called: Sequence[int] = field(default=(), init=False)
    apart: TakenApart = field(default_factory=TakenApart, init=False)
    user: UserBytes = field(default_factory=UserBytes, init=False)

    @contextmanager
    def watching(self) -> Iterator[None]:
        self._calls: list[CallNode] = []
        self._open: list[CallNode] = []
        self._observing = 0.0
        self._made_inside = set[int]()
        self._counters = {name: version_counter(weight) for name, weight in self.root.named_parameters()}
        self._buffers = {name: buffer.clone() for name, buffer in self.root.named_buffers()}
        self._copies = {id(buffer): self._buffers[name] for name, buffer in self.root.named_buffers()}
        self._thread = threading.get_ident()
        with super().watching():
            began = time.perf_counter()
            yield
            self._seconds = time.perf_counter() - began - self._observing

    def candidates(self) -> Iterator[tuple[str, nn.Module]]:
        left_out: set[nn.Module] = {self.root}
        for module in self.root.modules():
            if module is not self.root and is_compiled(module):
                wrapper = [module] if behind_compile(module) is not None else []
                left_out.update(wrapper if is_looked_through(module) else module.modules())
        return ((name, module) for name, module in self.root.named_modules() if module not in left_out)

    def check(self, loss: Tensor, batch: Any = None) -> None:
        """Find the pieces after the watched step on ``batch`` gave ``loss``, and refuse what cannot be pipelined."""
        called = [call.piece.name for call in self._calls]
        if missing := [name for name in self.names or () if name not in called]:
            raise never_called(self.names or (), missing[0])
        if not any(p.requires_grad for call in self._calls for p in call.piece.module.parameters()):
            asked = f" (of module={list(self.names)!r})" if self.names else ""
            raise PipelineRefusal(f"training_step called no module with trainable parameters{asked}; call one")
        held = {id(weight) for call in self._calls for weight in call.piece.module.parameters()}
        for name, weight in self.root.named_parameters():
            versioned = weight.requires_grad or id(weight) in held  # others are read as they are
            if versioned and version_counter(weight) != self._counters.get(name, version_counter(weight)):
                raise changes_parameter(name)
        if any(map(is_reentrant_checkpoint, graph_nodes([loss.grad_fn], []))):
            raise reentrant_checkpoint()
        refuse_leaves(self.root, {*map(id, self.root.parameters()), *self._made_inside}, loss)
        self._made_inside.clear()
        search = PieceSearch(self._calls, self.generators, self.batch, self.capture_timeout)
        with own_state(ProcessState.seeded(0, 0, "capture")):
            self.pieces = search.pieces(whole=self.names is not None)
        self.called = search.called()
        self.apart = search.taken_apart(self._seconds)
        self.without_graph = search.without_graph
        pieces = {piece.module for piece in self.pieces}
        calls = [node for call in self._calls for node in call.all() if node.piece.module in pieces]
        self.user = user_bytes(self.root, loss, batch, calls, pieces)
        self._calls.clear()
        self._copies.clear()

    def changed_buffers(self) -> set[int]:
        """Return the ``id`` of each buffer that the watched step has changed."""
        # By value: batch norm changes its statistics without counting it.
        before = self._buffers
        now = self.root.named_buffers()  # some may have moved to their stages
        return {id(b) for name, b in now if name not in before or not equal(before[name].to(b.device), b)}

    def answer(self, call: ModuleCall) -> Any:
        name, module = call.name, call.module
        # Such calls train nothing, and no autograd graph shows them.
        if torch.is_inference_mode_enabled() or (not torch.is_grad_enabled() and _in_custom_function()):
            return NOT_TAKEN
        if self._open:
            # Several threads of a module could make calls at once, which would have no order.
            if threading.get_ident() != self._thread or not self._has_work(module):
                return NOT_TAKEN
            return self._run(call)
        if not self._is_wanted(name, module):
            return NOT_TAKEN
        if all(each.piece.module is not module for each in self._calls):
            pieces = [each.piece for each in self._calls]
            if (part := next((piece for piece in pieces if piece.module in module.modules()), None)) is not None:
                raise PipelineRefusal(
                    f"training_step calls '{name}' and, before it, '{part.name}', which is a part of it; call the"
                    " whole, or its parts"
                )
            refuse_scripted(name, module)
        if has_global_hooks():
            raise PipelineRefusal(
                "a hook on all modules is set (torch.nn.modules.module.register_module_...), which stages would run at"
                " the same time as other user code; remove it before fit"
            )
        return self._run(call)

    def _is_wanted(self, name: str, module: nn.Module) -> bool:
        if self.names is not None:
            return name in self.names
        if any(module is not each.piece.module and module in each.piece.module.modules() for each in self._calls):
            return False  # if the loss depends on it so, it is refused as used beside the piece
        return self._has_work(module)

    def _has_work(self, module: nn.Module) -> bool:
        return any(p.requires_grad or self.frozen_too for p in module.parameters())

    def _run(self, call: ModuleCall) -> Any:
        """Run the called module once and unchanged, and record what the call shows."""
        began, before = _now(), self._observing
        earlier = [each for each in self._calls if each.piece.module is call.module and not self._open]
        piece = earlier[0].piece if earlier else Piece(call.name, call.module, wants_graph=self.wants_graphs)
        node = CallNode(piece, training=call.module.training)
        if any(each.training is not node.training for each in earlier):
            node.refusal = PipelineRefusal(
                f"training_step calls '{call.name}' in training mode and in evaluation mode, and stages run it in one;"
                " call it in one of them"
            )
        seeded = states_of_torch() if has_own_seed() else None
        (self._open[-1].inner if self._open else self._calls).append(node)
        self._open.append(node)
        try:
            run = self._run_whole if node.piece.needs_graph() else self._run_layers
            output = run(node, call, earlier)
            node.ends((call.args, call.kwargs), output)
            if seeded is not None and not all_equal(zip(seeded, states_of_torch(), strict=True)):
                node.check(partial(refuse_seeded, call.name))
            return output
        except Exception as error:
            node.refusal = node.refusal or PipelineRefusal(
                f"a call of '{call.name}' in the first minibatch raised {type(error).__name__}, which was caught; call"
                " it only where it does not, as the pipeline makes the same calls in every minibatch"
            )
            raise
        finally:
            self._open.pop()
            self._observing = before + _now() - began - node.seconds

    def _run_whole(self, node: CallNode, call: ModuleCall, earlier: Sequence[CallNode]) -> Any:
        """Run a module of which stages may run a graph, after ``earlier`` calls of it."""
        name, module, given = call.name, call.module, (call.args, call.kwargs)
        observation, graph = Observation(name, module, given), self._watched_call(call, earlier)
        node.graph = graph
        with ExitStack() as stack:
            run = call.run  # in the generators of the outermost call
            if len(self._open) == 1:
                stack.enter_context(call.own_forward())
                stack.enter_context(without_checkpoints(module))  # whose backward would draw numbers of its own
                stack.enter_context(self.generators.watch({name: module}, self.batch, len(earlier)))
                run = partial(module.forward, *call.args, **call.kwargs)  # not __call__: hooks are running already
            stack.enter_context(graph.frozen.answers.noted())
            stack.enter_context(graph.frozen.noted())
            output = self._timed(node, call, run)
        if len(self._open) == 1:
            output = without_opaque(name, output)
        observation.end(output)
        graph.end(module, output)
        node.check(partial(refuse_opaque, f"the pipelined module '{name}' is given", given))
        node.check(partial(observation.check, self.root))
        if observation.mutates:
            node.refusal = node.refusal or changes_input(name, name)
        node.check(observation.refuse_custom_function)
        refuse_noticed(name, graph.frozen, *NOWHERE)
        node.check(partial(refuse_noticed, name, graph.frozen, *IN_NO_GRAPH))
        if self.names is not None and node.refusal is not None:
            raise node.refusal
        self._made_inside.update(id(leaf) for leaf in observation.foreign if not isinstance(leaf, nn.Parameter))
        return output

    def _watched_call(self, call: ModuleCall, earlier: Sequence[CallNode]) -> WatchedCall:
        """Record what a graph needs of a call that begins now, after ``earlier`` calls of its module."""
        before = [each.graph.frozen for each in earlier if each.graph is not None]
        frozen = before[0] if before else FrozenValues(call.module)
        given = call.args, call.kwargs
        memory = {path: address_of(buffer) for path, buffer in call.module.named_buffers()}
        return WatchedCall(Value.of(given), tensors_of(given), self._copied(call.module), memory, frozen)

    def _run_layers(self, node: CallNode, call: ModuleCall, earlier: Sequence[CallNode]) -> Any:
        """Run a module whose layers are known without a graph, layer by layer, after ``earlier`` calls of it."""
        piece, value = node.piece, node.piece.plain_value(call.args, call.kwargs)
        node.check(partial(refuse_opaque, f"the pipelined module '{piece.name}' is given", value))
        found, given, outermost = piece.modules_of_layers(), tensors_of(value), len(self._open) == 1
        before, inputs, layers = [version_counter(tensor) for tensor in given], list[Value](), list[Layer]()
        graph = node.graph = self._watched_call(call, earlier) if piece.may_have_graph() else None
        with ExitStack() as stack:
            calls: Mapping[str, Callable[..., Any]] = dict(found)
            if outermost:
                calls = stack.enter_context(self.generators.watch(dict(found), self.batch, len(earlier)))
            if graph is not None:
                stack.enter_context(graph.frozen.answers.noted())
            for name, module in found:
                if outermost:
                    self._raise_refusal(node)
                inputs.append(Value.of(value))
                observation = Observation(name, module, value)
                attributes = AttributesBefore(module)
                with nullcontext() if graph is None else graph.frozen.noted():
                    value = self._timed(node, call, partial(calls[name], value))
                observation.end(value)
                if (layer := node.check(partial(observation.layer, self.root, attributes))) is not None:
                    layers.append(layer)
                if before != [version_counter(tensor) for tensor in given]:
                    node.refusal = node.refusal or changes_input(name, piece.name)
                if graph is not None:
                    refuse_noticed(name, graph.frozen, *NOWHERE)
                    graph.check(observation.refuse_custom_function)
                    graph.check(partial(refuse_noticed, name, graph.frozen, *IN_NO_GRAPH))
                    graph.check(partial(self._refuse_without_graph, name, module, graph.frozen))
        if graph is not None:
            graph.end(piece.module, value)
        if outermost:
            self._raise_refusal(node)
        if node.refusal is None:
            piece.inputs.append(inputs)
            piece.layers = [one.joined(other) for one, other in zip(piece.layers or layers, layers, strict=True)]
        return value

    def _raise_refusal(self, node: CallNode) -> None:
        """Raise the refusal of an outermost call, unless its module can be taken apart, which keeps its
        effects right."""
        may_be_apart = self.names is None and isinstance(node.refusal, SetsState | HasHooks)
        if node.refusal is not None and not may_be_apart:
            raise node.refusal

    def _refuse_without_graph(self, name: str, layer: nn.Module, frozen: FrozenValues) -> None:
        """Refuse a graph for a Sequential whose ``layer`` does what its copies can follow, but not a graph."""
        if frozen.checkpoints:
            raise SettingError(
                f"layer '{name}' calls torch.utils.checkpoint, which a graph would leave out, to compute nothing again"
            )
        if (change := self.changed_later(layer)) is not None:
            raise SettingError(f"layer '{name}' {change}")

    def _timed(self, node: CallNode, call: ModuleCall, run: Callable[[], Any]) -> Any:
        """Call ``run``. Intercept calls of modules in it, unless ``node`` is a single layer or was named."""
        began, before = _now(), self._observing
        try:
            if self.names is not None or node.piece.single is not None:
                return run()
            with call.intercepting():
                return run()
        finally:
            node.seconds += _now() - began - (self._observing - before)

    def _copied(self, module: nn.Module) -> dict[str, Tensor]:
        """Return copies of the buffers of ``module`` as they are now. Reuse earlier copies of unchanged buffers."""
        for buffer in module.buffers():
            if id(buffer) not in self._copies or not equal(self._copies[id(buffer)], buffer):
                self._copies[id(buffer)] = buffer.clone()
        return {path: self._copies[id(buffer)] for path, buffer in module.named_buffers()}


def _in_custom_function() -> bool:
    """Return True if the ``forward`` of a ``torch.autograd.Function`` runs, whose ``backward`` computes gradients."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not torch.autograd.Function.apply.__code__:
        frame = frame.f_back
    return frame is not None


def _now() -> float:
    """Return the seconds of a clock, after everything that was started has been computed."""
    if is_initialized():
        torch.accelerator.synchronize()
    return time.perf_counter()
