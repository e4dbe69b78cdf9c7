"""Measures how long one device of a group takes for a part of a layer's channels."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, fx

from lightning_hetpipe.accelerator import accelerates
from lightning_hetpipe.capture.microbenchmark import Microbenchmark
from lightning_hetpipe.capture.pieces import Piece
from lightning_hetpipe.capture.profiling import ProfilingInput
from lightning_hetpipe.pipeline.graph_layer import GraphLayer, set_here
from lightning_hetpipe.pipeline.split.joined_graph import JoinedGraph, joined_graph
from lightning_hetpipe.pipeline.split.parts import part
from lightning_hetpipe.pipeline.split.regions import Region, RegionInput, Taken
from lightning_hetpipe.pipeline.split.rewriting import divided_layers, split_graph
from lightning_hetpipe.pipeline.stage import Layer
from lightning_hetpipe.pipeline.user.user_section import ProcessState, own_state
from lightning_hetpipe.pipeline.values import gradients
from lightning_hetpipe.planning.model.layer_widths import LayerWidths, Width
from lightning_hetpipe.planning.model.profile import Times
from lightning_hetpipe.rules.channel_counts import ChannelCounts

PARTS = (0.25, 0.5, 0.75)
"""Parts of a layer's channels that are measured, as far as its units allow them."""

WARM_UP, ROUNDS = 1, 5
"""Rounds of each part; the median of the latter counts."""


def layer_widths(pieces: Sequence[Piece]) -> dict[int, LayerWidths]:
    """How a group of devices may divide the layers of ``pieces``, counted through all of them; without times.

    A piece with a layer that was not captured as a graph cannot be divided.
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
    profiling: ProfilingInput,
    device: torch.device,
    name: str,
    whole: Sequence[Times],
    tick: Callable[[], object] = lambda: None,
) -> dict[int, LayerWidths]:
    """As :func:`layer_widths`, with times of layers that begin to be divided, on ``device``.

    Args:
        profiling: The watched step.
        device: Where they are measured.
        name: Of the device, in a profile.
        whole: Times of each layer there.
        tick: Called after each layer.
    """
    found = layer_widths(profiling.pieces)
    for number, (layer, values, piece) in enumerate(profiling.layers):
        widths = found.get(number)
        if widths is not None and widths.units:
            with own_state(ProcessState.seeded(0, 0, "widths")):
                calls = [
                    (Microbenchmark(
                        layer, value, piece, profiling.generators, profiling.default_dtype, device, profiling.finetuned
                    ), times)
                    for value, times in values
                ]  # fmt: skip
                own = {each.part: each for each in (_width(layer, calls, widths, wanted) for wanted in PARTS) if each}
            found[number] = replace(widths, measured={name: [*own.values(), Width(1.0, whole[number])]})
        tick()
    return found


def _width(
    layer: Layer, calls: Sequence[tuple[Microbenchmark, int]], widths: LayerWidths, wanted: float
) -> Width | None:
    """Time of about the ``wanted`` part of ``layer``, in all of its calls; None where its units have no such part."""
    counts = {name: min(units - 1, max(1, round(wanted * units))) for name, units in widths.units.items()}
    splits = {name: (count, widths.units[name] - count) for name, count in counts.items() if count}
    if len(splits) < len(widths.units):
        return None
    joined = joined_graph([layer], 0)
    made = split_graph(joined, ChannelCounts((1.0, 1.0), splits), 2)
    forward = backward = 0.0
    for benchmark, times in calls:
        one = _member_times(benchmark, joined, [*made.regions.values()])
        forward, backward = forward + times * one.forward, backward + times * one.backward
    name = next(iter(widths.units))
    return Width(counts[name] / widths.units[name], Times(forward, backward))


def _member_times(benchmark: Microbenchmark, joined: JoinedGraph, regions: Sequence[Region]) -> Times:
    """Seconds of the first member in all ``regions``."""
    known = _values(benchmark, joined)
    jobs = [(region.graphs[0], _leaves(region, known, benchmark.device)) for region in regions if region.gives[0]]
    rounds: list[tuple[float, float]] = []
    for _ in range(WARM_UP + ROUNDS):
        total = [0.0, 0.0]
        for graph, leaves in jobs:
            with torch.enable_grad(), benchmark.opened():
                fresh = [
                    each.detach().requires_grad_(each.requires_grad) if isinstance(each, Tensor) else each
                    for each in leaves
                ]
                began = time.perf_counter()
                outputs = graph(*fresh)
                _wait(benchmark.device)
                turned = time.perf_counter()
                ones = [torch.ones_like(each) if each.is_floating_point() else None for each in outputs]
                wanted = [each for each in fresh if isinstance(each, Tensor) and each.requires_grad]
                started = time.perf_counter()
                gradients(outputs, ones, wanted)
                _wait(benchmark.device)
            total[0] += turned - began
            total[1] += time.perf_counter() - started
        rounds.append((total[0], total[1]))
    return Times(*map(median, zip(*rounds[WARM_UP:], strict=True)))


def _values(benchmark: Microbenchmark, joined: JoinedGraph) -> dict[fx.Node, Any]:
    """Value of each node of ``joined`` for the inputs of the watched step."""
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
    """What the first member takes of the region's inputs."""

    def taken(each: RegionInput) -> Any:
        if each.taken is Taken.DEVICE:
            return device
        value = known[each.node]
        if not isinstance(value, Tensor):
            return value
        own = value.detach() if each.layout is None else part(value.detach(), each.layout, 0).contiguous()
        if each.taken is Taken.MASK:
            return torch.ones_like(own)
        return own.clone().requires_grad_(value.requires_grad)

    return [taken(region.inputs[number]) for number in region.takes[0]]


def _wait(device: torch.device) -> None:
    if accelerates(device):
        torch.accelerator.synchronize(device)
