"""A segment whose layers the members of a group compute together."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import fx, nn

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.pipeline.autocast import Autocast
from lightning_hetpipe.pipeline.compile.compilation import Kind, KindsOfCalls, compiler_reason, under_own_code
from lightning_hetpipe.pipeline.graph_layer import GraphLayer, set_here
from lightning_hetpipe.pipeline.random.graph_draws import NoDropout, refuse_other_draws
from lightning_hetpipe.pipeline.split.joined_graph import JoinedGraph, joined_graph
from lightning_hetpipe.pipeline.split.member_pool import DeviceGroup, MemberPool
from lightning_hetpipe.pipeline.split.parts import VersionParts
from lightning_hetpipe.pipeline.split.region_call import Opened, RegionCall, program
from lightning_hetpipe.pipeline.split.rewriting import split_graph
from lightning_hetpipe.torch_private.compiler import CompilerError, CompilerLimit, compiled
from lightning_hetpipe.torch_private.tensors import pytree

if TYPE_CHECKING:
    from lightning_hetpipe.pipeline.stage import Layer


Graph = Callable[..., Any]


class CompiledMembers(KindsOfCalls):
    """The graphs of one segment, compiled by ``torch.compile``: each by itself, in the thread of its member.

    What makes other code is as for the layers of a stage (:mod:`~lightning_hetpipe.pipeline.compile.compilation`), and
    so is what pauses meanwhile; members compile one after the other then. What is not divided runs as it is, and so
    does a graph that cannot be compiled.

    Args:
        layers: Names them, for people.
        options: What ``torch.compile`` is given.
    """

    def __init__(self, layers: str, options: Mapping[str, Any]) -> None:
        super().__init__()
        self._layers, self._options = layers, options
        self._graphs: dict[tuple[fx.GraphModule, Autocast], Graph] = {}
        self._cannot: set[fx.GraphModule] = set()

    def of(self, graph: fx.GraphModule, autocast: Autocast) -> Graph:
        """Give what a member runs in place of ``graph``, in that state of autocast."""
        key = graph, autocast
        if key not in self._graphs:
            self._graphs[key] = self._compiled(graph)
        return self._graphs[key]

    def _compiled(self, graph: fx.GraphModule) -> Graph:
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

        return call


def _call(graph: fx.GraphModule, given: tuple[Any, ...]) -> Any:
    return graph(*given)


class SplitSegment:
    """Computes a segment in place of its layers, one after the other.

    Args:
        layers: Name them, and have their graphs.
        modules: The stage's copies of them, with the weights and buffers to use.
        pool: The members.
        compiled: Compiles their graphs; None where these run as they are.

    Attributes:
        weights: Parts of versions of weights.
        divisible: Numbers of units in which each layer may be divided, by its path; the best one first.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        modules: Sequence[nn.Module],
        pool: MemberPool,
        compiled: CompiledMembers | None = None,
    ) -> None:
        self.compiled = compiled
        self.weights = VersionParts()
        self.divisible: dict[str, tuple[int, ...]] = {}
        self._layers, self._modules, self._pool = layers, modules, pool
        self._variants: dict[int, tuple[JoinedGraph, Any, list[RegionCall]]] = {}
        self._variant(0)

    def __call__(
        self, values: tuple[Any, ...], opened: Opened, kind: Kind = None, autocast: Autocast | None = None
    ) -> Any:
        """Give what the last layer does for ``values``; members' threads have the state that ``opened`` opens.

        Where members' graphs are compiled, ``kind`` is that of the call, in a state of ``autocast``.
        """
        variant, *given = values
        joined, run, calls = self._variant(variant)
        device = self._pool.group.devices[self._pool.group.home]
        set_here(device)
        for call in calls:
            call.opened = opened
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
            calls = {name: RegionCall(region, self._pool, self.weights) for name, region in made.regions.items()}
            self._variants[number] = joined, program(made.graph, calls), [*calls.values()]
        return self._variants[number]


def split_segment(
    layers: Sequence[Layer],
    modules: Sequence[nn.Module],
    pool: MemberPool,
    options: Mapping[str, Any] | None,
) -> SplitSegment | None:
    """A segment that the members of ``pool`` compute together; None where a layer was not captured as a graph.

    ``options`` are those of ``torch.compile``, where graphs are compiled.
    """
    if not all(isinstance(each, GraphLayer) for each in modules):
        return None
    named = f"layers {layers[0].name} to {layers[-1].name}"
    return SplitSegment(layers, modules, pool, None if options is None else CompiledMembers(named, options))


def check_divided(segments: Sequence[SplitSegment | None], group: DeviceGroup, stage: int) -> None:
    """Refuse counts for what is in no segment of ``stage``, and a group for a stage in which nothing can be divided.

    Raises:
        SettingError: that names what is wrong.
    """
    divisible: dict[str, tuple[int, ...]] = {}
    for segment in segments:
        divisible |= {} if segment is None else segment.divisible
    group.counts.check(divisible)
    if not divisible:
        raise SettingError(
            f"stage {stage} has several devices (split, or a plan with groups), and none of its layers can be divided:"
            " there is no convolution, linear layer or embedding in what was captured as a graph; give it one device"
        )
