"""Intervals in minibatches or steps, rounded up to the ends of virtual worker 0's waves."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from torch.utils.data import DataLoader, DistributedSampler

from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.rules.waves import common_waves, covered, dealt
from lightning_hetpipe.run import fit as fit_module
from lightning_hetpipe.run.extensions.telemetry import Pace
from lightning_hetpipe.run.together import Epoch, Interval
from lightning_hetpipe.strategy.virtual_workers import VirtualWorkers
from lightning_hetpipe.workers.shared_data import InjectedRank, Shares
from lightning_hetpipe.workers.synchroniser import Synchroniser
from tests.exact.pipelines import even
from tests.exact.running import fit
from tests.support.models import mlp, vectors
from tests.workers.test_synchroniser import OnlyOne


@given(st.integers(1, 60), st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(0, 3))
def test_waves_cover_an_epoch_once(minibatches: int, lengths: list[int], resumed: int) -> None:
    """Those after which nobody has come to its last minibatch, and the rest, which ends for all with the epoch."""
    totals = [sum(map(len, dealt(minibatches, lengths, vw))) for vw in range(len(lengths))]
    spans = [(min(resumed * length, total), total) for length, total in zip(lengths, totals, strict=True)]
    common = common_waves(lengths, spans)
    for length, (first, last) in zip(lengths, spans, strict=True):
        found = [m for wave in range(1, last + 2) for m in covered(wave, common, length, first, last)]
        assert [*found, *covered(None, common, length, first, last)] == list(range(first, last))
        assert first + common * length < max(last, first + 1)


def test_steps_of_an_epoch_that_is_resumed_within() -> None:
    """Minibatches 5 to 11 of an epoch, of which 4 had made 2 steps; the last one steps without its fellow."""
    epoch = Epoch(4, 11, 2, 2, None)
    assert [epoch.steps_after(minibatch) for minibatch in range(4, 12)] == [2, 2, 3, 3, 4, 4, 5, 6]


def test_an_interval_is_the_number_that_it_was() -> None:
    due = []
    interval = Interval.of(3, lambda number: number in due)
    assert (interval, repr(interval), 4 // interval, interval >= 1) == (3, "3", 1, True)
    assert [count % interval for count in (3, 4)] == [1, 1]
    due.append(3)
    assert [count % interval for count in (3, 4)] == [0, 0]
    for copied in (copy.deepcopy(interval), pickle.loads(pickle.dumps(interval))):
        assert type(copied) is int


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> HetPipeStrategy:
    """A strategy of one virtual worker that has unequal shares with nobody, and waves of 3."""
    strategy: Any = even(2, 2, 2)
    group: Any = OnlyOne(strategy)
    group._meet = lambda where: None

    def enter(self: VirtualWorkers, trainer: Any, *_: Any) -> Synchroniser:
        made = self.synchroniser = Synchroniser(group, trainer.lightning_module, self.shares)
        made.enter([])
        return made

    monkeypatch.setattr(VirtualWorkers, "enter", enter)
    monkeypatch.setattr(VirtualWorkers, "divide", lambda self, _: setattr(self, "shares", Shares(0, 1, (3,))))
    return strategy  # type: ignore[no-any-return]


def divide(workers: VirtualWorkers, monkeypatch: pytest.MonkeyPatch, adapts: bool) -> None:
    monkeypatch.setattr(workers, "divide", lambda _: setattr(workers, "shares", Shares(0, 1, (3,), adapts)))


def injected(batches: int) -> DataLoader[Any]:
    """A loader as Lightning makes it for one of several."""
    dataset: Any = vectors(4 * batches, 4).dataset
    return DataLoader(dataset, 4, sampler=DistributedSampler(dataset, 1, InjectedRank(0), shuffle=False))


class Seen(L.Callback):
    """Numbers of minibatches of an epoch after which there was a validation."""

    def __init__(self) -> None:
        self.validations: list[int] = []

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.validations.append(trainer.fit_loop.epoch_loop.batch_progress.current.ready)


@pytest.mark.parametrize(
    ("interval", "validations"), [(1, [3, 6, 8]), (2, [3, 6, 8]), (4, [6, 8]), (7, [8]), (0.5, [6, 8]), (1.0, [8])]
)
def test_validations_come_at_ends_of_waves(alone: Any, interval: float, validations: list[int]) -> None:
    """An epoch of eight minibatches in waves of three. The Trainer's interval is a plain number again afterwards."""
    seen = Seen()
    settings: Any = {"val_check_interval": interval, "num_sanity_val_steps": 0, "max_epochs": 1}
    trainer: Any = fit(mlp(), injected(8), [seen], val_loader=vectors(4, 4), strategy=alone, **settings).trainer
    assert seen.validations == validations
    assert type(trainer.val_check_batch) is int


def test_a_validation_comes_with_the_last_step(alone: Any) -> None:
    """Limit of steps, which ends the training of a virtual worker as the end of an epoch does: while others go on it
    would miss their validation."""
    seen = Seen()
    settings: Any = {"val_check_interval": 1, "num_sanity_val_steps": 0, "max_steps": 7}
    fit(mlp(), injected(8), [seen], val_loader=vectors(4, 4), strategy=alone, **settings)
    assert seen.validations == [3, 6, 7]


@pytest.mark.parametrize("adapts", [False, True])
def test_rates_are_measured_only_where_shares_follow_them(
    alone: Any, adapts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Pace] = []

    def making(in_flight: Any) -> Pace:
        made.append(Pace(in_flight))
        return made[-1]

    monkeypatch.setattr(fit_module, "Pace", making)
    divide(alone._workers, monkeypatch, adapts)
    fit(mlp(), injected(8), strategy=alone)
    assert [pace.rate is not None for pace in made] == [True] * adapts


def test_checkpoints_by_steps_come_at_ends_of_waves(alone: Any, tmp_path: Path) -> None:
    """Steps 2, 4 and 6 of the first epoch lie in its two full waves, 8 ends it; 10 is in the second epoch's first."""
    saver = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=2)
    key = saver.state_key
    fit(mlp(), injected(8), [saver], strategy=alone, enable_checkpointing=True, max_steps=11)
    steps = sorted(int(path.stem.removeprefix("step=")) for path in tmp_path.glob("*.ckpt"))
    assert steps == [3, 6, 8, 11]
    assert saver.state_key == key


class Does(L.Callback):
    """Does something after some minibatches, counted from 1."""

    def __init__(self, minibatches: list[int], what: Any) -> None:
        self.minibatches, self.what = minibatches, what
        self.done: list[int] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step in self.minibatches:
            self.what(trainer)
            self.done.append(trainer.global_step)


def barrier(trainer: L.Trainer) -> None:
    strategy: Any = trainer.strategy
    workers = strategy._workers
    workers.group = workers.synchroniser.group
    try:
        strategy.barrier()
    finally:
        workers.group = None


def save(trainer: L.Trainer) -> None:
    trainer.save_checkpoint("saved.ckpt")


@pytest.mark.parametrize(
    ("what", "refusal"),
    [
        (barrier, r"strategy.barrier waits for the other virtual workers within a wave"),
        (save, "a checkpoint is saved within a wave, .* a multiple of 3 minibatches on virtual worker 0"),
    ],
)
def test_within_a_wave_nobody_can_be_waited_for(
    alone: Any, what: Any, refusal: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for ever: whoever has come further waits for the end of a wave that others cannot come to."""
    monkeypatch.chdir(tmp_path)
    does = Does([3, 8, 9], what)
    with pytest.raises(SettingError, match=refusal):
        fit(mlp(), injected(8), [does], strategy=alone)
    assert does.done == [3, 8]


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        ({"max_time": {"hours": 1}}, "Timer .* ask virtual worker 0 after every step"),
        ({"min_steps": 9}, "min_steps=9 counts each virtual worker's own steps"),
        ({"accumulate_grad_batches": 2}, r"shares=\[3\] end waves within .* accumulate_grad_batches=2"),
        ({"check_val_every_n_epoch": None, "val_check_interval": 4}, "check_val_every_n_epoch=None counts"),
    ],
)
def test_what_unequal_shares_refuse(alone: Any, settings: Any, refusal: str) -> None:
    with pytest.raises(SettingError, match=refusal):
        fit(mlp(), injected(8), val_loader=vectors(4, 4), strategy=alone, **settings)


@pytest.mark.parametrize("epochs", [2, 3])
def test_given_shares_hold_whole_steps_of_all_epochs_to_come(alone: Any, epochs: int) -> None:
    """Refused at the start, and not when the epoch comes; an epoch after the last is no matter."""
    scheduler, seen = GradientAccumulationScheduler({0: 3, 2: 2}), Seen()
    refusal = pytest.raises(SettingError, match=r"shares=\[3\] end .*=2 minibatches; set shares to multiples of 2")
    with refusal if epochs == 3 else nullcontext():
        fit(mlp(), injected(8), [scheduler, seen], val_loader=vectors(4, 4), strategy=alone, max_epochs=epochs)
    assert seen.validations == ([] if epochs == 3 else [8, 8])


@pytest.mark.parametrize("rate", [7.0, None])
def test_shares_that_adapt_hold_whole_steps_of_the_next_epoch(
    alone: Any, rate: float | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Known before the scheduler changes the Trainer's setting; also where nobody has measured a rate."""
    divide(alone._workers, monkeypatch, adapts=True)
    monkeypatch.setattr(Pace, "rate", rate)
    with caplog.at_level("INFO"):
        fit(mlp(), injected(8), [GradientAccumulationScheduler({0: 3, 1: 2})], strategy=alone, max_epochs=2)
    said = [record.getMessage() for record in caplog.records if "shares from" in record.getMessage()]
    why = "2 make an optimizer step" if rate is None else "virtual workers make 7 per second"
    assert said == [f"shares from epoch 1 on: [4] minibatches in a wave, as {why}"]


def test_shares_that_adapt_cannot_follow_what_nobody_announces(alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Changes(L.Callback):
        def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            trainer.accumulate_grad_batches = 2

    divide(alone._workers, monkeypatch, adapts=True)
    with pytest.raises(SettingError, match=r"accumulate_grad_batches=2 minibatches; have a GradientAccumulationSched"):
        fit(mlp(), injected(8), [Changes()], strategy=alone)


def test_own_steps_are_counted_and_it_is_said(alone: Any) -> None:
    with pytest.warns(UserWarning, match="max_steps and learning rate schedulers by step count each virtual worker's"):
        fit(mlp(), injected(8), strategy=alone, max_steps=2)


def test_with_a_sampler_of_ones_own_shares_stay_equal(alone: Any, caplog: pytest.LogCaptureFixture) -> None:
    """And cuts are where they were: after minibatches, not waves."""
    seen = Seen()
    with caplog.at_level("INFO"):
        settings: Any = {"val_check_interval": 1, "num_sanity_val_steps": 0, "max_epochs": 1}
        fit(mlp(), vectors(12, 4), [seen], val_loader=vectors(4, 4), strategy=alone, **settings)
    said = [record.getMessage() for record in caplog.records if "shares" in record.getMessage()]
    assert said == ["shares stay equal: a sampler of one's own is not divided otherwise"]
    assert seen.validations == [1, 2, 3]
