"""Wherever a device runs out of memory, the error says who wanted it, what was held and planned, and what helps."""

from __future__ import annotations

import re
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe.capture.captured import on_one_device
from lightning_hetpipe.pipeline import memory
from lightning_hetpipe.planning.model.units import in_bytes
from lightning_hetpipe.planning.plan.document import Plan
from lightning_hetpipe.planning.search.choice import best_plan
from lightning_hetpipe.planning.search.problem import PlanningProblem
from lightning_hetpipe.strategy.profiling_strategy import ProfilingStrategy
from lightning_hetpipe.strategy.profiling_strategy import profile as profiled
from tests.accelerator.four_devices import DEVICES, LARGE, cluster, trainer_on
from tests.accelerator.large_models import Writes, in_a_row
from tests.oracle import Batch, Outputs
from tests.support.accelerator import NAME, TestAccelerator, set_limit
from tests.support.models import ADAMW, words
from tests.support.trainers import quiet_trainer

HELD = ("of weight versions", "of activations of", "of waiting gradients", "the plan has", "of 1.0 GiB for it")
THERE = (
    r"; devices hold\n  stage 0 on testacc:0: .* of weights, .* of gradients, .* of optimizer state, and .* with all"
    " else; it has "
)
LESS = "set in_flight below 3, recompute=True, or smaller batches, or give more devices"


pytestmark = pytest.mark.usefixtures("own_profiles")


class Fills(L.Callback):
    """Leaves no byte free on any device from ``hook`` on."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self.fill)

    def fill(self, *_: Any) -> None:
        for index in range(DEVICES):
            free, _ = torch.get_device_module(NAME).mem_get_info(index)
            self.filling = getattr(self, "filling", ()), torch.empty(free, dtype=torch.uint8, device=f"{NAME}:{index}")


def wants(*task: Any) -> Any:
    """A stage that wants more than there is in its ``task``: index, work and minibatch."""
    index, *_ = task
    return lambda *now: torch.empty(1 << 40, device=f"{NAME}:{index}") and None if now == task else None


class Large(Writes):
    """Asks for more than there is, in user code of the third minibatch."""

    def compute(self, batch: Batch) -> Outputs:
        found = super().compute(batch)
        if self.trainer.global_step:
            torch.empty(1 << 40, device=found["loss"].device)
        return found


def planned() -> HetPipeStrategy:
    return HetPipeStrategy(stages=4, in_flight=3, cluster=cluster(*LARGE))


def note_of(
    strategy: HetPipeStrategy,
    accelerator: TestAccelerator,
    *callbacks: Any,
    kind: type[Writes] = Writes,
    blocks: int = 2,
) -> str:
    """The note on the error of a fit that runs out of memory."""
    torch.manual_seed(7)
    task, loader = kind(in_a_row(blocks, width=32), ADAMW), words(24, 4)
    trainer = trainer_on(accelerator, strategy, callbacks=[*callbacks], limit_val_batches=4)
    with pytest.raises(torch.OutOfMemoryError, match=r"testacc:. out of memory") as caught:
        trainer.fit(task, loader, loader)
    (note,) = caught.value.__notes__
    assert note.startswith("HetPipeStrategy: ")
    return str(note)


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_before_backward"])
def test_the_first_minibatch(hook: str, accelerator: TestAccelerator) -> None:
    note = note_of(planned(), accelerator, Fills(hook))
    assert "this was the first minibatch of a fit; before stages are decided" in note
    assert "take smaller batches, or give more devices, or ones with more memory" in note
    assert re.search(THERE, note)


def test_stages_that_are_set_up(accelerator: TestAccelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_hetpipe.run.fit.move_to_devices", Fills("hook").fill)
    note = note_of(planned(), accelerator)
    assert "the stages were being set up, with 3 versions of their weights each; stage 0 is to take" in note
    assert "1.0 GiB on testacc:3" in note
    assert LESS in note


@pytest.mark.parametrize("work", ["forward", "backward"])
def test_a_stage(work: str, accelerator: TestAccelerator) -> None:
    strategy = planned()
    strategy._before_pass = wants(2, work, 4)
    note = note_of(strategy, accelerator)
    assert f"stage 2 ran out of memory on testacc:2 in the {work} of minibatch 4 (layer" in note
    assert all(fragment in note for fragment in (*HELD, LESS)), note


def test_user_code_beside_stages(accelerator: TestAccelerator) -> None:
    note = note_of(planned(), accelerator, kind=Large)
    assert "memory ran out in user code or a step of Lightning's; stages held\n  stage 0 on testacc:0: " in note
    assert all(fragment in note for fragment in ("stage 3 on testacc:3: ", *HELD, LESS)), note


def test_an_evaluation(accelerator: TestAccelerator) -> None:
    note = note_of(planned(), accelerator, Fills("on_validation_start"))
    assert "this was an evaluation; take smaller batches in it" in note
    assert re.search(THERE, note)


def test_a_stage_of_an_evaluation(accelerator: TestAccelerator) -> None:
    strategy = planned()
    strategy._before_pass = wants(1, "evaluate", 3)
    note = note_of(strategy, accelerator)
    assert "stage 1 ran out of memory on testacc:1 while it evaluated batch 3 (layer" in note


def test_a_spread_run(accelerator: TestAccelerator) -> None:
    note = note_of(HetPipeStrategy(stages=4, in_flight=1), accelerator, Fills("on_train_batch_end"))
    assert "with one minibatch in flight a model is spread over its devices by the bytes of its weights" in note
    assert re.search(THERE, note)


def test_a_spread_run_with_a_plan(accelerator: TestAccelerator) -> None:
    torch.manual_seed(7)
    task, loader = Writes(in_a_row(2, width=32), ADAMW), words(24, 4)
    profile, _, _ = profiled(quiet_trainer(ProfilingStrategy()), task, train_dataloaders=loader)
    choice = best_plan(PlanningProblem(profile, cluster(*LARGE), optimizer="adamw", stages=DEVICES, spread=True), 1)
    plan = Plan.of(choice, profile.model, [layer.name for layer in profile.layers], cluster(*LARGE))
    note = note_of(HetPipeStrategy(plan=plan), accelerator, Fills("on_train_batch_end"))
    said = f"with all else; the plan has {in_bytes(choice.stages[-1].memory.total)} for it"
    assert f"stage 3 on {NAME}:3: " in note
    assert said in note


class HoldsHistory(Writes):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), max_iter=2)


def test_state_that_lies_on_one_device_alone(accelerator: TestAccelerator) -> None:
    """LBFGS keeps each direction of all weights as one vector."""
    spread = HetPipeStrategy(stages=4, in_flight=1)
    note = note_of(spread, accelerator, Fills("on_train_batch_end"), kind=HoldsHistory, blocks=4)
    assert re.search(r"stage 0 on testacc:0: .* 0 bytes of optimizer state", note)
    assert re.search(r"stage 3 on testacc:3: .* (MiB|KiB) of optimizer state", note)


def test_sparse_gradients_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sparse tensor has no ``nbytes``; that error was shown instead of the want of memory."""
    monkeypatch.setattr(memory, "accelerates", lambda device: True)  # GPUs have such tensors, and this CPU
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda device: 5000)
    module = nn.Embedding(100, 2, sparse=True)
    module(torch.tensor([3, 4])).sum().backward()
    note = memory.held(module, [], [torch.device("cpu")], {})
    bytes_ = 2 * 2 * 4 + 2 * 8  # values and indices of two rows
    assert f"800 bytes of weights, {bytes_} bytes of gradients, 0 bytes of optimizer state" in note


def test_a_capture_needs_no_room_for_weights_elsewhere(accelerator: TestAccelerator) -> None:
    one, other = (torch.device(NAME, index) for index in range(2))
    weight = nn.Linear(100, 100).to(other)
    set_limit(0, torch.accelerator.memory_allocated(0) + 1000)
    with on_one_device(weight, one):
        assert weight.weight.device == one
    assert weight.weight.device == other
