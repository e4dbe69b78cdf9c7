"""All stages are busy at once, the order of hooks moves only where it must, and failures end all."""

from __future__ import annotations

import threading
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_hetpipe.errors import SettingError
from tests.evaluation.evaluating import Model, pipeline
from tests.support.equality import assert_same
from tests.support.marks import quick
from tests.support.models import vectors
from tests.support.traces import ours_in
from tests.support.trainers import quiet_trainer


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("task", ["validate", "test", "predict"])
def test_all_stages_are_busy_at_once(task: str, stages: int) -> None:
    """Else the barrier would break, as its first batch finds nobody in the stages behind."""
    seen: list[tuple[int, int]] = []
    together = threading.Barrier(stages)

    def before(stage: int, work: str, batch: int) -> None:
        assert work == "evaluate"
        seen.append((stage, batch))
        if batch == stages + 2 - stage:  # batch p + 1 in stage 0 while batch p is in stage 1
            together.wait(20)

    strategy = pipeline(stages, in_flight=stages + 1)
    strategy._before_pass = before
    getattr(quiet_trainer(strategy), task)(Model(), vectors(31, 4))
    assert not together.broken
    assert {stage for stage, _ in seen} == set(range(stages))
    for stage in range(stages):
        batches = [batch for where, batch in seen if where == stage]
        assert batches == list(range(2, 9))


class Order(L.Callback):
    """Which hooks and steps came in which order."""

    def __init__(self) -> None:
        self.order: list[str] = []

    def on_validation_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int, *_: Any) -> None:
        self.order.append(f"start {batch_idx}")

    def on_validation_batch_end(self, trainer: Any, module: Any, out: Any, batch: Any, batch_idx: int, *_: Any) -> None:
        self.order.append(f"end {batch_idx}")


def order(in_flight: int) -> list[str]:
    callback = Order()

    class Steps(Model):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            callback.order.append("transfer")
            return batch

        def step(self, x: Tensor, batch_idx: int) -> Any:
            callback.order.append(f"step {batch_idx}")
            return super().step(x, batch_idx)

    quiet_trainer(pipeline(2, in_flight), callbacks=[callback]).validate(Steps(), vectors(15, 4), verbose=False)
    return callback.order


def test_one_in_flight_has_lightnings_order() -> None:
    assert order(1) == [f"{what} {i}".replace("transfer " + str(i), "transfer") for i in range(4) for what in (
        "transfer", "start", "step", "end"
    )]  # fmt: skip


def test_only_steps_and_transfers_move() -> None:
    found = order(3)
    assert [line for line in found if line.startswith(("start", "end"))] == [
        f"{what} {i}" for i in range(4) for what in ("start", "end")
    ]
    assert [line for line in found if line.startswith("step")] == [f"step {i}" for i in range(4)]
    assert found.count("transfer") == 4
    for i in range(4):
        assert found.index(f"step {i}") < found.index(f"end {i}")
    assert found.index("step 3") < found.index("end 1")  # three are in flight


class Trouble(Exception):
    pass


@quick(
    "validate-step-0",
    "validate-step-4",
    "validate-layer-1",
    "validate-layer-4",
    "validate-hook-1",
    "predict-step-1",
    "predict-layer-0",
    "predict-hook-4",
)
@pytest.mark.parametrize("bad", [0, 1, 4])
@pytest.mark.parametrize("place", ["step", "layer", "hook"])
@pytest.mark.parametrize("task", ["validate", "predict"])
def test_a_failure_comes_out_and_leaves_nothing(task: str, place: str, bad: int) -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            if place == "layer" and bool((x == 99).any()):
                raise Trouble("in a layer")
            return x * self.weight

    class Falls(Model):
        def step(self, x: Tensor, batch_idx: int) -> Any:
            if place == "step" and batch_idx == bad:
                raise Trouble("in a step")
            return super().step(torch.full_like(x, 99) if batch_idx == bad else x, batch_idx)

        def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            if place == "hook" and batch_idx == bad:
                raise Trouble("in a hook")

        def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.on_validation_batch_end(outputs, batch, batch_idx)

    module = Falls(nn.Sequential(nn.Linear(6, 6), nn.Identity(), Fails(), nn.Tanh()))
    module.net[0].weight.data.copy_(torch.eye(6))
    module.net[0].bias.data.zero_()
    before = {name: set(vars(part)) for name, part in module.net.named_modules()}
    trainer = quiet_trainer(pipeline(2, 3))
    with pytest.raises(Trouble, match=f"in a {place}"):
        getattr(trainer, task)(module, vectors(23, 4))
    assert {name: set(vars(part)) for name, part in module.net.named_modules()} == before
    assert not [t.name for t in threading.enumerate() if t.name.startswith("hetpipe")]
    assert ours_in(module) == []
    expected = quiet_trainer("auto").predict(Model(), vectors(23, 4))
    assert_same(expected, quiet_trainer(pipeline(2, 3)).predict(Model(), vectors(23, 4)))


def test_a_failure_of_a_layer_can_be_caught() -> None:
    class Catches(Model):
        def step(self, x: Tensor, batch_idx: int) -> Any:
            try:
                return super().step(x[:, :3] if batch_idx % 2 else x, batch_idx)
            except RuntimeError:
                return super().step(x, batch_idx)

    expected = quiet_trainer("auto").predict(Catches(), vectors(23, 4))
    assert_same(expected, quiet_trainer(pipeline(2, 3)).predict(Catches(), vectors(23, 4)))


def test_weights_changed_in_the_middle_are_refused() -> None:
    class Changes(Model):
        def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            if batch_idx == 2:
                self.net[0].weight.data.mul_(2)
                torch.nn.init.zeros_(self.net[0].bias)

    with pytest.raises(SettingError, match=r"'net.0.(bias|weight)' was changed by batch 3"):
        quiet_trainer(pipeline(2, 3)).validate(Changes(), vectors(23, 4), verbose=False)
    quiet_trainer(pipeline(2, 1)).validate(Changes(), vectors(23, 4), verbose=False)
