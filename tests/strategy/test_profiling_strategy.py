"""A model is profiled through its first minibatch, pieces and graphs as they are in training, and stays as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_hetpipe import Cluster, HetPipeStrategy, Node
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.placement import measuring
from lightning_hetpipe.placement.measuring import optimizer_name
from lightning_hetpipe.planning.model.profile import Profile
from lightning_hetpipe.planning.plan.profile_file import ProfileCache
from lightning_hetpipe.strategy.profiling_strategy import ProfilingStrategy, profile
from tests.support.small import Learner, batches
from tests.support.trainers import quiet_trainer


class Blocks(nn.Module):
    """No Sequential, so that its graph is captured."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, width), nn.Linear(width, 3)
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x).tanh() * self.factor)
        return y


def profiled(model: L.LightningModule, cache: ProfileCache | None = None, **settings: Any) -> Profile:
    trainer = quiet_trainer(ProfilingStrategy(cache, **settings))
    return profile(trainer, model, train_dataloaders=batches(3)).profile


def test_layers_and_times() -> None:
    model = Learner()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = profiled(model)
    assert found.model == "Learner"
    assert list(found.times) == ["cpu"]
    assert [layer.parameters for layer in found.layers] == [
        sum(parameter.nbytes for parameter in layer.parameters()) for layer in model.net.children()
    ]
    assert all(times.forward > 0 for times in found.times["cpu"])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_what_was_measured_once_is_not_measured_again(tmp_path: Path) -> None:
    """Until the model, or what its graphs compute, is another one."""
    cache = ProfileCache(tmp_path)
    blocks = Blocks(4)
    found = profiled(Learner(net=blocks), cache)
    assert profiled(Learner(net=Blocks(4)), cache) == found
    assert len(list(tmp_path.iterdir())) == 1
    assert profiled(Learner(net=Blocks(5)), cache) != found
    blocks.factor = 2.0
    assert profiled(Learner(net=blocks), cache) != found
    assert len(list(tmp_path.iterdir())) == 3


def test_the_speed_of_a_device_is_measured_for_plans_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fit has times of all of its devices, and no room to spare for a measurement that it does not need."""
    monkeypatch.setenv("HETPIPE_CACHE", str(tmp_path))
    asked: list[torch.device] = []

    def speed(device: torch.device) -> float:
        asked.append(device)
        return 1e10 + len(asked)

    monkeypatch.setattr(measuring, "measured_speed", speed)
    emulating = HetPipeStrategy(cluster=Cluster([Node("box", ["RTX-3090", "T4"])]), weights="stash")
    quiet_trainer(emulating, max_steps=1).fit(Learner(), batches(3))
    assert emulating.last_run.emulated
    assert not asked
    found = profiled(Learner(), ProfileCache())
    assert found.speeds == {"cpu": 1e10 + 1}
    assert profiled(Learner(), ProfileCache()) == found
    assert asked == [torch.device("cpu")]


class AdamW(torch.optim.AdamW):
    """Its step is its own, so that a run does not predict by AdamW's state."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize(("kind", "policies"), [(torch.optim.AdamW, ["xpipe", "stash"]), (AdamW, ["stash"])])
def test_weight_policies_are_those_that_a_run_chooses(kind: Any, policies: list[str]) -> None:
    """By its name in the memory model, which both share, it was planned with what AdamW predicts."""

    class Model(Learner):
        def configure_optimizers(self) -> Any:
            return kind(self.parameters())

    found = profile(quiet_trainer(ProfilingStrategy()), Model(), train_dataloaders=batches(3))
    assert found.optimizer == "adamw"
    assert [policy.name for policy in found.policies] == policies


def test_without_a_minibatch() -> None:
    with pytest.raises(SettingError, match="Learner has no minibatch to train on, so that nothing can be measured"):
        profile(quiet_trainer(ProfilingStrategy()), Learner(), train_dataloaders=[])


def test_with_another_strategy() -> None:
    with pytest.raises(SettingError, match=r"the Trainer's strategy is a .*; give it a ProfilingStrategy"):
        profile(quiet_trainer("hetpipe"), Learner(), train_dataloaders=batches(3))


@pytest.mark.parametrize(
    ("kind", "options", "name"),
    [
        (torch.optim.SGD, {"lr": 0.1}, "sgd"),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, "sgd_momentum"),
        (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}, "sgd_weight_decay"),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}, "sgd_momentum_weight_decay"),
        (torch.optim.AdamW, {}, "adamw"),
        (torch.optim.Adam, {"amsgrad": True}, "amsgrad"),
        (torch.optim.RMSprop, {"momentum": 0.9}, "rmsprop_momentum"),
        (torch.optim.LBFGS, {}, None),
    ],
)
def test_the_optimizers_name_in_the_memory_model(kind: Any, options: dict[str, Any], name: str | None) -> None:
    assert optimizer_name(kind(nn.Linear(1, 1).parameters(), **options)) == name
