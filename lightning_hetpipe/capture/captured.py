"""Graphs of a piece, split into layers, and stand-ins for tensors on other devices while a graph is made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, fx, nn

from lightning_hetpipe.capture.contents import SetsState
from lightning_hetpipe.capture.effects import FrozenValues, SideEffect, put_back, untouched
from lightning_hetpipe.capture.export import decides, graph_of
from lightning_hetpipe.capture.grouping import at, called_alike, joined_by_buffer, marked_paths
from lightning_hetpipe.capture.layer_functions import device_of, parts
from lightning_hetpipe.capture.prepared_modules import is_checkpointed
from lightning_hetpipe.capture.variant import Answers, AutogradNodes, DataChecks, Mode, Variant
from lightning_hetpipe.errors import PipelineRefusal, SettingError
from lightning_hetpipe.pipeline.dtypes import Autocast
from lightning_hetpipe.pipeline.graph_layer import GraphLayer, own_name
from lightning_hetpipe.pipeline.operands import across_devices_of
from lightning_hetpipe.pipeline.stage import Layer
from lightning_hetpipe.pipeline.user.user_section import ProcessState, own_state
from lightning_hetpipe.torch_private.tensors import address_of, pytree, without_memory

VARIANTS = 10
"""Largest number of graphs of one piece, one for each kind of input."""

DECISIONS = 8
"""Largest number of graphs that are made for one call to find the answers by which its module decides."""

T = TypeVar("T")


class Captured:
    """Graphs of one module, and the layers into which they are split.

    Each graph is for one mode: the module's mode, whether gradients are wanted, and autocast's dtypes.

    Args:
        name: Path of the module in the LightningModule.
        module: The live module.
        args, kwargs: Arguments in the watched step. They are kept for later captures.
        frozen: Python values outside the module that it read in this step.

    Raises:
        SettingError: if the module cannot be captured.
    """

    def __init__(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], frozen: FrozenValues
    ) -> None:
        self.layers: list[Layer] = []
        self.frozen = frozen
        self.exclusive: Callable[[], AbstractContextManager[None]] = nullcontext
        """Context around a capture. Once minibatches are in flight, nothing else computes within it."""
        self.beside: Sequence[str] = ()
        """Names of the other pieces."""
        self.needless_comparisons = 0
        """Number of comparisons in which a changed Python value made no difference."""
        self.joined: tuple[str, list[str]] | None = None
        """Buffer whose changes join parts of the module into one layer, and the paths of these parts, or None."""
        self.has_filled = False
        """True after attributes were set for inputs of a new kind, until the code that follows attributes sees it."""
        self._name = name
        self._module = module
        self._example = (args, kwargs)
        self._autocast = Autocast.current()
        self._variants: list[Variant] = []
        self._earlier = 0  # the number of later graphs in a mode before the module changed
        self._fixed: str | None = None  # why sizes cannot vary in a graph
        self._constants: frozenset[int] = frozenset()  # the places of numbers of which no graph makes an input
        self._calls: list[str | None] | None = None
        self._marked: Sequence[str] = ()  # paths of the modules that its first graph calls
        self.device = device_of(module)
        self._capture(args, kwargs)

    def value(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Return the input of the first layer for ``module(*args, **kwargs)``. If no graph fits, capture one."""
        of_this_mode = self._of_this_mode()
        for number, variant in of_this_mode:
            if (leaves := variant.fitting(args, kwargs)) is not None:
                return (number, *leaves)
        changing = [numbers for _, variant in of_this_mode if (numbers := variant.changing_numbers(args, kwargs))]
        if len(of_this_mode) == VARIANTS:
            given_names = any(isinstance(leaf, str) for leaf in pytree.tree_leaves((args, kwargs)))
            if self._fixed is not None and not changing and not given_names:
                raise PipelineRefusal(self._fixed)
            way_out = "pad them to the same shapes"
            if given_names:
                way_out = "leave strings that it does not read, such as names of files, out of its call"
            elif changing:
                way_out = "give it numbers as tensors, and decide by them with torch.where"
            raise PipelineRefusal(
                f"'{self._name}' was given inputs of more than {VARIANTS} kinds, each of which needs its own graph"
                f" (other shapes, or other numbers where they decide what is computed); {way_out}, or let training_step"
                " itself run it, by naming the modules to pipeline (module=[...])"
            )
        self._capture(args, kwargs, next(iter(changing), frozenset()))
        return self.value(args, kwargs)

    def changed(self, value: tuple[Any, ...]) -> str | None:
        """Name a Python value that differs from the value in the graph for ``value``, or return None.

        The graph's values are known after a call of :meth:`take_equal`.
        """
        held = self._variants[value[0]].held
        return "what it reads" if held is None else self.frozen.changed(held)

    def take_equal(self, value: tuple[Any, ...], autograd: AutogradNodes | None = None) -> None:
        """Record that the graph for ``value`` equals the module for present Python values, with ``autograd`` nodes."""
        self._variants[value[0]].held = self.frozen.reached.now()
        self._variants[value[0]].autograd = autograd

    def autograd(self, value: tuple[Any, ...]) -> AutogradNodes | None:
        """Return the module's autograd nodes in the last comparison with the graph for ``value`` in a minibatch."""
        variant: Variant = self._variants[value[0]]
        return variant.autograd

    def capture_again(self) -> None:
        """Follow a change of the module other than a change of the values of weights and buffers."""
        graphs = Counter(variant.mode for variant in self._variants)
        self._earlier = max(self._earlier, max(graphs.values(), default=1) - 1)
        self._variants.clear()
        for layer in self.layers:
            graph_layer(layer).code.clear()
        with self._autocast.opened():
            self._capture(*self._example)

    @property
    def decides(self) -> str | None:
        """The first line at which the module decides by the values of its data, or None."""
        return next((variant.decides for variant in self._variants if variant.decides is not None), None)

    def _of_this_mode(self) -> list[tuple[int, Variant]]:
        mode = self._mode()
        return [(n, variant) for n, variant in enumerate(self._variants) if variant.mode == mode]

    def _mode(self) -> Mode:
        return self._module.training, torch.is_grad_enabled(), Autocast.current().dtypes

    def _capture(self, args: tuple[Any, ...], kwargs: dict[str, Any], numbers: frozenset[int] = frozenset()) -> None:
        numbers = self._inputs(args, kwargs, numbers)
        graph, checks = self._graph(args, kwargs, numbers)
        variant = Variant(graph, args, kwargs, self._mode(), checks, numbers)
        found = parts(graph, self._module, self._name, self.device, self._calls)
        marked = marked_paths(graph.graph)
        if found is None:
            raise self._other_layers(marked)
        named: tuple[Any, Any] = (self._module.named_parameters, self._module.named_buffers)
        live: dict[str, Tensor] = {path: each for own in named for path, each in own(remove_duplicate=False)}
        if any(path not in live for part in found for path in part.changes):
            raise SideEffect(self._name, "changes weights that no module in it has registered", is_shared=True)
        self._refuse_shared_memory(live, {path for part in found for path in part.changes})
        if not self.layers:
            blocks = [self._module.get_submodule(part.block) for part in found]  # in which parts are called
            recomputed = [self.frozen.checkpoints or is_checkpointed(block) for block in blocks]
            changed = [path for part, again in zip(found, recomputed, strict=True) if again for path in part.changes]
            if changed:
                rank_zero_warn(
                    f"'{self._name}' calls torch.utils.checkpoint, and changes the buffer '{changed[0]}': a plain run"
                    " changes buffers of checkpointed layers twice in each minibatch, stages change them once; set"
                    " in_flight=1 for the values of a plain run"
                )
            self.layers = [
                Layer(part.name, GraphLayer(self.device), kind=part.kind, recompute=recompute, piece=self._name)
                for part, recompute in zip(found, recomputed, strict=True)
            ]
            self._calls, self._marked = [part.call for part in found], marked
            self.joined = joined_by_buffer(graph.graph, self._module) if len(found) == 1 else None
        tensors = [{path: live[path] if path in live else at(graph, path) for path in part.own} for part in found]
        if not self._variants:
            for layer, taken in zip(self.layers, tensors, strict=True):
                graph_layer(layer).take(taken)
        owns = [
            self._own(layer, taken, marked, part.changes, live)
            for layer, taken, part in zip(self.layers, tensors, found, strict=True)
        ]
        names = {
            address_of(each): repr(path) for path, each in self.frozen.reached.plain.items() if isinstance(each, Tensor)
        }
        for layer, part, own, taken in zip(self.layers, found, owns, tensors, strict=True):
            lifted = [(own_name(path), address_of(each)) for path, each in taken.items() if path not in live]
            code = graph_layer(layer).code
            code.named.update((name, names[place]) for name, place in lifted if place in names)
            code.add(part.graph, own, part.changes)
        self._variants.append(variant)

    def _graph(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], numbers: Collection[int]
    ) -> tuple[fx.GraphModule, DataChecks]:
        """Make a graph for varying sizes if there are others. If sizes cannot vary, make it for the given sizes."""
        earlier = max(len(self._of_this_mode()), self._earlier) if self._fixed is None else 0
        try:
            return self._decided(args, kwargs, earlier, numbers)
        except SettingError as error:
            if not earlier:
                raise
            found, self._fixed = self._decided(args, kwargs, 0, numbers), str(error)
            return found

    def _inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any], numbers: frozenset[int]) -> frozenset[int]:
        """Select those ``numbers`` that can be inputs of a graph: an operator takes a tensor there, and ``forward``
        does not decide by them. Other numbers are constants."""
        found = frozenset[int]()
        for number in sorted(numbers - self._constants):
            try:
                self._graph(args, kwargs, {number})
                found |= {number}
            except SettingError:
                self._constants |= {number}
        return found

    def _decided(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], earlier: int, numbers: Collection[int]
    ) -> tuple[fx.GraphModule, DataChecks]:
        """Make the graph whose decisions by values of data are right for this call."""
        known: Answers = ()
        leaves = pytree.tree_leaves((args, kwargs))
        args, kwargs = inputs_on(self.device, (args, kwargs))
        gradients = torch.is_grad_enabled()  # without them some modules compute otherwise

        def traced() -> tuple[fx.GraphModule, DataChecks]:
            inputs = self._name, self._module, args, kwargs, self.frozen, known
            with (
                self.exclusive(),
                torch.inference_mode(False),
                torch.set_grad_enabled(gradients),
                on_one_device(self._module, self.device),
            ):
                return graph_of(*inputs, earlier=earlier, numbers=numbers)

        for _ in range(DECISIONS):
            try:
                graph, checks = traced()
            except SideEffect as effect:
                if not effect.paths or self._repeats(effect, args, kwargs):
                    raise
                self.frozen.tolerated.update(effect.paths)
                graph, checks = traced()
            except SetsState:  # as for its first call on such inputs, for which it may extend a cache
                if not self._variants:
                    raise
                self._fill(args, kwargs)
                graph, checks = traced()
            found = checks.of(leaves)
            if found == checks.answers:
                return graph, checks
            first = next(n for n, (one, other) in enumerate(zip(found, checks.answers, strict=True)) if one != other)
            known = found[: first + 1]
        raise decides(self._name, f" at {checks.lines[first]}")

    def _repeats(self, effect: SideEffect, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return True if the module has ``effect`` also in a run on values, not only while it is traced.

        Libraries keep tables of the classes that they have met, to which tracing adds torch's own classes.
        """
        with untouched(self._module, self.frozen, runs=True) as before_run:
            self._run(args, kwargs)
            return not set(effect.paths).isdisjoint(before_run.changed())

    def _fill(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run the module so that it sets attributes as in its first call on such inputs, such as growing caches."""
        buffers = [(buffer, buffer.clone()) for buffer in self._module.buffers()]
        self._run(args, kwargs)
        put_back(buffers)
        for variant in self._variants:  # what they have frozen is compared with the attributes as they are now
            variant.held = None
        self.has_filled = True

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        devices = [tensor.device for tensor in pytree.tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)]
        with (
            self.exclusive(),
            own_state(ProcessState.seeded(0, 0, "capture")),
            across_devices_of(self._module, devices),
        ):
            self._module.forward(*args, **kwargs)

    def _own(
        self,
        layer: Layer,
        tensors: Mapping[str, Tensor],
        marked: Sequence[str],
        changes: Collection[str],
        live: Collection[str],
    ) -> list[str | Tensor]:
        """Return the paths of ``tensors`` that ``layer`` holds. A constant that it does not hold is returned itself."""
        own = list[str | Tensor]()
        for path, tensor in tensors.items():
            held = graph_layer(layer).held(path)
            is_replaced = held is not None and not isinstance(tensor, nn.Parameter)  # by `_fill`
            if path in changes and all(graph_layer(each).held(path) is None for each in self.layers):
                raise PipelineRefusal(
                    f"'{self._name}' changes its buffer '{self._name}.{path}' for these inputs, which it did not use in"
                    " the first minibatch; change it in a hook"
                )
            if path in live and held is not tensor and not (is_replaced and path not in changes):
                raise self._other_layers(marked)
            own.append(path if held is tensor else tensor.detach())
        return own

    def _refuse_shared_memory(self, live: Mapping[str, Tensor], changes: Collection[str]) -> None:
        for path in changes:
            for other, tensor in live.items():
                if tensor is not live[path] and address_of(tensor) == address_of(live[path]) is not None:
                    raise SetsState(
                        f"'{self._name}' changes its buffer '{self._name}.{path}' in forward, whose memory is also that"
                        f" of '{self._name}.{other}', and stages have copies of both; compute one of them in forward"
                    )

    def _other_layers(self, marked: Sequence[str]) -> PipelineRefusal:
        """Refuse a later graph, with nodes in modules of the paths ``marked``, that splits unlike the first graph."""
        alike = called_alike(self._module, self._marked, marked)
        way_out = "call it in the same way in every minibatch"
        if len(alike) > 1:
            names = [*self.beside, *(f"{self._name}.{path}" for path in alike)]
            way_out = f"pipeline what all minibatches call alike (module={names!r})"
        return PipelineRefusal(
            f"'{self._name}' computes by other layers for these inputs than in the first minibatch, as where"
            f" it repeats a block more often, takes another head, or no longer freezes a part; {way_out}"
        )


def graph_layer(layer: Layer) -> GraphLayer:
    assert isinstance(layer.module, GraphLayer)
    return layer.module


@contextmanager
def on_one_device(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Context manager in which tensors on ``device`` replace tensors of ``module`` on other devices.

    Tracing looks only at sizes and devices. So the replacements need no memory, which the device may lack.
    """
    elsewhere = [
        (part, name, tensor)
        for part in module.modules()
        for own in (part.named_parameters, part.named_buffers)
        for name, tensor in own(recurse=False, remove_duplicate=False)
        if tensor.device != device
    ]
    stand_ins = {tensor: _empty(tensor, device) for _, _, tensor in elsewhere}  # one for each: what is tied stays tied
    try:
        for part, name, tensor in elsewhere:
            setattr(part, name, stand_ins[tensor])
        yield
    finally:
        for part, name, tensor in elsewhere:
            setattr(part, name, tensor)


def inputs_on(device: torch.device, inputs: T) -> T:
    """Replace tensors in ``inputs`` on other devices of this type by stand-ins on ``device``."""

    def stand_in(each: Tensor) -> Tensor:
        is_elsewhere = each.device.type == device.type and each.device != device
        return _empty(each, device).requires_grad_(each.requires_grad) if is_elsewhere else each

    found: T = pytree.tree_map_only(Tensor, stand_in, inputs)
    return found


def _empty(like: Tensor, device: torch.device) -> Tensor:
    tensor = without_memory(like, device)
    return nn.Parameter(tensor, like.requires_grad) if isinstance(like, nn.Parameter) else tensor
