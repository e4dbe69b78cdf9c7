"""Models that are too large for one device, and what a pipeline of such a model is checked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_hetpipe.capture.profiling import Microbenchmark
from lightning_hetpipe.planning.model.estimate import Estimate
from lightning_hetpipe.planning.model.profile import Times
from tests.accelerator.four_devices import DEVICES, LARGE, SHARE, cluster, limit, trainer_on
from tests.exact.running import expect
from tests.oracle import Batch, Outputs, State
from tests.support.accelerator import TestAccelerator
from tests.support.captured_models import GPT, Bottleneck, CrossBlock, Whole, Words
from tests.support.equality import assert_same
from tests.support.models import ADAMW, CLASSES, SGD, WORDS, Learner, images, words
from tests.support.strategies import stashing
from tests.support.trainers import quiet_trainer


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


class Decoder(nn.Module):
    """Reads an encoder's output in each of six layers, as translators do."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        layers = [nn.TransformerEncoderLayer(width, 2, 2 * width, 0.0, batch_first=True) for _ in range(6)]
        self.encoder = nn.ModuleList(layers)
        self.decoder = nn.ModuleList([CrossBlock(width) for _ in range(6)])
        self.head = nn.Linear(width, WORDS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, x = self.words(source), self.words(target)
        for layer in self.encoder:
            memory = layer(memory)
        for block in self.decoder:
            x = block(x, memory)
        y: Tensor = self.head(x)
        return y


class Translates(Evaluated):
    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__(ADAMW)
        self.model = model or Decoder()

    def compute(self, batch: Batch) -> Outputs:
        (ids,) = batch
        logits = self.model(ids, ids[:, :-1])
        return {"loss": F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()), "logits": logits.detach()}


class ResNet(nn.Module):
    """Activations weigh most at its beginning, weights at its end."""

    def __init__(self, widths: Sequence[int] = (16, 16, 24, 24, 32)) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, widths[0], 3, padding=1)
        self.blocks = nn.ModuleList([Bottleneck(one, other) for one, other in pairwise(widths)])
        self.last = nn.Linear(widths[-1], CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.last(x.mean((-2, -1)))
        return y


def in_a_row(blocks: int, width: int) -> nn.Sequential:
    """A language model of torch's own layers, which needs no capture: three of them for each block."""
    layers = [
        layer for _ in range(blocks) for layer in (nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
    ]
    return nn.Sequential(nn.Embedding(WORDS, width), *layers, nn.LayerNorm(width), nn.Linear(width, WORDS))


def gpt() -> tuple[Learner, DataLoader[Any]]:
    torch.manual_seed(7)
    return Writes(GPT(blocks=8, width=96), ADAMW), words(40, 8)


def resnet() -> tuple[Learner, DataLoader[Any]]:
    torch.manual_seed(7)
    return Sees(ResNet(), SGD), images(40, 8)


def deep_resnet() -> tuple[Learner, DataLoader[Any]]:
    """A network with many blocks and few weights, and batches whose activations weigh most."""
    torch.manual_seed(7)
    widths = [16, 16, 16, 16, 16, 24, 24, 24, 24, 32, 32, 32, 32]
    return Sees(ResNet(widths), SGD), images(120, 60)


def translator() -> tuple[Learner, DataLoader[Any]]:
    torch.manual_seed(7)
    return Translates(), words(40, 8)


def times_by_weights(benchmark: Microbenchmark, *_: object) -> Times:
    """Return the same seconds for each weight of a layer. Measured seconds may make uneven stages."""
    seconds = 1e-7 * sum(weight.numel() for weight in benchmark.scratch.parameters())
    return Times(seconds, 2 * seconds)


def check_pipeline(
    make: Callable[[], tuple[Learner, DataLoader[Any]]],
    in_flight: int,
    planned: list[Estimate],
    accelerator: TestAccelerator,
    folder: Path,
    devices: int = DEVICES,
    share: float = SHARE,
) -> None:
    """It trains on so many devices as the oracle says, is saved, resumed, validated, tested and predicted with.

    Args:
        share: Bytes that the model needs, as a multiple of those of a device.
    """
    task, loader = make()
    trainer_on(accelerator, stashing(stages=devices, in_flight=in_flight, cluster=cluster(*LARGE))).fit(task, loader)
    room = int(sum(stage.memory.total for stage in planned[-1].stages) / share)

    def trainer(**settings: Any) -> L.Trainer:
        declared = cluster(*[room] * devices, *[1 << 20] * (DEVICES - devices))
        return trainer_on(accelerator, stashing(stages=devices, in_flight=in_flight, cluster=declared), **settings)

    task, loader = make()
    expected = expect(task, loader, in_flight, max_epochs=2)
    limit(*[room] * devices)
    first = trainer()
    first.fit(task, loader)
    first.save_checkpoint(folder / "half.ckpt")
    again, _ = make()
    resumed = trainer(max_epochs=2)
    resumed.fit(again, loader, loader, ckpt_path=str(folder / "half.ckpt"))
    assert_same(expected.states[-1], State.of(again, resumed.optimizers[0]))
    found = [resumed.validate(again, loader, verbose=False), resumed.test(again, loader, verbose=False)]
    plain = quiet_trainer()
    assert found == [plain.validate(again, loader, verbose=False), plain.test(again, loader, verbose=False)]
    assert_same(plain.predict(again, loader), trainer().predict(again, loader))
