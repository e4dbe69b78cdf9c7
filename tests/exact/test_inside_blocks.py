"""Stages that begin inside of the blocks of an ``nn.Sequential`` train as the oracle says, bit for bit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, ClassVar, cast

import pytest
import torch
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging
from torch import Tensor, nn

from lightning_hetpipe.demo.models import ResNet
from tests.evaluation.evaluating import Evaluates, evaluated, pipeline
from tests.exact.pipelines import Pinned, delayed, even
from tests.exact.running import assert_equal, assert_same_run, expect, fit
from tests.support.captured_models import Bottleneck
from tests.support.equality import assert_same
from tests.support.marks import quick, slow_except
from tests.support.models import ADAMW, CLASSES, SGD, WORDS, Attention, Task, images, sentences, vectors
from tests.support.models import Words as Embedding
from tests.support.strategies import stashing

RESNET = ["net.0", "net.1", "net.3.conv1", "net.3.bn1", "net.3.conv2", "net.3.bn2", "net.4"]
RESNET += ["net.5.downsample", "net.5.conv1", "net.5.bn1", "net.5.conv2", "net.5.bn2", "net.6", "net.7", "net.8"]


def resnet() -> Task:
    """BatchNorm, in-place ReLUs and dropout around and inside of blocks, of which one widens its input."""
    torch.manual_seed(7)
    layers = [nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), Bottleneck(4, 4)]
    layers += [nn.Dropout(0.2), Bottleneck(4, 6), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, CLASSES)]
    return Task(nn.Sequential(*layers), ADAMW)


class Block(nn.Module):
    """A transformer's block, normalised first, with dropout on both branches and a scale of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((width,), 0.9))
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(width), Attention(width), nn.LayerNorm(width)
        self.think = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        x = x + self.dropout(self.attention(self.norm1(x)))
        y: Tensor = x + self.dropout(self.think(self.norm2(x))) * self.scale
        return y


BLOCK = ["norm1", "attention", "norm2", "think.0", "think.2"]
TRANSFORMER = ["net.0", *(f"net.{block}.{part}" for block in (1, 2) for part in BLOCK), "net.3"]


def transformer() -> Task:
    torch.manual_seed(7)
    return Task(nn.Sequential(Embedding(8), Block(8), Block(8), nn.Linear(8, WORDS)), ADAMW)


CASES: dict[str, tuple[Callable[[], Task], Any, list[str]]] = {
    "resnet": (resnet, images(16, 4), RESNET),
    "transformer": (transformer, sentences(16, 4), TRANSFORMER),
}
UNEVEN = {"resnet": images(14, 4), "transformer": sentences(14, 4)}


@quick("resnet-4-3", "resnet-2-15", "transformer-1-5", "transformer-2-12")
@pytest.mark.parametrize("stages", [1, 3, 5, 12, 15])
@pytest.mark.parametrize("in_flight", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_the_oracles_bits(name: str, in_flight: int, stages: int) -> None:
    """With batches of two sizes, except with two in flight, and as many stages as layers at the most."""
    make, loader, layers = CASES[name]
    loader = loader if in_flight == 2 else UNEVEN[name]
    strategy = even(len(layers), min(stages, len(layers)), in_flight)
    task = make()
    expected = expect(make(), loader, in_flight, stages=stages)
    assert_equal(expected, fit(task, loader, strategy=strategy))
    if stages > 1 or in_flight > 1:
        assert [layer for stage in strategy.last_run.stages for layer in stage.layers] == layers


class Basic(nn.Module):
    """A block of torchvision's ResNet-18: one ReLU for both of its convolutions."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.downsample: nn.Sequential | None = None
        if stride > 1:
            self.downsample = nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        kept = x if self.downsample is None else self.downsample(x)
        y: Tensor = self.relu(self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x))))) + kept)
        return y


class OfTorchvision(nn.Module):
    """A ResNet-18 with two of its four groups of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu = nn.Conv2d(1, 4, 7, 2, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(Basic(4, 4, 1), Basic(4, 4, 1))
        self.layer2 = nn.Sequential(Basic(4, 8, 2), Basic(8, 8, 1))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(self.layer1(self.relu(self.bn1(self.conv1(x)))))
        y: Tensor = self.fc(self.avgpool(x).flatten(1))
        return y


@pytest.mark.parametrize(
    ("make", "blocks", "parts"),
    [
        (
            lambda: ResNet(width=4, blocks=2, classes=CLASSES).net,
            ["net.3", "net.4"],
            ["body.0", "body.1", "body.3", "body.4"],
        ),
        (OfTorchvision, ["net.layer1.0", "net.layer1.1", "net.layer2.1"], ["conv1", "bn1", "conv2", "bn2"]),
    ],
)
def test_a_stage_can_begin_at_each_operation_of_a_residual_block(
    make: Callable[[], nn.Module], blocks: list[str], parts: list[str]
) -> None:
    """With whole blocks, two stages of the demo's ResNet were 1.65 to 1.71 times as fast as one at most."""
    torch.manual_seed(7)
    task, strategy = Task(cast(Any, make()), ADAMW), stashing(stages=2, in_flight=2)
    fit(task, images(8, 4), strategy=strategy, max_epochs=1)
    layers = [layer for stage in strategy.last_run.stages for layer in stage.layers]
    assert not {f"{block}.{part}" for block in blocks for part in parts}.difference(layers)


@quick("resnet-7", "transformer-3")
@pytest.mark.parametrize("cut", range(1, 12))
@pytest.mark.parametrize("name", CASES)
def test_any_cut_and_any_timing(name: str, cut: int) -> None:
    make, loader, _ = CASES[name]
    expected = expect(make(), loader, 3, max_epochs=1)
    assert_equal(expected, fit(make(), loader, strategy=delayed(Pinned((0, cut), 3), cut), max_epochs=1))


@pytest.mark.parametrize("name", slow_except(CASES, "transformer"))
def test_recomputing(name: str) -> None:
    make, loader, layers = CASES[name]
    strategy = even(len(layers), 4, 3, recompute=True)
    assert_equal(expect(make(), loader, 3), fit(make(), loader, strategy=strategy))


@pytest.mark.parametrize("name", slow_except(CASES, "resnet"))
def test_evaluation(name: str) -> None:
    """Outside of a fit, where the first batch shows the layers."""
    make, loader, _ = CASES[name]
    expected = evaluated(Evaluates(make()), loader, "auto")
    assert_same(expected, evaluated(Evaluates(make()), loader, pipeline(3, 4)))


def test_evaluation_within_a_fit() -> None:
    make, loader, layers = CASES["resnet"]
    expected = expect(make(), loader, 3)
    assert_equal(expected, fit(make(), loader, strategy=even(len(layers), 4, 3), val_loader=loader))


class Noting(nn.Module):
    """Notes the threads that run its code."""

    threads: ClassVar[set[str]] = set()  # copies of the module note theirs here, too

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        Noting.threads.add(threading.current_thread().name)
        y: Tensor = x + self.two(torch.tanh(self.one(x)))
        return y


class Decides(Noting):
    """Has no graph, as it decides by its data."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(-x if x.isnan().any() else x)


def small(block: type[nn.Module]) -> Task:
    torch.manual_seed(7)
    return Task(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), block(), block(), nn.Linear(8, CLASSES)), SGD)


def run(block: type[nn.Module], caplog: pytest.LogCaptureFixture, *callbacks: Any, **settings: Any) -> tuple[Any, Any]:
    """The record of a fit, and what its strategy tells of it."""
    strategy = stashing(stages=2, in_flight=3)
    with caplog.at_level("INFO", "lightning.pytorch"):
        record = fit(small(block), vectors(20, 4), callbacks, strategy=strategy, **settings)
    return record, [layer for stage in strategy.last_run.stages for layer in stage.layers]


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in caplog.messages if "has no graph" in line]


def test_stages_run_no_code_of_the_users(caplog: pytest.LogCaptureFixture) -> None:
    """Law L8: it was run in the threads of stages, while training_step ran in another."""
    Noting.threads.clear()
    record, layers = run(Noting, caplog)
    assert not any("stage" in name for name in Noting.threads)
    assert layers == ["net.0", "net.1", "net.2.one", "net.2.two", "net.3.one", "net.3.two", "net.4"]
    assert said(caplog) == []
    assert_equal(expect(small(Noting), vectors(20, 4), 3), record)


def test_children_run_as_they_are_where_there_is_no_graph(caplog: pytest.LogCaptureFixture) -> None:
    Noting.threads.clear()
    record, layers = run(Decides, caplog)
    assert any("stage" in name for name in Noting.threads)
    assert layers == ["net.0", "net.1", "net.2", "net.3", "net.4"]
    (line,) = said(caplog)
    assert "'net' decides by the values of its data what to compute at test_inside_blocks.py" in line
    assert_equal(expect(small(Decides), vectors(20, 4), 3), record)


def test_evaluation_says_it_too(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "lightning.pytorch"):
        found = evaluated(Evaluates(small(Decides)), vectors(20, 4), pipeline(2, 3))
    assert said(caplog)
    assert_same(evaluated(Evaluates(small(Decides)), vectors(20, 4), "auto"), found)


def test_a_callback_that_no_graph_follows(caplog: pytest.LogCaptureFixture) -> None:
    def averaging() -> StochasticWeightAveraging:
        return StochasticWeightAveraging(0.02, 1, 1)

    record, layers = run(Noting, caplog, averaging(), max_epochs=3)
    assert layers == ["net.0", "net.1", "net.2", "net.3", "net.4"]
    (line,) = said(caplog)
    assert "layer 'net.1' has a BatchNorm, whose momentum" in line
    strategy = even(5, 1, 3)
    assert_same_run(fit(small(Noting), vectors(20, 4), [averaging()], strategy=strategy, max_epochs=3), record)


def test_pruning_by_lightning(caplog: pytest.LogCaptureFixture) -> None:
    """In each epoch, by the weights that the last forward has left: a graph leaves none."""

    def pruning() -> ModelPruning:
        return ModelPruning("l1_unstructured", amount=0.2)

    record, layers = run(Noting, caplog, pruning(), max_epochs=2)
    assert "net.2.one" in layers
    assert said(caplog) == []
    strategy = even(5, 1, 3)
    assert_same_run(fit(small(Noting), vectors(20, 4), [pruning()], strategy=strategy, max_epochs=2), record)
    plain = fit(small(Noting), vectors(20, 4), [pruning()], strategy="auto", max_epochs=2)
    assert_same_run(plain, fit(small(Noting), vectors(20, 4), [pruning()], strategy=even(5, 2, 1), max_epochs=2))
