"""Stages hold what the schedule's simulation says, and never more than the stated bound."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_hetpipe.pipeline.memory import REMEMBERED, Counter, Kept, Memory
from lightning_hetpipe.pipeline.user.minibatch import Step
from lightning_hetpipe.planning.model.simulate import StageTimes, simulate
from lightning_hetpipe.rules.schedule import Work
from tests.exact.pipelines import Delays
from tests.pipeline.driving import Line, X, mlp
from tests.pipeline.timetable import Timetable
from tests.support.marks import explores

ROWS = X.numel() * 4
"""Bytes of a tensor like X, and of what each layer of `mlp` makes of it."""
WEIGHTS = (4 * 4 + 4) * 4
"""Bytes of the weights of a Linear(4, 4)."""


def driven(times: Sequence[tuple[float, float]], in_flight: int, minibatches: int) -> tuple[Line, tuple[int, ...]]:
    """A run of Linear and Tanh on each stage, which takes exactly ``times``, and what the simulation says it holds."""
    simulation = simulate([StageTimes(*each) for each in times], in_flight, minibatches)
    timetable = Timetable(simulation)
    cuts = range(0, 2 * len(times), 2)
    line = Line(mlp(2 * len(times)), cuts=cuts, in_flight=in_flight, before_pass=timetable)
    timetable.run(line, in_flight, minibatches)
    return line, simulation.held


def held(line: Line) -> tuple[int, ...]:
    return tuple(stage.memory.minibatches.most for stage in line.engine.stages)


def nearly_equal(stages: int) -> list[tuple[float, float]]:
    """Backward takes twice as long as forward; no two times are the same."""
    return [(1.0 + 0.0001 * stage**1.5, 2.0 + 0.0001 * (stage + 0.3) ** 1.7) for stage in range(stages)]


def test_equal_stages_hold_what_first_in_first_out_does() -> None:
    """1F1B would hold 4, 3, 2 and 1."""
    line, expected = driven(nearly_equal(4), in_flight=6, minibatches=24)
    assert held(line) == expected == (6, 6, 5, 1)
    for stage, minibatches in zip(line.engine.stages, expected, strict=True):
        # The input, what the Linear gives (the Tanh's input is not saved, but its output), and the Tanh's output.
        assert stage.memory.activations.most == minibatches * 2 * ROWS
        assert stage.memory.versions.most == 1 * WEIGHTS  # weights do not change here
        assert stage.memory.activations.now == stage.memory.minibatches.now == stage.memory.gradients.now == 0


@pytest.mark.parametrize("bottleneck", range(4))
def test_unequal_stages_hold_what_the_simulation_says(bottleneck: int) -> None:
    times = [
        (f * (2.1 if i == bottleneck else 1), b * (2.1 if i == bottleneck else 1))
        for i, (f, b) in enumerate(nearly_equal(4))
    ]
    line, expected = driven(times, in_flight=6, minibatches=20)
    assert held(line) == expected
    assert [stage.memory.activations.most for stage in line.engine.stages] == [n * 2 * ROWS for n in expected]


def odd(random: tuple[int, int]) -> tuple[float, float]:
    """Times of which no sums are the same."""
    return random[0] / 997, random[1] / 991


@explores(15)
@given(
    times=st.lists(st.tuples(st.integers(1, 10**9), st.integers(1, 10**9)).map(odd), min_size=1, max_size=4),
    in_flight=st.integers(1, 6),
    minibatches=st.integers(1, 12),
)
def test_random_pipelines_hold_what_the_simulation_says(
    times: list[tuple[float, float]], in_flight: int, minibatches: int
) -> None:
    simulation = simulate([StageTimes(*each) for each in times], in_flight, minibatches)
    ends = [span.end for span in simulation.spans]
    ends += [span.forwarded for span in simulation.spans if span.work is Work.TURN]
    if len(set(ends)) < len(ends):
        return
    line, expected = driven(times, in_flight, minibatches)
    assert held(line) == expected


@explores(6)
@given(seed=st.integers(0, 99), in_flight=st.integers(1, 5), pieces=st.integers(1, 2))
def test_whatever_the_timing_nobody_holds_more_than_the_bound(seed: int, in_flight: int, pieces: int) -> None:
    line = Line(*(mlp(4) for _ in range(pieces)), cuts=(0, 2), in_flight=in_flight, before_pass=Delays(seed))
    with line.running() as engine:
        for p in range(1, in_flight + 1):
            engine.submit(p, line.plain())
        for p in range(1, 13):
            line.update(engine.finish(p).gradients)
            engine.delivered(p)
            engine.publish(p)
            engine.submit(p + in_flight, line.plain())
        engine.drain()
    assert max(held(line)) <= in_flight
    assert pieces > 1 or held(line)[-1] == 1
    for stage in line.engine.stages:
        memory = stage.memory
        weights = sum(stage.stash.bytes)
        layers = len(stage.layers)
        assert memory.versions.most == in_flight * weights
        assert memory.activations.most <= memory.minibatches.most * layers * ROWS
        assert memory.gradients.most <= in_flight * weights
        assert memory.total.most <= memory.versions.most + memory.activations.most + memory.gradients.most


@explores(12)
@given(
    seed=st.integers(0, 99),
    in_flight=st.integers(2, 5),
    calls=st.sampled_from([(0,), (0, 1), (0, 1, 0), (1, 0, 1, 1)]),
    minibatches=st.integers(1, 2),
    recompute=st.booleans(),
)
def test_minibatches_that_lack_room_wait(
    seed: int, in_flight: int, calls: tuple[int, ...], minibatches: int, recompute: bool
) -> None:
    """Each stage has room for a few minibatches; what they give is the same, and what is dropped leaves nothing."""
    pieces = [mlp(4) for _ in range(max(calls) + 1)]
    settings: dict[str, Any] = {"in_flight": in_flight, "called": calls, "recompute": recompute}
    cuts = (0, 1, 3) if len(pieces) == 1 else (0, 3, 5)

    def step(line: Line) -> Step:
        def run() -> Tensor:
            value: Any = X
            for piece in calls:
                value = line.call(value, piece)
            loss: Tensor = value.square().sum()
            return loss

        return line.step(run)

    alone = Line(*pieces, cuts=cuts, **settings)
    with alone.running() as engine:
        engine.submit(1, step(alone))
        expected = engine.finish(1).gradients
    rooms = [minibatches * stage.memory.activations.most for stage in alone.engine.stages]
    line = Line(*pieces, cuts=cuts, rooms=rooms, before_pass=Delays(seed), **settings)
    with line.running() as engine:
        for done in line.train(12, lambda p: step(line)):
            assert done.gradients.keys() == expected.keys()
            assert all(torch.equal(done.gradients[weight], expected[weight]) for weight in expected)
        for p in range(13, 13 + in_flight):
            engine.submit(p, step(line))
        engine.begin(12)
        engine.submit(13, step(line))
        found = engine.finish(13).gradients
        assert all(torch.equal(found[weight], expected[weight]) for weight in expected)
    for stage, room in zip(line.engine.stages, rooms, strict=True):
        assert stage.memory.activations.most <= room
        assert stage.memory.activations.now == stage.memory.minibatches.now == 0


def test_gradients_wait_until_lightnings_step() -> None:
    line = Line(mlp(), cuts=(0, 2), in_flight=3)
    with line.running() as engine:
        for p in (1, 2, 3):
            engine.submit(p, line.plain())
        engine.drain()
        waiting = [stage.memory.gradients for stage in engine.stages]
        assert [level.now for level in waiting] == [3 * WEIGHTS] * 2
        engine.finish(1)
        assert [level.now for level in waiting] == [3 * WEIGHTS] * 2
        engine.delivered(1)
        assert [level.now for level in waiting] == [2 * WEIGHTS] * 2
        engine.begin(1)
        assert [level.now for level in waiting] == [0, 0]
        assert [level.most for level in waiting] == [3 * WEIGHTS] * 2


def test_a_tied_weights_gradient_counts_once() -> None:
    """The stage of the earliest use keeps it: it has gone on with the sum of the later ones."""
    shared = nn.Linear(4, 4)
    line = Line(nn.Sequential(shared, nn.Tanh(), shared), cuts=(0, 2))
    with line.running() as engine:
        engine.submit(1, line.plain())
        engine.drain()
        assert [stage.memory.gradients.now for stage in engine.stages] == [WEIGHTS, 0]


@pytest.mark.parametrize("work", ["forward", "backward"])
def test_what_fails_is_held_no_longer(work: str) -> None:
    def fail(stage: int, what: str, minibatch: int) -> None:
        if (stage, what) == (0, work):
            raise ArithmeticError("at its address")

    line = Line(mlp(), cuts=(0, 2), before_pass=fail)
    with line.running() as engine:
        engine.submit(1, line.plain())
        with pytest.raises(ArithmeticError, match="at its address"):
            engine.finish(1)
        assert engine.stages[0].memory.activations.now == engine.stages[0].memory.minibatches.now == 0


def test_the_most_lately_starts_anew() -> None:
    memory = Memory()
    memory.publish(100)
    memory.hold(1, 0, 30)
    memory.hold(1, 1, 5)
    memory.hold(1, 0, 10)
    memory.release(1, 0)
    memory.release(1, 0)  # twice is once
    assert (memory.total.now, memory.total.most) == (105, 135)
    assert [memory.most_lately(), memory.most_lately()] == [135, 105]
    assert memory.minibatches.now == 1
    memory.release(1, 1)
    assert (memory.minibatches.now, memory.activations.now) == (0, 0)


class TestCounter:
    def count(self, counter: Counter, layers: nn.Module, x: Tensor) -> Kept:
        """As a stage does: it looks where it does not know."""
        known = counter.known([x])
        return known if known is not None else counter.kept([x], lambda: layers(x), layers.parameters)[1]

    def test_a_block_counts_once(self) -> None:
        """A view is the same block; Tanh saves its output, which is the segment's."""
        x = torch.zeros(3, 4, requires_grad=True)
        kept = self.count(Counter(), nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Flatten()), x)
        assert kept == Kept(all=2 * 48, inputs=48)

    def test_what_the_graph_does_not_keep_does_not_count(self) -> None:
        class Peeks(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x * (x.exp().tanh().sum().item() > 0)

        x = torch.zeros(3, 4, requires_grad=True)
        assert self.count(Counter(), Peeks(), x) == Kept(all=2 * 48, inputs=48)

    def test_it_looks_once_for_each_size(self) -> None:
        counter, layer = Counter(), nn.Linear(4, 4)
        small, large = torch.zeros(3, 4), torch.zeros(6, 4)
        sizes = [self.count(counter, layer, x).all for x in (small, large, small)]
        assert sizes == [96, 192, 96]
        assert self.count(counter, nn.Sequential(layer, nn.Tanh(), layer), small).all == 96  # the one it knows
        counter.clear()
        assert self.count(counter, nn.Sequential(layer, nn.Tanh(), layer), small).all == 3 * 48

    def test_it_forgets_rather_than_grow(self) -> None:
        counter = Counter()
        for size in range(REMEMBERED + 2):
            self.count(counter, nn.Tanh(), torch.zeros(size + 1))
        assert len(counter._known) == 2

    def test_a_graph_that_is_dropped_goes(self) -> None:
        """An output that is saved as it is would keep its own graph, and be kept by it, for ever."""
        x = torch.zeros(3, 4, requires_grad=True)
        gc.disable()
        try:
            layer = nn.Tanh()
            output, kept = Counter().kept([x], partial(layer, x), layer.parameters)
            gone = weakref.ref(x)
            del x, output
            assert gone() is None
        finally:
            gc.enable()
        assert kept.all == 96

    def test_gradients_are_the_same(self) -> None:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 4), nn.Tanh())
        x = torch.randn(3, 4, requires_grad=True)
        output, _ = Counter().kept([x], lambda: layers(x), layers.parameters)
        wanted = [x, *layers.parameters()]
        found = torch.autograd.grad(output.square().sum(), wanted)
        assert all(map(torch.equal, found, torch.autograd.grad(layers(x).square().sum(), wanted)))
