"""A segment that changes its buffers and is visited several times ends one minibatch before it begins the next."""

from __future__ import annotations

import threading
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from lightning_hetpipe.pipeline.stage_messages import Parcel
from lightning_hetpipe.pipeline.user.minibatch import Step
from tests.pipeline.driving import Line, X


class History(nn.Module):
    """Adds up in a buffer what it was given, and gives the sum."""

    sum: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.register_buffer("sum", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.sum += x.sum(0)
        return self.sum.clone() * self.weight + 0 * x


class Passes:
    """Writes down the passes of stage 0; it begins none before minibatch 2 has made its first call."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []
        self.arrived = threading.Event()

    def __call__(self, stage: int, work: str, minibatch: int) -> None:
        if stage == 0:
            assert self.arrived.wait(30)
            self.seen.append((work, minibatch))

    def watch(self, line: Line) -> None:
        stage = line.engine.stages[0]
        put = stage.put

        def watched(parcel: Parcel) -> None:
            put(parcel)
            if parcel.message.minibatch == 2:
                self.arrived.set()

        stage.put = watched  # type: ignore[method-assign]


def run(layer: nn.Module, cuts: tuple[int, ...], fails: bool = False) -> tuple[Passes, dict[tuple[int, int], Tensor]]:
    """Two minibatches that call ``layer`` twice each; maybe the first one ``fails`` in between."""
    passes, outputs = Passes(), dict[tuple[int, int], Tensor]()
    line = Line(nn.Sequential(layer, nn.Identity()), cuts=cuts, called=(0, 0), before_pass=passes)
    passes.watch(line)

    def step(number: int) -> Step:
        def both() -> Tensor:
            loss = torch.zeros(())
            for call in (0, 1):
                if fails and call and number == 1:
                    raise ArithmeticError("between two calls")
                out: Tensor = line.call(X * 10**call * number)
                outputs[number, call] = out.detach().clone()
                loss = loss + out.square().sum()
            return loss

        return line.step(both)

    with line.running() as engine:
        for number in (1, 2):
            engine.submit(number, step(number))
        for number in (1, 2):
            with pytest.raises(ArithmeticError, match="between") if fails and number == 1 else nullcontext():
                engine.finish(number)
    assert line.threads() == []
    return passes, outputs


across = pytest.mark.parametrize("cuts", [(0,), (0, 1)])


@across
def test_a_minibatch_starts_from_what_the_last_call_before_it_left(cuts: tuple[int, ...]) -> None:
    passes, outputs = run(History(), cuts)
    layer = History()
    for number, call in ((1, 0), (1, 1), (2, 0), (2, 1)):
        assert torch.equal(outputs[number, call], layer(X * 10**call * number).detach())
    assert [number for work, number in passes.seen if work == "forward"] == [1, 1, 2, 2]


@across
def test_where_no_buffer_changes_nobody_waits(cuts: tuple[int, ...]) -> None:
    passes, _ = run(nn.Linear(4, 4), cuts)
    assert [number for work, number in passes.seen if work == "forward"][:3] == [1, 2, 1]


@across
def test_a_minibatch_that_fails_between_its_calls_lets_the_next_one_go_on(cuts: tuple[int, ...]) -> None:
    _, outputs = run(History(), cuts, fails=True)
    assert sorted(outputs) == [(1, 0), (2, 0), (2, 1)]
