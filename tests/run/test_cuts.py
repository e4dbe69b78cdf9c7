"""Decisions of virtual workers with different numbers of batches, or by wall time, at different minibatches."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint, Timer

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.lightning_private import begun_minibatches
from lightning_hetpipe.run.extensions.waves_and_cuts import END, EPOCH, LAST_VALIDATION, WavesAndCuts, within
from lightning_hetpipe.run.preemption import Preemption
from lightning_hetpipe.run.together import check_together
from lightning_hetpipe.workers.seats import Seats
from lightning_hetpipe.workers.synchroniser import Synchroniser
from tests.support.small import Validated, batches
from tests.support.trainers import quiet_trainer


class Others:
    """Stands in for the synchronisation: this virtual worker is the first, and the other one says what a test wants."""

    def __init__(self, told: Any) -> None:
        self.told = told
        self.group = self
        self.weights = SimpleNamespace(member=SimpleNamespace(clock=0, cut=0))
        self.lengths = (1, 1)
        self.index, self.size, self.seats = 0, 2, Seats(0, 2)
        self.shares = None
        self.most_waves_to_cut = 1
        self.numbers: list[int] = []
        self.begins: list[int] = []
        self.buffers: list[str] = []
        self.last_cut = 0

    def gather(self, value: Any, what: str) -> list[Any]:
        return [value, self.told if isinstance(value, tuple) else value]

    def begin(self, first: int, version: int, computing: Any, told: Any = None) -> list[Any]:
        self.begins.append(first)
        return [told, told]

    def newly_lost(self) -> dict[int, int]:
        return {}

    def take_averages(self, averages: list[Any]) -> None: ...

    def take_buffers(self) -> None: ...

    def let_go(self) -> None: ...

    def borrow_buffers(self) -> Any:
        self.buffers.append("borrowed")
        return lambda: self.buffers.append("given back")

    def cut(self, number: int, version: int, computing: Any) -> bool:
        self.numbers.append(number)
        self.last_cut = number
        return True


class Runs(L.Callback):
    """Does what the strategy does of cuts, around a plain run."""

    def __init__(self, others: Others) -> None:
        self.others = others
        self.cuts: WavesAndCuts | None = None

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.cuts is None:
            synchroniser = cast(Synchroniser, self.others)
            alone = cast(Any, SimpleNamespace(synchronising=nullcontext, computing=nullcontext, unlocked=nullcontext))
            self.cuts = WavesAndCuts(trainer, synchroniser, Preemption(trainer, synchroniser, 30.0), alone)
        self.cuts.epoch_begins(begun_minibatches(trainer)[0] + 1)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert self.cuts is not None
        with self.cuts.evaluating(0):
            pass

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert self.cuts is not None
        self.cuts.epoch_ends()


def fit(told: Any, *callbacks: L.Callback, **settings: Any) -> list[int]:
    """Fits four batches, where the other virtual worker has what is ``told``: its batches, and when it validates."""
    others = Others(told)
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)  # none of which keeps any
    settings = {"max_epochs": 2, "enable_checkpointing": saves, **settings}
    trainer = quiet_trainer("auto", callbacks=[Runs(others), *callbacks], **settings)
    trainer.fit(Validated(), batches(4), batches(1))
    return others.numbers


def test_buffers_of_an_evaluation_are_given_back() -> None:
    """Between cuts each virtual worker goes on with its own (law L6)."""
    others = Others((4, 4))
    trainer = quiet_trainer("auto", callbacks=[Runs(others)], max_epochs=1, val_check_interval=2)
    trainer.fit(Validated(), batches(4), batches(1))
    assert others.buffers == ["borrowed", "given back"] * 2


def test_an_epoch_begins_before_its_cuts() -> None:
    """After callbacks had changed weights between epochs, the next one's first validations were no cuts: its beginning
    was numbered by the minibatches of the epoch before, which Lightning's loop still counts then."""
    others = Others((4, 4))
    runs = Runs(others)
    trainer = quiet_trainer("auto", callbacks=[runs])
    trainer.fit(Validated(), batches(4), batches(1))
    assert runs.cuts is not None
    runs.cuts.epoch_begins(5)  # of the second epoch, before the loop runs
    assert trainer.current_epoch == 1
    assert others.last_cut < others.begins[-1]
    assert others.begins[-1] + 1 < EPOCH + within(1)


def test_cuts_are_numbered_by_what_all_have() -> None:
    """Ends of epochs, and validations there, are where they are however many batches there are."""
    assert fit((2, 2)) == [LAST_VALIDATION, END, EPOCH + LAST_VALIDATION, EPOCH + END]
    assert fit((3, 2), val_check_interval=2, max_epochs=1) == [within(2), within(4), END]


@pytest.mark.parametrize(
    ("told", "settings", "why"),
    [
        ((6, 3), {"val_check_interval": 0.5}, "val_check_interval=0.5 comes after different numbers of batches"),
        ((6, 2), {"val_check_interval": 2, "check_val_every_n_epoch": None}, "check_val_every_n_epoch=None counts"),
    ],
)
def test_validations_at_different_minibatches_are_refused(told: Any, settings: dict[str, Any], why: str) -> None:
    with pytest.raises(SettingError, match=why):
        fit(told, **settings)


def test_checkpoints_at_different_minibatches_are_refused() -> None:
    by_steps = ModelCheckpoint(every_n_train_steps=3, save_top_k=0)
    with pytest.raises(
        SettingError, match=r"every_n_train_steps=...\) counts steps over epochs, .* have 4 and 6 batch"
    ):
        fit((6, 6), by_steps)
    fit((6, 6), by_steps, max_epochs=1)


def test_validation_by_time_is_refused() -> None:
    with pytest.raises(SettingError, match="val_check_interval is a time, 10 s,"):
        check_together(quiet_trainer("auto", val_check_interval="00:00:00:10"))
    check_together(quiet_trainer("auto", val_check_interval=2))


@pytest.mark.parametrize(
    "callback", [Timer(timedelta(hours=1)), ModelCheckpoint(train_time_interval=timedelta(hours=1), save_top_k=0)]
)
def test_what_ties_all_to_virtual_worker_0_is_said_once(callback: L.Callback) -> None:
    with pytest.warns(UserWarning, match="ask virtual worker 0 after every step") as said:
        fit((4, 4), callback)
    assert sum("ask virtual worker 0" in str(each.message) for each in said) == 1
    with warnings.catch_warnings(record=True) as said_without:
        fit((4, 4))
    assert not any("ask virtual worker 0" in str(each.message) for each in said_without)


def test_a_stop_elsewhere_is_a_stop_here() -> None:
    """At the end of the epoch: the other one has come to the end of its training."""

    class Stopped(Others):
        def gather(self, value: Any, what: str) -> list[Any]:
            return [value, [True, False, None, 1, {}]] if isinstance(value, list) else super().gather(value, what)

    others = Stopped((4, 4))
    trainer = quiet_trainer("auto", callbacks=[Runs(others)], max_epochs=5)
    trainer.fit(Validated(), batches(4), batches(1))
    assert trainer.current_epoch == 1
    assert trainer.should_stop
