"""An engine without Lightning: steps that tests write, its threads, and what a plain run would compute."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import line
from lightning_hetpipe.pipeline.engine import Engine
from lightning_hetpipe.pipeline.user.minibatch import Step

X = torch.arange(12.0).reshape(3, 4) / 10


class Line(line.Line):
    """One whose threads are looked at, with steps that tests write."""

    def __init__(self, *pieces: nn.Sequential, **settings: Any) -> None:
        self._others = set(threading.enumerate())
        super().__init__(*pieces, **settings)

    def plain(self, x: Tensor = X) -> Step:
        """A step that sends ``x`` through all pieces."""

        def run() -> Tensor:
            value: Any = x
            for piece in range(len(self.pieces)):
                value = self.call(value, piece)
            loss: Tensor = value.square().sum()
            return loss

        return self.step(run)

    def swallowing(self, swallowed: list[Exception]) -> Step:
        """A step that catches whatever ``Exception`` its call raises, adds it to ``swallowed``, and goes on."""

        def run() -> Tensor:
            try:
                loss: Tensor = self.call(X).sum()
            except Exception as error:
                swallowed.append(error)
                return torch.zeros((), requires_grad=True)
            return loss

        return self.step(run)

    @contextmanager
    def stuck(self, release: threading.Event) -> Iterator[Engine]:
        """Started and begun, with a layer that is stuck; in the end it is released, and all threads must end."""
        self.engine.start()
        self.engine.begin(0)
        try:
            yield self.engine
        finally:
            release.set()
            self.join()
        assert self.threads() == []

    def threads(self) -> list[str]:
        """The names of its threads that are alive."""
        return [thread.name for thread in self._threads()]

    def join(self) -> None:
        """Waits for its threads, which have nothing left to do."""
        for thread in self._threads():
            thread.join(5)

    def _threads(self) -> list[threading.Thread]:
        alive = threading.enumerate()
        return [thread for thread in alive if thread not in self._others and thread.name.startswith("hetpipe")]

    def parameters(self) -> list[nn.Parameter]:
        return list(nn.ModuleList(self.pieces).parameters())

    def expected(self, x: Tensor = X) -> list[Tensor]:
        """The gradients of a plain step on the weights as they are now."""
        copies = copy.deepcopy(nn.ModuleList(self.pieces))
        value = x
        for piece in copies:
            value = piece(value)
        return list(torch.autograd.grad(value.square().sum(), list(copies.parameters())))

    def update(self, gradients: dict[nn.Parameter, Tensor]) -> None:
        """Change of weights as an optimizer makes it."""
        with torch.no_grad():
            for parameter, gradient in gradients.items():
                parameter.sub_(gradient, alpha=0.01)


def stuck_layer(entered: threading.Event, release: threading.Event) -> nn.Module:
    """A layer whose forward waits until it is released."""

    class Stuck(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            entered.set()
            release.wait(60)
            return x * 1.0

    return Stuck()


def mlp(layers: int = 4) -> nn.Sequential:
    return nn.Sequential(*(part for _ in range(layers // 2) for part in (nn.Linear(4, 4), nn.Tanh())))


def assert_gradients(line: Line, found: dict[nn.Parameter, Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for parameter, gradient in zip(line.parameters(), expected, strict=True):
        assert torch.equal(found[parameter], gradient)


class Held:
    """Holds up the tasks of one stage until it is released; ``reached`` is set at the first of them."""

    def __init__(self, stage: int, work: str, minibatch: int) -> None:
        self.where = (stage, work, minibatch)
        self.reached = threading.Event()
        self.release = threading.Event()
        self.tasks: list[tuple[int, str, int]] = []

    def __call__(self, *where: Any) -> None:
        self.tasks.append(where)
        if where == self.where:
            self.reached.set()
            assert self.release.wait(30)
