"""Models that no single device could hold train, are evaluated and resumed on four, within the plan's bytes of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_hetpipe import Cluster, HetPipeStrategy
from lightning_hetpipe.placement.planner import Planner
from lightning_hetpipe.planning.model.cluster import Device, Node
from lightning_hetpipe.planning.model.estimate import Estimate
from tests.exact.running import expect
from tests.oracle import Batch, Outputs, State
from tests.support.accelerator import NAME, TestAccelerator, set_limit
from tests.support.captured_models import GPT, Bottleneck, Translator, Whole, Words
from tests.support.equality import assert_same
from tests.support.models import ADAMW, CLASSES, SGD, Learner, images, words
from tests.support.trainers import quiet_trainer

DEVICES = 4
SHARE = 3.2
"""What a model needs, as a multiple of what one device has."""

MARGIN = 1.1
"""What a device may hold, as a multiple of what its plan says."""


class Evaluated(Learner):
    """Validates, tests and predicts with the outputs of ``compute``."""

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("loss", self.compute(batch)["loss"])

    test_step = validation_step

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.compute(batch)["loss"]


class Writes(Words, Evaluated):
    pass


class Sees(Whole, Evaluated):
    pass


class Translates(Evaluated):
    def __init__(self) -> None:
        super().__init__(ADAMW)
        self.model = Translator(width=192, encoders=4)

    def compute(self, batch: Batch) -> Outputs:
        (ids,) = batch
        outputs = self.model(ids[:, ::2], target=ids[:, :-1], labels=ids[:, 1:])
        return {"loss": outputs["loss"], "logits": outputs["logits"].detach()}


class ResNet(nn.Module):
    """Activations weigh most at its beginning, weights at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 16, 3, padding=1)
        self.blocks = nn.ModuleList([Bottleneck(16, 16), Bottleneck(16, 32), Bottleneck(32, 64), Bottleneck(64, 96)])
        self.last = nn.Linear(96, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.last(F.relu(x).mean((-2, -1)))
        return y


def gpt() -> tuple[Learner, DataLoader[Any]]:
    torch.manual_seed(7)
    return Writes(GPT(blocks=9, width=96), ADAMW), words(20, 4)


def resnet() -> tuple[Learner, DataLoader[Any]]:
    torch.manual_seed(7)
    return Sees(ResNet(), SGD), images(40, 8)


def translator() -> tuple[Learner, DataLoader[Any]]:
    torch.manual_seed(7)
    return Translates(), words(20, 4)


MODELS = [gpt, resnet, translator]


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("HETPIPE_CACHE", str(tmp_path / "profiles"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[Estimate]:
    """The plans that were decided on, in order."""
    found: list[Estimate] = []
    decide = Planner._estimated

    def noting(planner: Planner, estimate: Estimate, *args: Any) -> Any:
        found.append(estimate)
        return decide(planner, estimate, *args)

    monkeypatch.setattr(Planner, "_estimated", noting)
    return found


def cluster(memory: int) -> Cluster:
    name = torch.get_device_module(NAME).get_device_name(0)
    return Cluster([Node("box", [Device(name, f"{memory / 2**20} MiB")] * DEVICES)])


def peaks() -> list[int]:
    return [torch.accelerator.max_memory_allocated(index) for index in range(DEVICES)]


def limit(each: int) -> None:
    for index in range(DEVICES):
        set_limit(index, each)
        torch.accelerator.reset_peak_memory_stats(index)


def trainer_on(accelerator: TestAccelerator, strategy: HetPipeStrategy, **settings: Any) -> L.Trainer:
    return quiet_trainer(strategy, accelerator=accelerator, devices=DEVICES, inference_mode=False, **settings)


@pytest.mark.parametrize("in_flight", [2, 4])
@pytest.mark.parametrize("make", MODELS)
def test_in_a_pipeline(
    make: Callable[[], tuple[Learner, DataLoader[Any]]],
    in_flight: int,
    planned: list[Estimate],
    accelerator: TestAccelerator,
    tmp_path: Path,
) -> None:
    task, loader = make()
    trainer_on(accelerator, HetPipeStrategy(stages=4, in_flight=in_flight, cluster=cluster(1 << 30))).fit(task, loader)
    room = int(sum(stage.memory.total for stage in planned[-1].stages) / SHARE)

    def strategy() -> HetPipeStrategy:
        return HetPipeStrategy(stages=4, in_flight=in_flight, cluster=cluster(room))

    task, loader = make()
    expected = expect(task, loader, in_flight, max_epochs=2)
    limit(int(MARGIN * room))
    trainer = trainer_on(accelerator, strategy())
    trainer.fit(task, loader, loader)
    said = {stage.slot.number: stage.memory.total for stage in planned[-1].stages}
    for index, peak in enumerate(peaks()):
        assert peak <= MARGIN * said[index], f"device {index} held {peak} bytes, and the plan says {said[index]}"
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    again, _ = make()
    resumed = trainer_on(accelerator, strategy(), max_epochs=2)
    resumed.fit(again, loader, loader, ckpt_path=str(tmp_path / "half.ckpt"))
    assert_same(expected.states[-1], State.of(again, resumed.optimizers[0]))
    found = [resumed.validate(again, loader, verbose=False), resumed.test(again, loader, verbose=False)]
    plain = quiet_trainer(inference_mode=False)
    assert found == [plain.validate(again, loader, verbose=False), plain.test(again, loader, verbose=False)]
    assert_same(plain.predict(again, loader), trainer_on(accelerator, strategy()).predict(again, loader))
    assert max(peaks()) <= MARGIN * room
