"""Memory that a fit has taken of its devices is given back when it ends, not when Python next collects garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_hetpipe.pipeline.weight_stash import WeightStash
from tests.exact.pipelines import Pinned
from tests.exact.running import fit
from tests.support.marks import quick
from tests.support.models import mlp, sentences, tied_language_model, vectors


class Held:
    """The memory of every version buffer that was made."""

    def __init__(self) -> None:
        self.blocks: list[StorageWeakRef] = []

    @property
    def alive(self) -> int:
        return sum(not block.expired() for block in self.blocks)  # type: ignore[no-untyped-call]  # as torch's are


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    """While Python collects no garbage."""
    found = Held()

    class Watched(WeightStash):
        def __init__(self, live: nn.ModuleList, size: int, device: torch.device) -> None:
            super().__init__(live, size, device)
            made = [tensor for buffer in self.buffers for tensor in buffer.tensors]
            weak: Any = StorageWeakRef  # torch has no types here
            found.blocks += [weak(tensor.untyped_storage()) for tensor in made]

    monkeypatch.setattr("lightning_hetpipe.pipeline.stage.WeightStash", Watched)
    monkeypatch.setattr("lightning_hetpipe.pipeline.engine.WeightStash", Watched)
    gc.disable()
    yield found
    gc.enable()


@quick("False-True", "True-False")
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_versions(held: Held, monkeypatch: pytest.MonkeyPatch, fails: bool, compiled: bool) -> None:
    """They are Nm times the model, and Lightning clears the allocator's cache once the strategy is through."""
    at_teardown: list[int] = []
    monkeypatch.setattr(CPUAccelerator, "teardown", lambda self: at_teardown.append(held.alive))
    strategy = Pinned((0, 2), 3, compile="eager" if compiled else False)
    if fails:

        def fail(self: Any, *_: Any) -> None:
            raise ZeroDivisionError

        task = mlp()
        monkeypatch.setattr(type(task), "on_train_epoch_end", fail)
        with pytest.raises(ZeroDivisionError):
            fit(task, vectors(40, 8), strategy=strategy)
    else:
        fit(mlp(), vectors(40, 8), strategy=strategy)
    assert held.blocks
    assert at_teardown == [0]


def test_versions_of_tied_weights(held: Held) -> None:
    fit(tied_language_model(), sentences(12, 4), strategy=Pinned((0, 2), 2))
    assert held.blocks
    assert held.alive == 0
