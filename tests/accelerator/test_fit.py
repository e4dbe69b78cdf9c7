"""Fits with stages on four devices equal the oracle, bit for bit, and so do validation, and a run that is resumed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import pytorch_optimizer
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_hetpipe.run.stage_steps import StageSteps
from tests.exact.pipelines import Pinned, even
from tests.exact.running import after, assert_equal, expect, fit
from tests.exact.test_captured import CASES, made
from tests.exact.test_devices import Evaluates
from tests.exact.test_sums import Programmed, Several
from tests.oracle import Recipe
from tests.support.accelerator import TestAccelerator
from tests.support.marks import slow_except
from tests.support.models import ADAMW, mlp, sentences, tied_language_model, vectors, whole_batches
from tests.support.trainers import quiet_trainer

NAMES = ["resnet", "gpt", "dropout", "translator", "pieces"]
GRID = [(name, in_flight) for name in NAMES for in_flight in (1, 2, 4)]


@pytest.mark.parametrize(("name", "in_flight"), slow_except(GRID, *[(name, 4) for name in NAMES], ("gpt", 1)))
def test_four_devices(accelerator: TestAccelerator, name: str, in_flight: int) -> None:
    _, loader, layers = CASES[name]
    if name != "resnet":
        loader = whole_batches(loader)
    strategy = even(layers, 4, in_flight)
    record = fit(made(name), loader, strategy=strategy, accelerator=accelerator, devices=4)
    assert_equal(expect(made(name), loader, in_flight), record)


def test_gradients_are_added_in_order_across_devices(accelerator: TestAccelerator) -> None:
    """User code's backward crosses devices twice; autograd's threads of each would add in order of arrival."""

    def step(task: Programmed, h: Tensor) -> Any:
        y = task.pieces[0](h)
        slope: Any = torch.autograd.grad((h.sin() * h).sum(), h, create_graph=True)  # torch has no types here
        return y * h + slope[0].square()

    task, loader = Programmed(step, Several(2)), vectors(20, 4)
    expected = expect(copy.deepcopy(task), loader, 3)
    assert_equal(expected, fit(task, loader, strategy=Pinned((0, 1), 3), accelerator=accelerator, devices=2))


SOAP = Recipe(lambda model: pytorch_optimizer.SOAP(model.parameters(), lr=0.01, precondition_frequency=2))


@pytest.mark.parametrize(("make", "recipe"), [(mlp, ADAMW), (mlp, SOAP), (tied_language_model, ADAMW)])
def test_stages_step_their_own_weights(
    make: Any, recipe: Recipe, accelerator: TestAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the streams of the stages: the accelerator refuses a step without the waits before and after it."""
    monkeypatch.setattr(StageSteps, "divides", lambda self: self._steps > 1)  # states are from whole steps
    task, loader = make(recipe), (vectors if make is mlp else sentences)(24, 4)
    layers = len(list(task.net.children()))
    expected = expect(task, loader, 3)
    assert_equal(expected, fit(task, loader, strategy=even(layers, 4, 3), accelerator=accelerator, devices=4))


def val_loss(task: Evaluates, loader: DataLoader[object]) -> object:
    """Lightning's own validation of ``task``, on the CPU."""
    (found,) = quiet_trainer().validate(task, loader, verbose=False)
    return found["val_loss"]


@pytest.mark.parametrize(
    ("name", "in_flight"), slow_except([case for case in GRID if case[1] != 4], ("resnet", 2), ("gpt", 1), ("gpt", 2))
)
def test_a_run_is_validated_saved_and_resumed(
    accelerator: TestAccelerator, tmp_path: Path, name: str, in_flight: int
) -> None:
    _, loader, layers = CASES[name]
    loader = whole_batches(loader)
    length = len(loader)
    task, fresh = Evaluates(made(name)), Evaluates(made(name))
    expected = expect(task, loader, in_flight, max_epochs=3, restarts={2 * length})
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.zero_()
    saver = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_epochs=1)
    strategy = even(layers, 4, in_flight)
    on: dict[str, Any] = {"accelerator": accelerator, "devices": 4, "val_loader": loader}
    first = fit(Evaluates(made(name)), loader, [saver], strategy=strategy, enable_checkpointing=True, **on)
    second = fit(
        fresh, loader, strategy=even(layers, 3, in_flight), max_epochs=3, ckpt_path=saver.best_model_path, **on
    )
    assert_equal(after(expected, 2 * length), second)
    for record, step in ((first, 2 * length), (second, 3 * length)):
        task.load_state_dict({**expected.states[step].weights, **expected.states[step].buffers}, strict=False)
        assert record.trainer is not None
        assert record.trainer.callback_metrics["val_loss"].item() == val_loss(task, loader)
