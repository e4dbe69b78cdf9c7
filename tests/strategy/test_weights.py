"""Weights and states of optimizers go from the host to the devices that hold them, and through no other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe.pipeline.stage import Layer
from lightning_hetpipe.placement.decision import Decision
from lightning_hetpipe.placement.layout import Layout, move_to_devices
from tests.support.accelerator import NAME, TestAccelerator, set_limit
from tests.support.equality import assert_same
from tests.support.models import labelled
from tests.support.trainers import quiet_trainer

WIDTH = 256
LAYER = WIDTH * WIDTH * 4
"""Bytes of the weights of each of four layers."""

OPTIMIZERS: dict[str, tuple[Callable[..., Any], int]] = {
    "adamw": (torch.optim.AdamW, 2),
    "adagrad": (torch.optim.Adagrad, 1),  # makes its state where it is made
    "sgd": (lambda parameters, lr: torch.optim.SGD(parameters, lr, momentum=0.9), 1),
}
"""Optimizers, with the number of their states of each parameter."""


class Stack(L.LightningModule):
    """Notes the bytes of each device when training begins."""

    def __init__(self, optimizer: Callable[..., Any]) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))
        self.optimizer = optimizer

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), lr=0.01)

    def on_train_start(self) -> None:
        if self.device.type != "cpu":
            self.peaks = [torch.accelerator.max_memory_allocated(index) for index in range(4)]
            self.states = [
                (parameter.device, [t.device for name, t in state.items() if name != "step"])
                for parameter, state in self.trainer.optimizers[0].state.items()
            ]


def left() -> list[int]:
    """Bytes that earlier tests have left on the devices, in the frames of errors that somebody still holds."""
    return [torch.accelerator.memory_allocated(index) for index in range(4)]


def loader() -> Any:
    return labelled(8, 4, WIDTH, classes=2)


@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_device_ever_holds_more_than_its_own(
    accelerator: TestAccelerator, tmp_path: Path, name: str, empty: bool, resumes: bool
) -> None:
    (optimizer, copies), before = OPTIMIZERS[name], left()
    path, settings = tmp_path / "it.ckpt", {"max_epochs": 2 if resumes else 1}
    plain, trainer = Stack(optimizer), quiet_trainer()
    if resumes:
        trainer.fit(plain, loader())
        trainer.save_checkpoint(path)
        trainer = quiet_trainer(**settings)
        trainer.fit(plain, loader(), ckpt_path=path)
    trainer = quiet_trainer(HetPipeStrategy(stages=4, in_flight=1), accelerator=accelerator, devices=4, **settings)
    with trainer.init_module(empty_init=empty):
        module = Stack(optimizer)
    trainer.fit(module, loader(), ckpt_path=path if resumes else None)
    has_states = resumes or name == "adagrad"
    taken = [peak - bytes_before for peak, bytes_before in zip(module.peaks, before, strict=True)]
    assert max(taken) <= (1 + has_states * copies) * LAYER + 64
    assert len({device for device, _ in module.states}) == (4 if has_states else 0)
    for device, states in module.states:
        assert set(states) == {device}
    if resumes:
        assert_same(dict(plain.state_dict()), dict(module.state_dict()))


def test_a_pipeline_resumes_as_on_the_host(accelerator: TestAccelerator, tmp_path: Path) -> None:
    """With two minibatches in flight, after layers have gone from provisional stages to those that were decided."""

    def run(resumes: bool, **devices: Any) -> Stack:
        trainer = quiet_trainer(HetPipeStrategy(stages=4, in_flight=2), max_epochs=1 + resumes, **devices)
        with trainer.init_module(empty_init=True):
            module = Stack(partial(torch.optim.AdamW, foreach=False))
        trainer.fit(module, loader(), ckpt_path=tmp_path / "it.ckpt" if resumes else None)
        trainer.save_checkpoint(tmp_path / "it.ckpt")
        return module

    run(False)
    saved = (tmp_path / "it.ckpt").read_bytes()
    expected = run(True)
    (tmp_path / "it.ckpt").write_bytes(saved)
    assert_same(dict(expected.state_dict()), dict(run(True, accelerator=accelerator, devices=4).state_dict()))


def test_states_leave_before_others_come(accelerator: TestAccelerator) -> None:
    """Layers go to other devices after the first minibatch; none ever holds more than before or after."""
    devices, before = [torch.device(NAME, index) for index in range(4)], left()
    net = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False, device=device) for device in devices)
    optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
    for parameter in net.parameters():
        optimizer.state[parameter] = {
            "step": torch.ones(()), "exp_avg": torch.ones_like(parameter), "exp_avg_sq": torch.ones_like(parameter)
        }  # fmt: skip
    for index in range(4):
        set_limit(index, before[index] + 3 * LAYER + 64)
    order = [2, 3, 0, 1]
    decision = Decision((0, 1, 2, 3), [devices[index] for index in order], 2, [0.0] * 4)
    move_to_devices(Layout([Layer(f"net.{index}", net[index]) for index in range(4)], decision), net, optimizer)
    for index, parameter in zip(order, net.parameters(), strict=True):
        assert {name: state.device.index for name, state in optimizer.state[parameter].items()} == {
            "step": None, "exp_avg": index, "exp_avg_sq": index
        }  # fmt: skip
