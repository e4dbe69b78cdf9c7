"""Fits with divided stages: bit-identical to plain loops, from run to run, and up to rounding to unsplit ones."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetpipe.rules.channel_layouts import apportioned
from tests.exact.pipelines import Pinned
from tests.exact.running import Record, assert_equal, assert_same_run, expect, fit
from tests.oracle import Batch, Outputs
from tests.split.nets import WORDS, Block, Language, vgg
from tests.split.plain_loops import BlockLoops, VGGLoops, as_loops
from tests.support.marks import slow_except
from tests.support.models import SGD, Learner, Task, sentences, vectors
from tests.support.trainers import quiet_trainer

SHARES = (3.0, 1.0, 2.0)


def colours(samples: int, batch_size: int) -> DataLoader[Any]:
    """(N, 3, 8, 8) and labels (N,)."""
    chance = torch.Generator().manual_seed(1)
    labels = torch.randint(5, (samples,), generator=chance)
    return DataLoader(TensorDataset(torch.randn(samples, 3, 8, 8, generator=chance), labels), batch_size)


def image_task() -> Task:
    torch.manual_seed(2)
    return Task(vgg())


@pytest.mark.parametrize(("in_flight", "shares"), slow_except([(1, SHARES), (3, SHARES), (2, (0, 1))], (3, SHARES)))
def test_bit_identical_to_plain_loops(in_flight: int, shares: Sequence[float]) -> None:
    """BatchNorm's buffers, dropout's masks, columns, rows behind flattening, three members' sums."""
    task, loader = image_task(), colours(14, 4)
    loops = copy.deepcopy(task)
    as_loops(loops.net, VGGLoops, [apportioned(units, shares) for units in (8, 12, 5)])
    record = fit(task, loader, strategy=Pinned([0], in_flight, split={0: shares}))
    assert_equal(expect(loops, loader, in_flight), record)


class Sentences(Learner):
    """A block of a GPT between an embedding and a head, which are user code's."""

    def __init__(self) -> None:
        super().__init__(SGD)
        self.words, self.block, self.head = nn.Embedding(WORDS, 8), Block(8, 4, 0.0), nn.Linear(8, WORDS)

    def compute(self, batch: Batch) -> Outputs:
        x, y = batch
        logits = self.head(self.block(self.words(x)))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())}


@pytest.mark.parametrize("shares", [SHARES, (1, 1)])
def test_attention_is_bit_identical_to_plain_loops(shares: Sequence[float]) -> None:
    torch.manual_seed(3)
    task = Sentences()
    loops = copy.deepcopy(task)
    as_loops(loops.block, BlockLoops, [apportioned(4, shares), apportioned(32, shares)])
    loader = sentences(10 if shares == SHARES else 12, 4)
    record = fit(task, loader, strategy=Pinned([0], 2, module="block", split={0: shares}))
    assert_equal(expect(loops, loader, 2), record)


def words_task() -> Task:
    torch.manual_seed(4)
    return Task(Language(dropouts=[0.2]))  # type: ignore[arg-type]  # any module does


TASKS: dict[str, tuple[Callable[[], Task], Callable[[int, int], DataLoader[Any]]]] = {
    "images": (image_task, colours),
    "words": (words_task, sentences),
}
SPLITS = [{0: (2, 1)}, {1: (1, 0, 2)}, {0: (1, 3), 1: (2, 1, 1)}]


@pytest.mark.parametrize("name", TASKS)
def test_as_the_unsplit_run_up_to_rounding(name: str) -> None:
    """In float64: dropout has the unsplit masks, tied weights the sum of both gradients; a run repeats bit for bit."""
    make, load = TASKS[name]

    def run(**split: Any) -> Record:
        settings: Any = {"precision": "64-true", "gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
        return fit(_doubled(make()), _double(load(16, 4)), strategy=Pinned([0, 2], 3, **split), **settings)

    unsplit = run()
    for split in SPLITS:
        divided = run(split=split)
        assert_close(unsplit.end, divided.end)
        assert_close(unsplit.outputs, divided.outputs)
    assert_same_run(divided, run(split=SPLITS[-1]))


def _doubled(task: Task) -> Task:
    made: Task = task.double()
    return made


def _double(loader: DataLoader[Any]) -> DataLoader[Any]:
    tensors = [each.double() if each.is_floating_point() else each for each in loader.dataset.tensors]  # type: ignore[attr-defined]
    return DataLoader(TensorDataset(*tensors), loader.batch_size)


def assert_close(expected: Any, actual: Any) -> None:
    expected, actual = (vars(each) if hasattr(each, "__dict__") else each for each in (expected, actual))
    torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-9)


POLICIES: list[dict[str, Any]] = [
    {"weights": "pipeoptim"},
    {"weights": "2bw"},
    {"weights": "sync"},
    {"recompute": True},
]


@pytest.mark.parametrize("settings", POLICIES)
def test_with_other_settings(settings: dict[str, Any]) -> None:
    """Weight policies and recomputation see unsplit weights."""
    every = 4 if settings.get("weights") in ("2bw", "sync") else 1
    unsplit, divided = (
        fit(
            _doubled(image_task()),
            _double(colours(16, 4)),
            strategy=Pinned([0, 4], 3, **settings, **split),
            precision="64-true",
            accumulate_grad_batches=every,
        )
        for split in ({}, {"split": {0: (2, 1), 1: (1, 2)}})
    )
    assert_close(unsplit.end, divided.end)


def test_a_checkpoint_is_unsplit_and_resumes_with_any_split(tmp_path: Path) -> None:
    task = _doubled(image_task())
    shapes = {name: each.shape for name, each in task.state_dict().items()}
    settings: Any = {"precision": "64-true"}
    whole = fit(_doubled(image_task()), _double(colours(16, 4)), strategy=Pinned([0, 4], 2), max_epochs=3, **settings)
    saved = fit(task, _double(colours(16, 4)), strategy=Pinned([0, 4], 2, split={0: (2, 1)}), max_epochs=1, **settings)
    assert saved.trainer is not None
    saved.trainer.save_checkpoint(tmp_path / "one.ckpt")
    state = torch.load(tmp_path / "one.ckpt", weights_only=True)["state_dict"]
    assert {name: each.shape for name, each in state.items()} == shapes
    resumed = [
        fit(
            _doubled(image_task()),
            _double(colours(16, 4)),
            strategy=Pinned([0, 4], 2, **split),
            max_epochs=3,
            ckpt_path=str(tmp_path / "one.ckpt"),
            **settings,
        )
        for split in ({}, {"split": {0: (1, 1, 1), 1: (1, 2)}})
    ]
    for each in resumed:
        assert_close(whole.end, each.end)


def test_an_evaluation_is_of_the_unsplit_weights() -> None:
    """BatchNorm's statistics are those that all members have left."""
    losses = []
    for split in ({}, {"split": {0: (2, 1)}}):
        task, loader = _doubled(image_task()), _double(colours(16, 4))
        trainer = quiet_trainer(Pinned([0, 4], 2, **split), precision="64-true", max_epochs=2)
        trainer.fit(task, loader, loader)
        losses.append(float(trainer.callback_metrics["val_loss"]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


def test_members_have_threads_that_end() -> None:
    seen: set[str] = set()

    class Looks(L.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            seen.update(thread.name for thread in threading.enumerate())

    fit(image_task(), colours(16, 4), [Looks()], strategy=Pinned([0, 4], 2, split={1: (1, 1, 1)}))
    assert {"hetpipe-stage-1-member-1", "hetpipe-stage-1-member-2"} <= seen
    assert not any("member" in thread.name for thread in threading.enumerate())


def test_the_report_names_all_devices() -> None:
    strategy = Pinned([0, 4], 2, split={1: (1, 1)})
    fit(image_task(), colours(16, 4), strategy=strategy)
    assert [stage.device for stage in strategy.last_run.stages] == ["cpu", "cpu + cpu"]


class CalledTwice(Learner):
    """Two calls of the net, the second one on what the first one gave."""

    def __init__(self) -> None:
        super().__init__(SGD)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.GELU(), nn.Linear(16, 6), nn.LayerNorm(6))

    def compute(self, batch: Batch) -> Outputs:
        x, _ = batch
        first = self.net(x)
        second = self.net(first.tanh())
        return {"loss": (second - first).square().mean() + first.abs().mean()}


def test_several_calls_of_a_divided_piece() -> None:
    records = []
    for split in ({}, {"split": {0: (2, 1, 1), 1: (1, 1)}}):
        torch.manual_seed(5)
        task = CalledTwice().double()
        strategy = Pinned([0, 2], 3, **split)
        records.append(fit(task, _double(vectors(16, 4)), strategy=strategy, precision="64-true"))
    assert_close(records[0].end, records[1].end)


@pytest.mark.parametrize("name", TASKS)
def test_under_autocast(name: str) -> None:
    """Members cast as the stage does."""
    make, load = TASKS[name]
    records = [
        fit(
            make(),
            load(14 if name == "images" else 16, 4),
            strategy=Pinned([0, 2], 2, **split),
            precision="bf16-mixed",
            max_epochs=1,
        )
        for split in ({}, {"split": {0: (2, 1), 1: (1, 1)}})
    ]
    for one, other in zip(*(record.outputs for record in records), strict=True):
        torch.testing.assert_close(one["loss"], other["loss"], rtol=0.03, atol=0.03)


def test_frozen_weights() -> None:
    records = []
    for split in ({}, {"split": {0: (2, 1), 1: (1, 1)}}):
        task = _doubled(image_task())
        task.net[0].requires_grad_(False)
        task.net[8].weight.requires_grad_(False)
        records.append(fit(task, _double(colours(16, 4)), strategy=Pinned([0, 4], 3, **split), precision="64-true"))
    assert_close(records[0].end, records[1].end)


def test_inputs_of_other_sizes() -> None:
    """Each needs a graph of its own, and so other regions, for the same weights and buffers."""
    records = []
    for split in ({}, {"split": {0: (2, 1), 1: (1, 1)}}):
        torch.manual_seed(6)
        net = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 5)
        )
        chance = torch.Generator().manual_seed(7)
        batches = [
            (torch.randn(size % 3 + 2, 3, size, size, generator=chance).double(), torch.zeros(size % 3 + 2).long())
            for size in (8, 9, 8, 11, 9)
        ]
        strategy = Pinned([0, 3], 2, **split)
        loader: Any = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]  # a list is a dataset
        records.append(fit(_doubled(Task(net)), loader, strategy=strategy, precision="64-true"))
    assert_close(records[0].end, records[1].end)


class Dtypes(Learner):
    """Looks at the dtype of what the net gives."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(SGD)
        self.net = net
        self.seen: list[torch.dtype] = []

    def compute(self, batch: Batch) -> Outputs:
        made = self.net(batch[0])
        self.seen.append(made.dtype)
        return {"loss": made.square().mean()}


class WritesInto(nn.Module):
    """Adds its input in place to what a linear layer makes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        y += x
        return y.relu_()


@pytest.mark.parametrize("make", [lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2)), WritesInto])
def test_dtypes_under_autocast_are_those_of_the_unsplit_layers(make: Callable[[], nn.Module]) -> None:
    task = Dtypes(make())
    fit(task, vectors(16, 4), strategy=Pinned([0], 2, split={0: (2, 1)}), precision="bf16-mixed", max_epochs=1)
    assert set(task.seen) == {torch.bfloat16}


class Scales(nn.Module):
    """Multiplies by a buffer, which no forward changes."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)
        self.register_buffer("scale", torch.arange(8.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.linear(x) * self.scale
        return made


class Doubles(L.Callback):
    """Doubles the buffer after each minibatch."""

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, Task)
        scales: Any = pl_module.net[0]
        scales.scale.mul_(2)


def test_a_buffer_that_changes_while_weights_do_not() -> None:
    """Members take their parts of it anew in each forward; those of weights they keep for a version."""
    records = []
    for split in ({}, {"split": {0: (2, 1)}}):
        torch.manual_seed(8)
        task = _doubled(Task(nn.Sequential(Scales(), nn.Tanh(), nn.Linear(8, 5))))
        task.net[0].requires_grad_(False)
        strategy = Pinned([0, 2], 1, **split)
        records.append(fit(task, _double(vectors(16, 4)), [Doubles()], strategy=strategy, precision="64-true"))
    assert_close(records[0].outputs, records[1].outputs)
