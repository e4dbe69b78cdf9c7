"""Lightning's own callbacks that change weights, or what is trained."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, EMAWeightAveraging, StochasticWeightAveraging
from torch import nn

from tests.exact.pipelines import Pinned, even
from tests.exact.running import Record, assert_equal, assert_same_run, expect, fit
from tests.oracle import Batch, Outputs, State
from tests.support.equality import assert_same
from tests.support.marks import fewer, quick
from tests.support.models import ADAMW, CLASSES, Task, convnet, images, mlp, resnet, vectors

NM = [1, 4]


@quick("4")
@pytest.mark.parametrize("in_flight", NM)
def test_averaged_weights(in_flight: int) -> None:
    """Evaluations swap the average in and out, and training does not notice; the average is what is left."""
    task, loader = convnet(ADAMW), images(18, 4)
    expected = expect(task, loader, in_flight)
    averaging = EMAWeightAveraging(decay=0.5)
    record = fit(
        task, loader, [averaging], val_loader=images(8, 4), strategy=even(9, 3, in_flight), val_check_interval=3
    )
    left, record.end = record.end, expected.states[-1]  # fit leaves the average in the model
    assert_equal(expected, record)
    average = expected.states[1].weights
    for state in expected.states[2:]:
        average = {name: 0.5 * average[name] + 0.5 * weight for name, weight in state.weights.items()}
    assert left is not None
    assert_same(average, left.weights, "average")


def pair(make: Any, loader: Any, callbacks: Any, strategy: Any, **settings: Any) -> tuple[Record, Record]:
    """The plain Trainer's run and the pipeline's."""
    runs = []
    for chosen in ("auto", strategy):
        torch.manual_seed(5)
        runs.append(fit(make(), loader(), callbacks(), strategy=chosen, **settings))
    return runs[0], runs[1]


@pytest.mark.slow
def test_stochastic_weight_averaging_is_the_plain_trainers() -> None:
    def callbacks() -> list[L.Callback]:
        return [StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=1, annealing_epochs=1)]

    plain, ours = pair(lambda: mlp(ADAMW), lambda: vectors(18, 4), callbacks, even(7, 3, 1), max_epochs=4)
    assert_same_run(plain, ours)


@pytest.mark.slow
@pytest.mark.parametrize("in_flight", [2, 4])
def test_stochastic_weight_averaging_on_any_cut(in_flight: int) -> None:
    def run(stages: int) -> Record:
        torch.manual_seed(5)
        averaging = StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=1, annealing_epochs=1)
        strategy = even(7, stages, in_flight)
        return fit(mlp(ADAMW), vectors(18, 4), [averaging], strategy=strategy, max_epochs=4)

    assert_same_run(run(1), run(3))


class Finetuned(L.LightningModule):
    """A backbone that starts frozen, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, CLASSES))

    def compute(self, batch: Batch) -> Outputs:
        x, y = batch
        return {"loss": nn.functional.cross_entropy(self.head(self.backbone(x)), y)}

    def training_step(self, batch: Batch, batch_idx: int) -> Outputs:
        return self.compute(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([w for w in self.parameters() if w.requires_grad], lr=0.1, momentum=0.9)


def finetuning() -> list[L.Callback]:
    return [BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.01, train_bn=False)]


def test_a_backbone_that_is_unfrozen_is_the_plain_trainers() -> None:
    plain, ours = pair(Finetuned, lambda: vectors(18, 4), finetuning, Pinned((0, 3, 6), 1))
    assert_same_run(plain, ours)
    moved: list[State] = [plain.states[0], plain.states[-1]]
    name = "backbone.0.weight"
    assert not torch.equal(moved[0].weights[name], moved[1].weights[name])


def test_a_backbone_that_is_unfrozen_on_any_cut() -> None:
    def run(cuts: tuple[int, ...]) -> Record:
        torch.manual_seed(5)
        return fit(Finetuned(), vectors(18, 4), finetuning(), strategy=Pinned(cuts, 4))

    one = run((0,))
    for cuts in fewer([(0, 3, 6), (0, 5), (0, 1, 2, 7)], [(0, 1, 2, 7)]):
        assert_same_run(one, run(cuts))


def test_a_task_is_left_as_a_plain_one() -> None:
    """After the run the module works without a strategy: no hooks, no replaced forwards, no foreign buffers."""
    task: Task = resnet(ADAMW)
    before = {name: sorted(vars(module)) for name, module in task.net.named_modules()}
    fit(task, images(20, 4), strategy=even(9, 3, 4))
    assert {name: sorted(vars(module)) for name, module in task.net.named_modules()} == before
    for module in task.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
