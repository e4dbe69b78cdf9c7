"""Modules that the user has given to torch.compile are looked through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.exact.pipelines import even
from tests.exact.running import assert_equal, expect, fit
from tests.oracle import Batch
from tests.support.captured_models import ResNet, Whole
from tests.support.marks import quick
from tests.support.models import Learner, Task, images, vectors
from tests.support.traces import ours_in


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


class Half(nn.Module):
    """Holds a part that is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = compiled(nn.Linear(6, 8)), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(torch.tanh(self.first(x)))
        return y


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 5))


def in_place(module: nn.Sequential) -> nn.Sequential:
    module.compile(backend="eager")
    return module


KINDS: dict[str, tuple[Callable[[], Learner], Any, int, str | None]] = {
    "sequential": (lambda: Task(compiled(layers())), vectors(22, 4), 4, None),
    "in place": (lambda: Task(in_place(layers())), vectors(22, 4), 4, None),
    "named": (lambda: Task(compiled(layers())), vectors(22, 4), 4, "net"),
    "resnet": (lambda: Whole(compiled(ResNet(blocks=2))), images(14, 4), 5, None),
    "a part": (lambda: Whole(Half()), vectors(22, 4), 2, None),
}


@quick("sequential-3", "in place-3", "named-3", "a part-3")
@pytest.mark.parametrize("in_flight", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_modules(kind: str, in_flight: int) -> None:
    make, loader, count, module = KINDS[kind]
    task = make()
    expected = expect(task, loader, in_flight)
    with pytest.warns(UserWarning, match="is compiled by torch.compile; while HetPipeStrategy trains"):
        assert_equal(expected, fit(task, loader, strategy=even(count, 2, in_flight, module=module)))
    assert ours_in(task) == []


def test_a_frozen_one_stays_compiled() -> None:
    calls = []

    def backend(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            calls.append(1)
            return graph.forward(*args)

        return run

    class Taught(Task):
        def __init__(self) -> None:
            super().__init__(layers())
            self.teacher: Any = torch.compile(nn.Linear(6, 6).requires_grad_(False), backend=backend)

        def compute(self, batch: Batch) -> Any:
            return super().compute([self.teacher(batch[0]), batch[1]])

    task, loader = Taught(), vectors(22, 4)
    expected = expect(task, loader, 3)
    calls.clear()
    assert_equal(expected, fit(task, loader, strategy=even(4, 2, 3)))
    assert len(calls) == 12
