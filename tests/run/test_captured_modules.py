"""Modules captured in an unusual way train as they would without us."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning, StochasticWeightAveraging
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe.errors import SettingError
from tests.support.equality import assert_same
from tests.support.small import Learner, batches, pipeline
from tests.support.trainers import quiet_trainer


class Frozen(Learner):
    """A backbone of its own, frozen at first."""

    def __init__(self) -> None:
        super().__init__(through_backbone)
        self.backbone = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


def through_backbone(module: Any, x: Tensor, y: Tensor, batch_idx: int) -> Any:
    return F.cross_entropy(module.net(module.backbone(x)), y)


class Unfreezes(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone, train_bn=False)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, lr=0.05)


def backbone_finetuning() -> BaseFinetuning:
    return BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.05, train_bn=False)


def trained(make: Callable[[], Any], strategy: Any, **settings: Any) -> Any:
    torch.manual_seed(3)
    module = make()
    quiet_trainer(strategy, **settings).fit(module, batches())
    return module


def assert_equal_states(module: nn.Module, other: nn.Module) -> None:
    assert_same(other.state_dict(), module.state_dict())


@pytest.mark.parametrize("callback", [Unfreezes, backbone_finetuning])
def test_a_backbone_that_is_unfrozen_later(callback: Callable[[], BaseFinetuning]) -> None:
    plain = trained(Frozen, "auto", callbacks=[callback()], max_epochs=3)
    strategy = pipeline(1)
    module = trained(Frozen, strategy, callbacks=[callback()], max_epochs=3)
    assert_equal_states(module, plain)
    assert "backbone.0" in [layer for stage in strategy.last_run.stages for layer in stage.layers]
    torch.manual_seed(3)
    assert not torch.equal(module.get_parameter("backbone.0.weight"), Frozen().get_parameter("backbone.0.weight"))


class Normalised(Learner):
    """No ``nn.Sequential``."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Normalises()


class Normalises(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.norm(self.first(x)).relu())
        return y


def test_weight_averaging_of_captured_batchnorm() -> None:
    """The error advised to use torch.where."""

    def averaged(strategy: Any) -> Any:
        return trained(Normalised, strategy, callbacks=[StochasticWeightAveraging(0.01, 1, 1)], max_epochs=3)

    with pytest.raises(SettingError, match=r"'net.norm' is a BatchNorm1d with momentum=None, .* set in_flight=1"):
        averaged(pipeline(2))
    assert_equal_states(averaged(HetPipeStrategy(stages=1, in_flight=1)), averaged("auto"))


def test_such_a_backbone_with_minibatches_in_flight() -> None:
    first, second = (trained(Frozen, pipeline(3), callbacks=[Unfreezes()], max_epochs=3) for _ in range(2))
    assert_equal_states(first, second)


def test_a_named_backbone_that_a_callback_of_the_users_own_unfreezes() -> None:
    class Own(L.Callback):
        def on_train_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
            pl_module.backbone.requires_grad_(trainer.current_epoch > 0)

    class All(Frozen):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    plain = trained(All, "auto", callbacks=[Own()], max_epochs=3)
    strategy = HetPipeStrategy(stages=2, in_flight=1, module=["backbone", "net"])
    assert_equal_states(trained(All, strategy, callbacks=[Own()], max_epochs=3), plain)


def by_name(module: Any, x: Tensor, y: Tensor, batch_idx: int) -> Any:
    return F.cross_entropy(module.net(input=x), y)


@pytest.mark.parametrize("in_flight", [1, 3])
def test_the_input_by_name(in_flight: int) -> None:
    named = trained(lambda: Learner(by_name), pipeline(in_flight))
    assert_equal_states(named, trained(Learner, pipeline(in_flight)))


class Copies(L.Callback):
    def __init__(self) -> None:
        self.copies: list[Any] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        self.copies.append(copy.deepcopy(pl_module))


def test_a_copy_made_during_fit_can_be_fitted() -> None:
    copies = Copies()
    trained(Learner, pipeline(3), callbacks=[copies])
    for copied in copies.copies[0], copies.copies[-1]:
        plain = copy.deepcopy(copied)
        quiet_trainer(pipeline(1)).fit(copied, batches())
        quiet_trainer("auto").fit(plain, batches())
        assert_equal_states(copied, plain)


def view_first() -> nn.Sequential:
    """A view, then an in-place change behind the first new tensor, at every place of a cut."""
    return nn.Sequential(nn.Linear(6, 8), nn.Flatten(), nn.ReLU(inplace=True), nn.Linear(8, 3))


@pytest.mark.parametrize("cuts", [(0, 1), (0, 2), (0, 3)])
def test_in_place_changes_through_a_view(cuts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = pipeline(1)
    monkeypatch.setattr(strategy._devices, "choose_split_points", lambda times, stages: cuts)

    def make() -> Learner:
        return Learner(net=view_first())

    assert_equal_states(trained(make, strategy), trained(make, "auto"))


def test_a_sequential_compiled_in_place() -> None:
    def compiled() -> Learner:
        module = Learner()
        module.net.compile(backend="eager")
        return module

    assert_equal_states(trained(compiled, pipeline(1)), trained(Learner, "auto"))
