"""A segment whose layers the members of a group compute together, region by region.

The call of a region is one function of autograd, in which each member has a graph of its own. In the forward each
member takes its parts, computes, and keeps its graph, and outputs are put together or added up. In the backward all
members run the backward of their graphs at once. Gradients of parts are put together, and gradients of shared inputs
are added up, both in the order of the members, on the home device.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial, reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.pipeline.compilation import Kind, KindsOfCalls, compiler_reason, under_own_code
from lightning_hetpipe.pipeline.dtypes import Autocast
from lightning_hetpipe.pipeline.graph_layer import set_here
from lightning_hetpipe.pipeline.random.graph_draws import NoDropout, refuse_other_draws
from lightning_hetpipe.pipeline.split.joined_graph import JoinedGraph, joined_graph
from lightning_hetpipe.pipeline.split.member_pool import DeviceGroup, MemberPool
from lightning_hetpipe.pipeline.split.regions import GivenAs, Region, RegionInput, RegionOutput, TakenAs
from lightning_hetpipe.pipeline.split.rewriting import split_graph
from lightning_hetpipe.pipeline.streams import move
from lightning_hetpipe.pipeline.values import gradients, moved
from lightning_hetpipe.rules.channel_layouts import ChannelLayout
from lightning_hetpipe.torch_private.graphs import CompilerError, CompilerLimit, compiled
from lightning_hetpipe.torch_private.tensors import pytree

if TYPE_CHECKING:
    from lightning_hetpipe.pipeline.stage import Layer

Graph = Callable[..., Any]

Opened = Callable[[], AbstractContextManager[Any]]
"""Opens the stage's state, such as autocast, in a member's thread."""


class RegionCall(nn.Module):
    """Caller of ``region`` in the threads of ``pool``.

    Attributes:
        opened, parts: Values of the segment for the next call.
        graphs: Graphs that members run, possibly compiled.
    """

    def __init__(self, region: Region, pool: MemberPool) -> None:
        super().__init__()
        self.region, self.pool = region, pool
        self.opened: Opened
        self.parts: dict[Any, Tensor]
        self.graphs: Sequence[Callable[..., Any]] = region.graphs

    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        """Run the region. Inputs and outputs are whole, or lists with one part for each member that holds them."""
        flat: list[Any] = []
        for each in inputs:
            flat += each if isinstance(each, list) else [each]
        apply: Any = _Apart.apply  # torch has no types here
        outputs = apply(_RegionRun(self, [len(each) if isinstance(each, list) else 0 for each in inputs]), *flat)
        found = iter(outputs)
        return tuple(
            [next(found) if member in each.layout.members else None for member in range(self.region.members)]
            if each.given is GivenAs.HELD
            else next(found)
            for each in self.region.outputs
        )


class _RegionRun:
    """One forward of a region, and its backward."""

    def __init__(self, call: RegionCall, held: Sequence[int]) -> None:
        self._region, self._pool, self._opened = call.region, call.pool, call.opened
        self._parts, self._graphs = call.parts, call.graphs
        self._held = held
        self._leaves: list[Sequence[Any]] = []
        self._outputs: list[Sequence[Any]] = []
        self._home = call.pool.group.devices[call.pool.group.home]

    def forward(self, wanted: Sequence[bool], flat: Sequence[Any]) -> list[Any]:
        inputs, needs = self._nested(flat), self._nested(wanted)
        members, grad = range(self._region.members), any(wanted)
        jobs = [
            partial(self._member_forward, member, inputs, needs, grad) if self._region.gives[member] else None
            for member in members
        ]
        found = self._pool.run(jobs, [each for each in flat if isinstance(each, Tensor)])
        self._leaves = [each[0] if each else () for each in found]
        self._outputs = [each[1] if each else () for each in found]
        self._write_back(inputs)
        given = [dict(zip(self._region.gives[m], self._outputs[m], strict=True)) for m in members]
        outputs: list[Any] = []
        for number, output in enumerate(self._region.outputs):
            parts = [given[member][number].detach() for member in output.layout.members]
            outputs += parts if output.given is GivenAs.HELD else [self._together(output, parts)]
        if not grad:
            self._leaves, self._outputs = [], []
        return outputs

    def backward(self, flat: Sequence[Tensor | None]) -> list[Tensor | None]:
        came = iter(flat)
        given: list[dict[int, Tensor | None]] = [{} for _ in range(self._region.members)]
        for number, output in enumerate(self._region.outputs):
            whole = None if output.given is GivenAs.HELD else next(came)
            for member in output.layout.members:
                gradient = next(came) if output.given is GivenAs.HELD else whole
                if gradient is not None and output.given is GivenAs.JOINED:
                    gradient = part(gradient, output.layout, member)
                given[member][number] = gradient
        leaves, outputs, self._leaves, self._outputs = self._leaves, self._outputs, [], []
        jobs = [
            partial(self._member_backward, member, leaves[member], outputs[member], given[member])
            if self._region.gives[member]
            else None
            for member in range(self._region.members)
        ]
        del leaves, outputs
        found = self._pool.run(jobs, [each for each in flat if each is not None])
        del jobs
        by_input: list[dict[int, Tensor]] = [{} for _ in self._region.inputs]
        for member, own in enumerate(found):
            for number, gradient in zip(self._region.takes[member], own or (), strict=bool(own)):
                if gradient is not None:
                    by_input[number][member] = gradient
        result: list[Tensor | None] = []
        for each, size, own in zip(self._region.inputs, self._held, by_input, strict=True):
            result += [own.get(member) for member in range(size)] if size else [self._gradient(each, own)]
        return result

    # In the members' threads.

    def _member_forward(
        self, member: int, inputs: Sequence[Any], needs: Sequence[Any], grad: bool
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        with torch.set_grad_enabled(grad), self._opened():
            leaves = [
                self._leaf(number, member, inputs[number], needs[number]) for number in self._region.takes[member]
            ]
            outputs = self._graphs[member](*leaves)
        return leaves, outputs

    def _leaf(self, number: int, member: int, given: Any, wanted: Any) -> Any:
        each, device = self._region.inputs[number], self._pool.group.devices[member]
        if each.taken is TakenAs.DEVICE:
            return device
        if each.taken is TakenAs.HELD:
            given, wanted = given[member], wanted[member]
        if not isinstance(given, Tensor):
            return given
        with torch.no_grad():
            if each.is_weight and isinstance(given, nn.Parameter):  # a buffer may change without a version
                taken = self._part_of(given, each.layout, member, device)
            elif each.layout is None or each.taken is TakenAs.HELD:
                taken = move(given, device)
            else:
                taken = move(part(given, each.layout, member), device)
                taken = taken.clone() if each.taken is TakenAs.STATE else taken
        return taken.detach().requires_grad_(bool(wanted))

    def _part_of(self, weight: Tensor, layout: ChannelLayout | None, member: int, device: torch.device) -> Tensor:
        """Return a member's part of ``weight``, or all of it if there is no layout, made once for each version. On the
        weight's own device, a contiguous part is not copied."""
        key = id(weight), layout, member
        if key not in self._parts:
            taken = weight.detach() if layout is None else part(weight.detach(), layout, member)
            self._parts[key] = move(taken.contiguous(), device)
        return self._parts[key]

    def _member_backward(
        self, member: int, leaves: Sequence[Any], outputs: Sequence[Any], given: dict[int, Tensor | None]
    ) -> list[Tensor | None]:
        numbered = zip(self._region.gives[member], outputs, strict=True)
        own = [moved(given[number], output.device) for number, output in numbered]
        found = iter(gradients(outputs, own, [leaf for leaf in leaves if isinstance(leaf, Tensor)]))
        return [next(found) if isinstance(leaf, Tensor) else None for leaf in leaves]

    # In the thread of the stage.

    def _together(self, output: RegionOutput, parts: Sequence[Tensor]) -> Tensor:
        there = [move(each, self._home) for each in parts]
        return joined(there, output.layout) if output.given is GivenAs.JOINED else reduce(operator.add, there)

    def _gradient(self, each: RegionInput, own: dict[int, Tensor]) -> Tensor | None:
        """Return the gradient of an input from its members' gradients."""
        if not own:
            return None
        there = {member: move(gradient, self._home) for member, gradient in sorted(own.items())}
        if each.layout is None:
            return reduce(operator.add, there.values())
        (other, like), counts, dim = next(iter(there.items())), each.layout.counts, each.layout.dim
        for member in each.layout.members:
            if member not in there:  # no gradient reaches its part
                sizes = list(like.shape)
                sizes[dim] = sizes[dim] // counts[other] * counts[member]
                there[member] = like.new_zeros(sizes)
        return joined([there[member] for member in each.layout.members], each.layout)

    def _write_back(self, inputs: Sequence[Any]) -> None:
        """Write into the buffers what members left in their parts."""
        for number, each in enumerate(self._region.inputs):
            if each.taken is TakenAs.STATE and each.layout is not None:
                left = [
                    move(self._leaves[member][self._region.takes[member].index(number)], self._home)
                    for member in each.layout.members
                ]
                inputs[number].copy_(joined(left, each.layout))

    def _nested(self, flat: Sequence[Any]) -> list[Any]:
        """Return an entry for each input. For an input that members hold, it is a list with a value of each member."""
        found = iter(flat)
        return [[next(found) for _ in range(size)] if size else next(found) for size in self._held]


class _Apart(torch.autograd.Function):
    """A region as one node of autograd's graph."""

    @staticmethod
    def forward(ctx: Any, run: _RegionRun, *inputs: Any) -> tuple[Any, ...]:
        ctx.run = run
        ctx.set_materialize_grads(False)
        outputs = run.forward(ctx.needs_input_grad[1:], inputs)
        ctx.mark_non_differentiable(*[each for each in outputs if not (each.is_floating_point() or each.is_complex())])
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        run = ctx.run
        del ctx.run
        return (None, *run.backward(gradients))


class CompiledMembers(KindsOfCalls):
    """The graphs of one segment, compiled by ``torch.compile``, each in its member's thread.

    Recompilation and pauses are as for the layers of a stage (:mod:`~lightning_hetpipe.pipeline.compilation`).
    Members compile one after the other. Undivided operators run uncompiled, and so do graphs that cannot be compiled.
    Messages name them by ``layers``.
    """

    def __init__(self, layers: str, options: Mapping[str, Any]) -> None:
        super().__init__()
        self._layers, self._options = layers, options
        self._graphs: dict[tuple[fx.GraphModule, Autocast], Graph] = {}
        self._cannot: set[fx.GraphModule] = set()

    def of(self, graph: fx.GraphModule, autocast: Autocast) -> Graph:
        """Return the callable that a member runs for ``graph`` in this state of autocast."""
        if (known := self._graphs.get((graph, autocast))) is not None:
            return known
        run: Graph = compiled(under_own_code(_call, f"a part of {self._layers}"), self._options, refuse_other_draws)

        def call(*given: Any) -> Any:
            if graph in self._cannot:
                return graph(*given)
            try:
                return run(graph, given)
            except (CompilerError, CompilerLimit, NoDropout) as error:
                self._cannot.add(graph)
                warnings.warn(
                    f"torch.compile cannot compile a part of {self._layers}, which a device of its group runs"
                    f" uncompiled: {compiler_reason(error)}",
                    stacklevel=2,
                )
                return graph(*given)

        self._graphs[graph, autocast] = call
        return call


def _call(graph: fx.GraphModule, given: tuple[Any, ...]) -> Any:
    return graph(*given)


class SplitSegment:
    """A segment that is computed in place of its layers, one after the other.

    Args:
        layers: Layers that have the names and graphs.
        modules: The stage's copies of the layers, with the weights and buffers to use.
        options: Options of ``torch.compile`` for the graphs, or None to run them uncompiled.

    Attributes:
        parts: Parts of the weights' version that is used next.
        divisible: Numbers of units in which each layer may be divided, by its path, the best one first.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        modules: Sequence[nn.Module],
        pool: MemberPool,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        named = f"layers {layers[0].name} to {layers[-1].name}"
        self.compiled = None if options is None else CompiledMembers(named, options)
        self.parts: dict[Any, Tensor] = {}
        self.divisible: dict[str, tuple[int, ...]] = {}
        self._layers, self._modules, self._pool = layers, modules, pool
        self._variants: dict[int, tuple[JoinedGraph, Any, list[RegionCall]]] = {}
        self._variant(0)

    def __call__(
        self, values: tuple[Any, ...], opened: Opened, kind: Kind = None, autocast: Autocast | None = None
    ) -> Any:
        """Return the last layer's output for ``values``. Members' threads have the state that ``opened`` opens. If
        graphs are compiled, ``kind`` is the kind of the call in a state of ``autocast``."""
        variant, *given = values
        joined, run, calls = self._variant(variant)
        device = self._pool.group.devices[self._pool.group.home]
        set_here(device)
        for call in calls:
            call.opened, call.parts = opened, self.parts
            if self.compiled is not None and autocast is not None:
                call.graphs = [self.compiled.of(graph, autocast) for graph in call.region.graphs]
        own = [
            getattr(self._modules[n], each) if isinstance(each, str) else each.to(device) for _, n, each in joined.own
        ]
        result = run(*joined.regions, device, *own, *given)
        if self.compiled is not None:
            self.compiled.computed(kind)
        return (variant, *result) if joined.outputs is None else pytree.tree_unflatten(list(result), joined.outputs)

    def _variant(self, number: int) -> tuple[JoinedGraph, Any, list[RegionCall]]:
        if number not in self._variants:
            joined = joined_graph(self._layers, number)
            made = split_graph(joined, self._pool.group.counts, len(self._pool.group.devices))
            self.divisible.update(made.layers)
            calls = {name: RegionCall(region, self._pool) for name, region in made.regions.items()}
            self._variants[number] = joined, fx.GraphModule(dict(calls), made.graph), [*calls.values()]
        return self._variants[number]


def check_divided(segments: Sequence[SplitSegment | None], group: DeviceGroup, stage: int) -> None:
    """Refuse counts for layers in no segment of ``stage``, and a group for a stage in which nothing can be divided."""
    divisible: dict[str, tuple[int, ...]] = {}
    for segment in segments:
        divisible |= {} if segment is None else segment.divisible
    group.counts.check(divisible)
    if not divisible:
        raise SettingError(
            f"stage {stage} has several devices (split, or a plan with groups), and none of its layers can be divided:"
            " there is no convolution, linear layer or embedding in what was captured as a graph; give it one device"
        )


def part(whole: Tensor, layout: ChannelLayout, member: int) -> Tensor:
    """Return the part of ``member``: a view if its units lie in one block, otherwise a copy."""
    start, end = ([0, *layout.ends][member + more] for more in (0, 1))
    if layout.outer == 1:
        return whole.narrow(layout.dim, start, end - start)
    blocks = _blocks(whole, layout.dim, layout.units * layout.inner)
    return blocks.narrow(layout.dim + 1, start, end - start).flatten(layout.dim, layout.dim + 1)


def joined(parts: Sequence[Tensor], layout: ChannelLayout) -> Tensor:
    """Join all ``parts``, in the order of the members that have parts."""
    if len(parts) == 1:
        return parts[0]
    if layout.outer == 1:
        return torch.cat(list(parts), layout.dim)
    present = [layout.counts[member] * layout.inner for member in layout.members]
    blocks = [_blocks(each, layout.dim, size) for each, size in zip(parts, present, strict=True)]
    return torch.cat(blocks, layout.dim + 1).flatten(layout.dim, layout.dim + 1)


def _blocks(tensor: Tensor, dim: int, size: int) -> Tensor:
    """Reshape ``tensor`` so that the blocks of dimension ``dim``, of size ``size``, are a dimension of their own."""
    return tensor.reshape(*tensor.shape[:dim], -1, size, *tensor.shape[dim + 1 :])
