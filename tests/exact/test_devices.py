"""Stages on devices that differ, as far as a CPU can show it: "cpu" and "cpu:0" are the same memory by two names."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe.pipeline.user import parameter_view
from tests.exact.running import Record, assert_equal, assert_same_run, expect, fit
from tests.exact.test_captured import CASES, made
from tests.exact.test_direct import Penalty
from tests.oracle import Batch, Outputs
from tests.support.marks import slow_except
from tests.support.models import Learner, vectors
from tests.support.strategies import stashing


class Evaluates(Learner):
    """Validates with ``task``."""

    def __init__(self, task: Learner) -> None:
        super().__init__(task.recipe)
        self.task = task

    def compute(self, batch: Batch) -> Any:
        return self.task.compute(batch)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        assert not self.task.training
        self.log("val_loss", self.task.compute(batch)["loss"])


def two(in_flight: int) -> HetPipeStrategy:
    return stashing(stages=2, in_flight=in_flight, parallel_devices=[torch.device("cpu"), torch.device("cpu", 0)])


@pytest.mark.parametrize("inference_mode", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", slow_except(["resnet", "dropout", "translator", "pieces", "unet"], "unet"))
def test_captured_models_are_evaluated_where_their_layers_are(name: str, inference_mode: bool) -> None:
    def run(strategy: Any) -> tuple[Record, Tensor]:
        _, loader, _ = CASES[name]
        task = Evaluates(made(name))
        record = fit(task, loader, val_loader=loader, strategy=strategy, inference_mode=inference_mode)
        assert record.trainer is not None
        return record, record.trainer.callback_metrics["val_loss"]

    (plain, expected), (one, found) = run("auto"), run(two(1))
    assert torch.equal(expected, found) or name == "dropout"  # which trains on other random numbers
    if name != "dropout":
        assert_same_run(plain, one)
    assert_equal(expect(Evaluates(made(name)), CASES[name][1], 3), run(two(3))[0])


class AsksWhere(Penalty):
    """Its penalty makes a tensor beside each weight, and looks at each without a gradient first."""

    def compute(self, batch: Batch) -> Outputs:
        for weight in self.net.parameters():
            with torch.no_grad():
                assert torch.ones((), device=weight.device).add(weight.abs().max()).isfinite()
        return super().compute(batch)


def test_a_penalty_adds_weights_of_all_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """``sum(p.square().sum() for p in self.parameters())``: on two GPUs torch would refuse to add what lies on both."""
    seen: list[parameter_view.UsedParameter] = []
    check = parameter_view.UsedParameter.check

    def checked(leaf: parameter_view.UsedParameter) -> None:
        seen.append(leaf)
        check(leaf)

    monkeypatch.setattr(parameter_view.UsedParameter, "check", checked)
    task = AsksWhere()
    expected = expect(copy.deepcopy(task), vectors(40, 8), 3)
    assert_equal(expected, fit(task, vectors(40, 8), strategy=two(3)))
    assert seen
    # "cpu:0" is another device than "cpu", on which all copies are.
    assert all(leaf.seen.grad_fn is not None and leaf.copy.is_leaf for leaf in seen)
