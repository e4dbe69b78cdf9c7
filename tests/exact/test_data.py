"""Sources of batches: workers, several loaders, streams, hooks and random numbers of the user's own."""

from __future__ import annotations

import itertools
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe.errors import SettingError
from tests.exact.pipelines import Delays, Pinned, even
from tests.exact.running import Record, assert_equal, expect, fit
from tests.oracle import Batch, Outputs
from tests.support.equality import assert_same, difference
from tests.support.marks import fewer, quick, slow_except
from tests.support.models import ADAMW, CLASSES, Task, mlp, vectors
from tests.support.trainers import quiet_trainer

NM = slow_except([1, 4], 4)


@quick("4-2")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("in_flight", NM)
def test_shuffled_data(in_flight: int, workers: int) -> None:
    """The order of the data is the plain Trainer's, and training follows it."""

    def run(strategy: Any) -> Record:
        L.seed_everything(7)
        data: Dataset[Any] = vectors(18, 4).dataset
        loader = DataLoader(data, batch_size=4, shuffle=True, num_workers=workers)
        record = fit(mlp(), loader, strategy=strategy)
        assert not multiprocessing.active_children()
        return record

    plain, ours = run("auto"), run(even(7, 3, in_flight))
    assert_same(plain.batches, ours.batches, "batches")
    assert difference(ours.batches[0], ours.batches[1]) is not None
    L.seed_everything(7)
    assert_equal(expect(mlp(), ours.batches, in_flight), ours)


@pytest.mark.parametrize("in_flight", NM)
def test_an_iterable_dataset_of_unknown_length(in_flight: int) -> None:
    # Which batch is the last one shows when the next one is asked for; it ends the accumulation.
    batches = list(vectors(18, 4))
    task, loader = mlp(), DataLoader(Stream(batches), batch_size=None)
    expected = expect(task, [batches] * 2, in_flight, accumulate=4)
    record = fit(task, loader, strategy=even(7, 3, in_flight), accumulate_grad_batches=4)
    assert_equal(expected, record)


class Stream(IterableDataset[Any]):
    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


@pytest.mark.parametrize("buffers", [1, 2])
@pytest.mark.parametrize("in_flight", NM)
def test_a_loader_that_fills_the_same_memory(in_flight: int, buffers: int) -> None:
    """Batches in flight were overwritten by later ones, without an error where that is done by numpy."""
    task, batches = mlp(), list(vectors(32, 4))
    loader = DataLoader(Refilled(batches, buffers), batch_size=None)
    expected = expect(task, [batches] * 2, in_flight)
    assert_equal(expected, fit(task, loader, strategy=even(7, 3, in_flight)))
    found: Any = quiet_trainer(even(7, 3, in_flight)).predict(task, loader)
    for logits, batch in zip(found, batches, strict=True):
        assert torch.equal(logits, task(batch[0]))


class Refilled(IterableDataset[Any]):
    """Batches of the same size, one after the other in the memory of a few."""

    def __init__(self, batches: list[Any], buffers: int) -> None:
        self.batches = batches
        self.buffers = [tuple(each.numpy().copy() for each in batches[0]) for _ in range(buffers)]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self.batches):
            buffers = self.buffers[number % len(self.buffers)]
            for buffer, tensor in zip(buffers, batch, strict=True):
                buffer[...] = tensor.numpy()
            yield tuple(map(torch.from_numpy, buffers))


class Pair:
    """A batch of a class that no tree knows."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.tensors = [x, y]


def namespace(x: torch.Tensor, y: torch.Tensor) -> SimpleNamespace:
    return SimpleNamespace(tensors=[x, y], of=slice(0, 1))


class OfPairs(Task):
    def training_step(self, batch: Any, batch_idx: int) -> Outputs:
        return self.compute(tuple(batch.tensors) if isinstance(batch, Pair | SimpleNamespace) else batch)


@pytest.mark.parametrize("make", [Pair, namespace])
def test_a_loader_that_refills_the_tensors_of_an_object(make: Callable[..., Any]) -> None:
    task, batches = OfPairs(mlp().net), list(vectors(22, 4))[:5]
    loader = DataLoader(Refilled(batches, 1), batch_size=None, collate_fn=lambda batch: make(*batch))
    assert_equal(expect(task, [batches] * 2, 3), fit(task, loader, strategy=even(7, 3, 3)))


class Doubles(Task):
    def training_step(self, batch: Batch, batch_idx: int) -> Outputs:
        batch[0].mul_(2)
        return self.compute(batch)


@pytest.mark.parametrize("stride", [2, 4])
def test_a_step_that_changes_its_batch_in_place(stride: int) -> None:
    """The step of one batch changed the batches in flight, as views of one tensor."""

    def weights(strategy: Any, *, views: bool = True) -> list[torch.Tensor]:
        x, y = torch.linspace(-1, 1, 120).reshape(20, 6), torch.arange(20) % CLASSES
        batches = [(x[start : start + 4], y[start : start + 4]) for start in range(0, 17, stride)]
        torch.manual_seed(3)
        task = Doubles(mlp().net)
        own = batches if views else [(each.clone(), labels) for each, labels in batches]
        quiet_trainer(strategy).fit(task, DataLoader(Stream(own), batch_size=None))
        return [*task.parameters()]

    assert_same(weights("auto"), weights(HetPipeStrategy(stages=2, in_flight=3, weights="sync")))
    weights(even(7, 3, 3), views=False)
    with pytest.raises(SettingError, match=r"views of one tensor, .* a clone\(\) of the batch, or set in_flight=1"):
        weights(even(7, 3, 3))


@pytest.mark.parametrize("in_flight", NM)
def test_limited_epochs(in_flight: int) -> None:
    task, loader = mlp(), vectors(40, 4)
    expected = expect(task, [list(loader)[:5]] * 2, in_flight, accumulate=2)
    settings: dict[str, Any] = {"limit_train_batches": 5, "accumulate_grad_batches": 2}
    assert_equal(expected, fit(task, loader, strategy=even(7, 3, in_flight), **settings))


def test_one_batch_only() -> None:
    task, loader = mlp(), vectors(40, 4)
    expected = expect(task, [list(loader)[:1]], 4)
    assert_equal(expected, fit(task, loader, strategy=even(7, 3, 4), fast_dev_run=True))


def test_overfit_batches() -> None:
    task, loader = mlp(), vectors(40, 4)
    expected = expect(task, [list(loader)[:3]] * 2, 4)
    assert_equal(expected, fit(task, loader, strategy=even(7, 3, 4), overfit_batches=3))


class Both(Task):
    """Learns from two loaders at once."""

    def compute(self, batch: Batch) -> Outputs:
        (x, y), (more, labels) = batch["a"], batch["b"]
        return super().compute((torch.cat([x, more]), torch.cat([y, labels])))

    def training_step(self, batch: Batch, batch_idx: int) -> Outputs:
        return self.compute(batch)


@pytest.mark.parametrize("in_flight", NM)
def test_several_loaders(in_flight: int) -> None:
    task = Both(mlp().net)
    loaders = {"a": vectors(18, 4), "b": vectors(9, 2, seed=8)}
    epoch = [batch for batch, _, _ in CombinedLoader(loaders, "max_size_cycle")]
    expected = expect(task, [epoch] * 2, in_flight)
    loader = CombinedLoader(loaders, "max_size_cycle")
    assert_equal(expected, fit(task, cast(Any, loader), strategy=even(7, 3, in_flight)))


class Order(Sampler[int]):
    """Every sample in order; calls ``starts`` when an iterator, and with it its workers, are about to be made."""

    def __init__(self, samples: int, starts: Callable[[], None]) -> None:
        self.samples, self.starts = samples, starts

    def __iter__(self) -> Iterator[int]:
        self.starts()
        return iter(range(self.samples))

    def __len__(self) -> int:
        return self.samples


def test_workers_that_start_in_the_middle_of_an_epoch() -> None:
    """Forking while a stage has work would copy it half done."""
    strategy = even(7, 3, 4)
    working: list[int] = []

    def starts() -> None:
        working.append(sum(1 for m in cast(Any, strategy._run)._minibatches() if not m.ended))

    def lag(*_: Any) -> None:
        threading.Event().wait(0.01)  # so that the loader gets ahead of the stages

    strategy._before_pass = lag
    task, data = Both(mlp().net), {"a": vectors(18, 4), "b": vectors(9, 2, seed=8)}
    epoch = [batch for batch, _, _ in CombinedLoader(data, "max_size_cycle")]
    loaders = {
        name: DataLoader(one.dataset, one.batch_size, sampler=Order(len(cast(Any, one.dataset)), starts), num_workers=1)
        for name, one in data.items()
    }
    combined = CombinedLoader(loaders, "max_size_cycle")
    expected = expect(task, [epoch] * 2, 4)
    assert_equal(expected, fit(task, cast(Any, combined), strategy=strategy))
    assert len(working) > 2
    assert set(working) == {0}
    assert "_get_iterator" not in vars(loaders["b"])


class OneAfterTheOther(Dataset[Batch]):
    """Batch p is made once ``training_step`` of minibatch p - 1 has told so, in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.batches = list(vectors(20, 4))

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Batch:
        deadline = time.monotonic() + 20
        while index and not (self.folder / str(index - 1)).exists():
            assert time.monotonic() < deadline, f"training_step {index - 1} waits for batch {index}"
            time.sleep(0.001)
        return self.batches[index]


def test_steps_run_while_the_next_batch_is_waited_for(tmp_path: Path) -> None:
    """A wait for the DataLoader's workers leaves the lock over user code to others (law L8)."""

    class Tells(Task):
        def training_step(self, batch: Batch, batch_idx: int) -> Outputs:
            (tmp_path / str(batch_idx)).touch()
            return super().training_step(batch, batch_idx)

    loader = DataLoader(OneAfterTheOther(tmp_path), batch_size=None, num_workers=1)
    record = fit(mlp(task=Tells), loader, strategy=even(7, 2, 3), max_epochs=1)
    assert len(record.outputs) == 5


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, CLASSES))


@pytest.mark.parametrize("in_flight", NM)
def test_a_batch_that_is_a_dictionary(in_flight: int) -> None:
    class Named(Task):
        def compute(self, batch: Batch) -> Outputs:
            return super().compute((batch["x"], batch["y"]))

        def training_step(self, batch: Batch, batch_idx: int) -> Outputs:
            return self.compute(batch)

    batches = [{"x": x, "y": y, "name": "four"} for x, y in vectors(18, 4)]
    task, loader = Named(small()), DataLoader(cast(Dataset[Any], batches), batch_size=None)
    assert_equal(expect(task, [batches] * 2, in_flight), fit(task, loader, strategy=Pinned((0, 1), in_flight)))


@pytest.mark.parametrize("in_flight", NM)
def test_inputs_whose_shapes_vary(in_flight: int) -> None:
    chance = torch.Generator().manual_seed(5)
    batches = []
    for index in range(8):
        x = torch.randn(2 + index % 3, 1 + index % 4, 6, generator=chance)
        batches.append((x, torch.randint(CLASSES, x.shape[:2], generator=chance)))
    task, loader = Task(small(), ADAMW), DataLoader(cast(Dataset[Any], batches), batch_size=None)
    assert_equal(expect(task, [batches] * 2, in_flight), fit(task, loader, strategy=Pinned((0, 2, 3), in_flight)))


@pytest.mark.parametrize("in_flight", NM)
def test_transfer_hooks_see_each_batch_once_and_in_order(in_flight: int) -> None:
    class Augmented(Task):
        seen = 0

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            self.seen += 1
            x, y = batch
            return x + self.seen, y

    task, loader = Augmented(small()), vectors(18, 4)
    plain = list(loader)
    epochs = [[(x + (epoch * len(plain) + i), y) for i, (x, y) in enumerate(plain, start=1)] for epoch in range(2)]
    expected = expect(task, epochs, in_flight)
    assert_equal(expected, fit(task, loader, strategy=Pinned((0, 1), in_flight)))
    assert task.seen == 2 * len(plain)


class Noisy(Task):
    """Draws from torch's default generator in the step, before it calls the model."""

    def compute(self, batch: Batch) -> Outputs:
        x, y = batch
        return super().compute((x + 0.1 * torch.randn_like(x), y))


def run_noisy(in_flight: int, stages: int, delays: int | None) -> Record:
    torch.manual_seed(3)
    task = Noisy(small())
    data: Dataset[Any] = vectors(18, 4).dataset
    # With a generator of its own the loader does not draw from torch's.
    loader = DataLoader(data, batch_size=4, generator=torch.Generator())
    strategy: Any = even(4, stages, in_flight)
    if delays is not None:
        strategy._before_pass = Delays(delays)
    return fit(task, loader, strategy=strategy)


def test_one_in_flight_draws_what_a_plain_run_draws() -> None:
    batches = list(vectors(18, 4))
    torch.manual_seed(3)
    task = Noisy(small())
    expected = expect(task, [batches] * 2, 1)
    assert_equal(expected, run_noisy(1, 3, None))


def test_random_numbers_of_the_users_own_code_repeat() -> None:
    """They belong to the minibatch, too: neither timing nor the cut changes them, and no two minibatches share them."""
    first = run_noisy(4, 3, None)
    for stages, delays in fewer([(3, 1), (3, 2), (2, None), (4, 3)], [(2, None), (4, 3)]):
        assert_equal(first, run_noisy(4, stages, delays))
    torch.manual_seed(3)
    quiet = expect(Task(small()), vectors(18, 4), 4)
    noise = [(ours["logits"] - its["logits"]) for ours, its in zip(first.outputs[1:4], quiet.outputs[1:4], strict=True)]
    for one, other in itertools.combinations(noise, 2):
        assert not torch.allclose(one, other)
