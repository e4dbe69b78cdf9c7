"""Measurement of the time of one device in a group for a part of a layer's channels."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor, fx

from lightning_hetpipe.capture.pieces import Piece
from lightning_hetpipe.capture.profiling import Microbenchmark, ProfilingInput
from lightning_hetpipe.pipeline.graph_layer import GraphLayer, set_here
from lightning_hetpipe.pipeline.split.joined_graph import JoinedGraph, joined_graph
from lightning_hetpipe.pipeline.split.regions import Region, RegionInput, TakenAs
from lightning_hetpipe.pipeline.split.rewriting import divided_layers, split_graph
from lightning_hetpipe.pipeline.split.split_segment import part
from lightning_hetpipe.pipeline.stage import Layer
from lightning_hetpipe.pipeline.user.user_section import ProcessState, own_state
from lightning_hetpipe.planning.model.profile import LayerWidths, Times, Width
from lightning_hetpipe.rules.channel_layouts import ChannelCounts

MOST_WIDTHS = 16
"""Largest number of parts of a layer's channels that are measured."""

ROUNDS = 4
"""Rounds in which parts take turns. The smallest times count, because disturbances only add."""


def layer_widths(pieces: Sequence[Piece]) -> dict[int, LayerWidths]:
    """Return the divisions of layers that a group of devices may make, by the layers' index over all ``pieces``.

    The result has no times. A piece with a layer that was not captured as a graph cannot be divided.
    """
    found: dict[int, LayerWidths] = {}
    before = 0
    for piece in pieces:
        if piece.layers and all(isinstance(layer.module, GraphLayer) for layer in piece.layers):
            for number, widths in divided_layers(joined_graph(piece.layers, 0)).items():
                found[before + number] = replace(widths, run=before + widths.run)
        before += len(piece.layers)
    return found


def measured_widths(
    profiling: ProfilingInput, device: torch.device, name: str, tick: Callable[[], object] = lambda: None
) -> dict[int, LayerWidths]:
    """Return :func:`layer_widths` with times on ``device``, the profile's ``name``, of layers that begin a division.

    ``tick`` is called after each layer.
    """
    found = layer_widths(profiling.pieces)
    for number, (layer, values, piece) in enumerate(profiling.layers):
        widths = found.get(number)
        if widths is not None and widths.units:
            with own_state(ProcessState.seeded(0, 0, "widths")):
                calls = [(Microbenchmark(layer, value, piece, profiling, device), times) for value, times in values]
                own = _widths(layer, calls, widths.units)
            found[number] = replace(widths, measured={name: own} if own else {})
        tick()
    return found


def measured_parts(units: int) -> list[float]:
    """Return the fractions of ``units`` that are measured, ascending: at most 16 multiples of a power of two. So
    fractions at which kernels have whole blocks of channels are among them."""
    step = 1
    while units > MOST_WIDTHS * step:
        step *= 2
    return [count / units for count in range(step, units, step)] + [1.0]


def _widths(layer: Layer, calls: Sequence[tuple[Microbenchmark, int]], units: Mapping[str, int]) -> list[Width]:
    """Measure the parts into which the units of ``layer`` can be divided, in all its calls together."""
    parts = measured_parts(min(units.values()))
    counts = {share: {name: round(share * number) for name, number in units.items()} for share in parts}
    joined = joined_graph([layer], 0)
    known = [_values(benchmark, joined) for benchmark, _ in calls]
    jobs: dict[float, list[Callable[[], Times]]] = {share: [] for share in parts}
    for share in parts:
        splits = {name: (count, units[name] - count) for name, count in counts[share].items()}
        regions = split_graph(joined, ChannelCounts((1.0, 1.0), splits), 2).regions.values()
        for (benchmark, times), values in zip(calls, known, strict=True):
            for region in regions:
                if region.gives[0]:
                    leaves = _leaves(region, values, benchmark.device)
                    jobs[share] += [partial(_member_times, benchmark, region.graphs[0], leaves)] * times
    if not all(jobs.values()):  # by itself it has nothing to divide
        return []
    least = {share: [Times(inf, inf)] * len(jobs[share]) for share in parts}
    for _ in range(ROUNDS):
        for share in parts:
            least[share] = [
                Times(*map(min, job(), before)) for job, before in zip(jobs[share], least[share], strict=True)
            ]
    name, whole = next(iter(units.items()))
    return [Width(counts[share][name] / whole, *map(sum, zip(*least[share], strict=True))) for share in parts]


def _member_times(benchmark: Microbenchmark, graph: fx.GraphModule, leaves: Sequence[Any]) -> Times:
    fresh = [each.detach().requires_grad_(each.requires_grad) if isinstance(each, Tensor) else each for each in leaves]
    began = time.perf_counter()
    with torch.enable_grad(), benchmark.opened():
        outputs = graph(*fresh)
        benchmark.wait()
    turned = time.perf_counter()
    benchmark.backward([each for each in fresh if isinstance(each, Tensor) and each.requires_grad], outputs)
    return Times(turned - began, time.perf_counter() - turned)


def _values(benchmark: Microbenchmark, joined: JoinedGraph) -> dict[fx.Node, Any]:
    """Compute each node of ``joined`` for the inputs of the watched step."""
    _, own = benchmark.inputs()
    set_here(benchmark.device)
    scratch = benchmark.scratch
    held = [getattr(scratch, each) if isinstance(each, str) else each.to(benchmark.device) for _, _, each in joined.own]
    with torch.enable_grad(), benchmark.opened():
        _, *given = benchmark.value(own)
        program = fx.GraphModule({}, joined.graph)
        runner = fx.Interpreter(program, garbage_collect_values=False)
        runner.run(*joined.regions, benchmark.device, *held, *given)
    return dict(zip(joined.graph.nodes, map(runner.env.get, program.graph.nodes), strict=True))


def _leaves(region: Region, known: dict[fx.Node, Any], device: torch.device) -> list[Any]:
    """Return the inputs of the region for the first member."""

    def taken(each: RegionInput) -> Any:
        if each.taken is TakenAs.DEVICE:
            return device
        value = known[each.node]
        if not isinstance(value, Tensor):
            return value
        own = value.detach() if each.layout is None else part(value.detach(), each.layout, 0).contiguous()
        if each.taken is TakenAs.MASK:
            return torch.ones_like(own)
        return own.clone().requires_grad_(value.requires_grad)

    return [taken(region.inputs[number]) for number in region.takes[0]]
