"""Memory of stages by a plan is what the engine counts, to 10%."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from lightning_hetpipe.pipeline.memory import Counter
from lightning_hetpipe.planning.model.profile import LayerBytes
from lightning_hetpipe.planning.model.simulate import Simulation, StageTimes, simulate
from lightning_hetpipe.planning.model.stage_memory import StageBytes, StageMemory
from tests.pipeline.driving import Line
from tests.pipeline.timetable import Timetable
from tests.planning.loads import loads
from tests.support.marks import quick

ROWS, WIDTH, GIVEN = 32, 16, 48


class Block(nn.Module):
    """As of a transformer, without its attention."""

    def __init__(self, wider: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, wider * WIDTH), nn.GELU(), nn.Linear(wider * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.mlp(self.norm(x))
        return y


def model() -> nn.Sequential:
    """Blocks of different sizes, for batches that are larger than what crosses a cut."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(GIVEN, WIDTH), *(Block(wider) for wider in (4, 1, 2, 8, 3, 4, 2)), nn.Linear(WIDTH, 2)
    )


def profiled(layers: nn.Sequential, x: Tensor) -> list[LayerBytes]:
    """Each layer on its own."""
    found = []
    for name, layer in layers.named_children():
        value = x.detach().requires_grad_()
        output, kept = Counter().kept([value], partial(layer, value), layer.parameters)
        found.append(LayerBytes(name, sum(p.nbytes for p in layer.parameters()), kept.all, output.nbytes, kept.inputs))
        x = output
    return found


def planned(
    layers: Sequence[LayerBytes], cuts: Sequence[int], run: Simulation, in_flight: int, recompute: bool
) -> list[StageMemory]:
    """Memory of the stages, once all versions differ: before, version buffers are there, but do not count as held."""
    found, since = [], run.published[2 * in_flight - 1]
    memory = StageBytes(layers, 0.0, recompute)
    for index, (first, after) in enumerate(pairwise([*cuts, len(layers)])):
        every = loads(run, index)
        held = {load for when, load in every if when >= since} | {[load for when, load in every if when < since][-1]}
        stages = (memory.stage(first, after, load, in_flight) for load in held)
        found.append(max(stages, key=lambda each: each.total))
    return found


@quick("1-cuts0-False", "1-cuts2-True", "3-cuts1-False", "3-cuts1-True", "3-cuts2-False", "5-cuts2-True")
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("cuts", [(0, 2, 5), (0, 4), (0, 2, 4, 7)])
@pytest.mark.parametrize("in_flight", [1, 3, 5])
def test_plans_agree_with_what_the_engine_counts(cuts: tuple[int, ...], in_flight: int, recompute: bool) -> None:
    torch.manual_seed(1)
    x = torch.randn(ROWS, GIVEN)
    layers = model()
    # No two times are the same, see Timetable.
    times = [StageTimes(1.0 + 0.31 * i**1.5, 2.0 + 0.17 * (i + 0.3) ** 1.7) for i in range(len(cuts))]
    minibatches = 4 * in_flight + 6
    run = simulate(times, in_flight, minibatches)
    expected = planned(profiled(layers, x), cuts, run, in_flight, recompute)

    timetable = Timetable(run)

    def at_the_end(stage: int, work: str, minibatch: int) -> None:
        """Has what a task takes and leaves counted when it ends: a pass that is padded would do so as it begins."""
        if (wait := timetable(stage, work, minibatch)) is not None:
            wait()

    line = Line(layers, cuts=cuts, in_flight=in_flight, before_pass=at_the_end, recompute=recompute)
    finish = line.engine.finish

    def step(number: int):  # type: ignore[no-untyped-def]
        done = finish(number)
        line.update(done.gradients)  # so that every version is another
        if number == 2 * in_flight:
            for stage in line.engine.stages:
                stage.memory.most_lately()
        return done

    line.engine.finish = step  # type: ignore[method-assign]
    timetable.run(line, in_flight, minibatches, [x] * minibatches)
    for stage, plan in zip(line.engine.stages, expected, strict=True):
        assert plan.versions == stage.memory.versions.most
        assert plan.versions + plan.moving == pytest.approx(stage.memory.most_lately(), rel=0.1)
