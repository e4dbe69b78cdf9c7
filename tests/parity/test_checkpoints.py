"""Checkpoints are plain Lightning's, of one step each, and a run that is resumed from one trains what remains."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
)

from tests.exact.pipelines import even
from tests.exact.running import Record, Recorder, after, assert_equal, assert_same_run, expect, finish, fit
from tests.oracle import Batch, Recipe
from tests.parity import plain_task
from tests.support.equality import assert_same
from tests.support.marks import quick, slow_except
from tests.support.models import ADAMW, Task, decay, mlp, sgd, vectors
from tests.support.trainers import quiet_trainer

LENGTH = 7  # batches of an epoch of 26 samples in fours
RECIPE = Recipe(sgd, decay)


def strategy(in_flight: Any, stages: int = 3) -> Any:
    return in_flight if in_flight == "auto" else even(7, stages, in_flight)


def make(recipe: Recipe = RECIPE) -> Task:
    torch.manual_seed(3)
    return mlp(recipe)


class Shuffled:
    """Shuffles anew in each epoch, and can be resumed in the middle of one.

    Its state is one dict that it goes on changing, which a plain run has pickled by then.
    """

    def __init__(self) -> None:
        self.batches = list(vectors(26, 4))
        self.state: dict[str, Any] = {"epoch": 0, "given": []}

    def order(self, epoch: int) -> list[int]:
        return torch.randperm(len(self.batches), generator=torch.Generator().manual_seed(epoch)).tolist()

    def __iter__(self) -> Iterator[Any]:
        if len(self.state["given"]) == len(self.batches):
            self.state["epoch"] += 1
            self.state["given"].clear()
        for index in self.order(self.state["epoch"])[len(self.state["given"]) :]:
            self.state["given"].append(index)
            yield self.batches[index]

    def __len__(self) -> int:
        return len(self.batches)

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = copy.deepcopy(state)

    @classmethod
    def epochs(cls, number: int) -> list[list[Batch]]:
        loader = cls()
        return [[loader.batches[index] for index in loader.order(epoch)] for epoch in range(number)]


class At(L.Callback):
    """Does something once minibatch ``p`` is done."""

    def __init__(self, p: int, do: Callable[[L.Trainer], None]) -> None:
        self.p = p
        self.do = do

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.fit_loop.total_batch_idx + 1 == self.p:
            self.do(trainer)


def control_c(trainer: L.Trainer) -> None:
    raise KeyboardInterrupt


def fail(trainer: L.Trainer) -> None:
    raise ArithmeticError("stop here")


def terminate(trainer: L.Trainer) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def stop(trainer: L.Trainer) -> None:
    trainer.should_stop = True


def out_of_time(trainer: Any) -> None:
    """``Trainer(max_time=...)`` adds a Timer, which sees at the end of each batch that time is up."""
    timer = next(callback for callback in trainer.callbacks if isinstance(callback, L.pytorch.callbacks.Timer))
    timer._duration = 0.0


INTERRUPTIONS: dict[str, tuple[Callable[[L.Trainer], None] | None, type[BaseException] | None, dict[str, Any]]] = {
    "every_n_train_steps": (None, None, {"every_n_train_steps": 4}),
    "Ctrl-C": (control_c, SystemExit, {"save_on_exception": True}),
    "SIGTERM": (terminate, SystemExit, {"save_on_exception": True}),
    "exception": (fail, ArithmeticError, {"save_on_exception": True}),
    "should_stop": (stop, None, {}),
    "max_time": (out_of_time, None, {}),
}


@pytest.fixture
def signals() -> Iterator[None]:
    """Lightning ignores Ctrl-C while it shuts down, and leaves that so."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@quick(
    "every_n_train_steps-4-5", "Ctrl-C-4-5", "SIGTERM-3-auto", "exception-3-auto", "should_stop-4-5", "max_time-3-auto"
)
@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize(
    ("first", "then"),
    slow_except([("auto", "auto"), ("auto", 3), (1, 1), (3, "auto"), (4, 5)], (3, "auto"), (4, 5)),
)
@pytest.mark.parametrize("how", INTERRUPTIONS)
def test_every_remaining_batch_is_trained_once(tmp_path: Path, how: str, first: Any, then: Any) -> None:
    """Wherever a run ends early, the checkpoint holds the loader's state at the last step: what was fetched ahead of
    that comes again. Once it held what the loader was in by then, where the loader gave its own dict, or was saved
    after the epoch had been cut short."""
    p = LENGTH + 4
    do, error, when = INTERRUPTIONS[how]
    path, saver = tmp_path / f"step={p}.ckpt", ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, **when)
    if how == "every_n_train_steps":
        p = 4
        path = tmp_path / f"step={p}.ckpt"
    callbacks: list[L.Callback] = [saver, *([] if do is None else [At(p, do)])]
    settings: dict[str, Any] = {"max_epochs": 2, "enable_checkpointing": True}
    if how == "max_time":
        settings["max_time"] = {"days": 1}
    trainer = quiet_trainer(strategy(first), callbacks=callbacks, **settings)
    if error is None:
        trainer.fit(make(), Shuffled())
    else:
        with pytest.raises(error):
            trainer.fit(make(), Shuffled())
    if error is None and do is not None:
        trainer.save_checkpoint(path)  # once fit has returned

    epochs, here = Shuffled.epochs(3), p // LENGTH
    [state] = torch.load(path)["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    assert state == {"epoch": here, "given": Shuffled().order(here)[: p % LENGTH]}

    if how in ("should_stop", "max_time"):
        return  # Lightning counts that epoch as over
    # The oracle has one Nm for each epoch: what was left of this one is an epoch of its own to it.
    in_flight = [1 if nm == "auto" else nm for nm in (first, then)]
    epochs[here : here + 1] = epochs[here][: p % LENGTH], epochs[here][p % LENGTH :]
    expected = expect(make(), epochs, [in_flight[number > here] for number in range(len(epochs))])
    record = fit(make(), Shuffled(), strategy=strategy(then, 2), ckpt_path=str(path), max_epochs=3)
    assert_equal(after(expected, p), record)


@pytest.mark.slow
def test_a_checkpoint_needs_nothing_of_ours(tmp_path: Path) -> None:
    """Another process, in which importing this package fails, loads it and resumes it as a plain run."""

    def saved(chosen: Any, folder: Path) -> Path:
        torch.manual_seed(3)
        saver = ModelCheckpoint(folder, "saved", monitor="epoch", mode="max")
        trainer = quiet_trainer(chosen, callbacks=[saver], enable_checkpointing=True)
        trainer.fit(plain_task.PlainTask(width=12), plain_task.plain_loader())
        return folder / "saved.ckpt"

    ours = saved(even(4, 2, 3), tmp_path / "ours")
    program = [sys.executable, plain_task.__file__, str(ours), str(tmp_path / "resumed.ckpt")]
    done = subprocess.run(program, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    resumed = torch.load(tmp_path / "resumed.ckpt", weights_only=True)
    trainer = plain_task.resume(str(ours), strategy=even(4, 2, 1))
    trainer.save_checkpoint(tmp_path / "here.ckpt")
    here = torch.load(tmp_path / "here.ckpt", weights_only=True)
    for timed in (resumed, here):
        timed.pop("callbacks")  # of the Trainers' own
    assert_same(resumed, here)
    one = torch.load(saved(even(4, 2, 1), tmp_path / "one"), weights_only=True)
    plain = torch.load(saved("auto", tmp_path / "plain"), weights_only=True)
    one.pop("callbacks"), plain.pop("callbacks")  # paths
    assert_same(plain, one)


@pytest.mark.parametrize("weights_only", [True, False, None])
def test_weights_only(tmp_path: Path, weights_only: bool | None) -> None:
    """It says how far a file is trusted, not what is restored."""
    expected = expect(make(), vectors(26, 4), [3, 4])
    saver = ModelCheckpoint(tmp_path, "saved")
    fit(make(), vectors(26, 4), [saver], strategy=strategy(3), max_epochs=1, enable_checkpointing=True)
    task, recorder = make(), Recorder()
    trainer = quiet_trainer(strategy(4, 2), callbacks=[recorder], max_epochs=2)
    path = str(tmp_path / "saved.ckpt")
    trainer.fit(task, vectors(26, 4), ckpt_path=path, weights_only=weights_only)
    assert_equal(after(expected, LENGTH), finish(recorder, trainer, task))
    [tested] = trainer.test(task, vectors(26, 4), ckpt_path=path, weights_only=weights_only, verbose=False)
    [plain] = quiet_trainer().test(make(), vectors(26, 4), ckpt_path=path, weights_only=weights_only, verbose=False)
    assert tested == plain


class Pickled:
    """An object that weights_only=True does not load."""


def test_weights_only_refuses_what_it_refuses_plainly(tmp_path: Path) -> None:
    class Keeps(L.Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"kept": Pickled()}

    saver = ModelCheckpoint(tmp_path, "saved")
    fit(make(), vectors(26, 4), [saver, Keeps()], strategy=strategy(3), max_epochs=1, enable_checkpointing=True)
    for chosen in ("auto", strategy(3)):
        with pytest.raises(Exception, match="Weights only load failed"):
            quiet_trainer(chosen, max_epochs=2).fit(
                make(), vectors(26, 4), ckpt_path=str(tmp_path / "saved.ckpt"), weights_only=True
            )


def test_a_chain_of_runs(tmp_path: Path) -> None:
    """Each goes on where the last one ended, with other stages and other minibatches in flight."""
    chain: list[Any] = ["auto", 4, 1, 3, "auto", 2]
    expected = expect(make(), [list(vectors(26, 4))] * len(chain), [1 if nm == "auto" else nm for nm in chain])
    path: str | None = None
    for epoch, in_flight in enumerate(chain):
        saver = ModelCheckpoint(tmp_path / str(epoch), "saved")
        settings: dict[str, Any] = {"ckpt_path": path, "max_epochs": epoch + 1, "enable_checkpointing": True}
        record = fit(make(), vectors(26, 4), [saver], strategy=strategy(in_flight, 1 + epoch % 3), **settings)
        assert_same(expected.states[(epoch + 1) * LENGTH], record.end, f"after epoch {epoch}")
        path = saver.best_model_path


def averaging() -> list[L.Callback]:
    return [EMAWeightAveraging(decay=0.5)]


def swa() -> list[L.Callback]:
    return [StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=1, annealing_epochs=1)]


@quick("averaging")
@pytest.mark.parametrize("callbacks", [averaging, swa])
def test_averages_are_resumed(tmp_path: Path, callbacks: Callable[[], list[L.Callback]]) -> None:
    """A run in two parts ends where one in one part does, and where the plain Trainer's does."""

    def run(in_flight: Any, epochs: list[int]) -> Record:
        path = None
        for epoch in epochs:
            saver = ModelCheckpoint(tmp_path / f"{in_flight} {epochs} {epoch}", "saved")
            record = fit(
                make(ADAMW),
                vectors(26, 4),
                [*callbacks(), saver],
                strategy=strategy(in_flight),
                ckpt_path=path,
                max_epochs=epoch,
                enable_checkpointing=True,
            )
            path = saver.best_model_path
        return record

    plain, one, several = (run(in_flight, [3, 4]) for in_flight in ("auto", 1, 3))
    assert_same_run(plain, one)
    whole = run(3, [4])
    assert_same(whole.states[-1], several.states[-1])
    if callbacks is averaging:  # what a run of Lightning's with SWA leaves counts epochs from the resumed one
        assert_same(whole.end, several.end)


@quick("settings1", "settings2")
@pytest.mark.parametrize(
    "settings",
    [
        {"monitor": "loss", "save_top_k": 2, "every_n_train_steps": 2, "save_last": True},
        {"monitor": "val_loss", "save_top_k": 2, "mode": "max", "save_last": "link"},
        {"monitor": "val_loss", "save_top_k": 1, "every_n_epochs": 2, "save_on_train_epoch_end": False},
        {"every_n_train_steps": 3, "save_top_k": -1},
    ],
)
def test_the_best_checkpoints_are_the_plain_trainers(tmp_path: Path, settings: dict[str, Any]) -> None:
    def run(name: str, chosen: Any) -> tuple[list[str], Any, list[Any], Any]:
        saver = ModelCheckpoint(tmp_path / name, "{epoch}-{step}", **settings)
        trainer = quiet_trainer(
            chosen,
            callbacks=[saver],
            max_epochs=3,
            enable_checkpointing=True,
            val_check_interval=4,
            log_every_n_steps=1,
        )
        trainer.fit(make(), vectors(26, 4), vectors(10, 4))
        files = sorted(str(path.relative_to(tmp_path / name)) for path in (tmp_path / name).iterdir())
        paths = ["best"] + (["last"] if "save_last" in settings else [])
        tested = [
            trainer.test(make(), vectors(10, 4), ckpt_path=path, weights_only=True, verbose=False) for path in paths
        ]
        return files, saver.best_model_score, tested, Path(saver.best_model_path).name

    plain, ours = run("plain", "auto"), run("ours", strategy(1))
    assert plain == ours
    several = run("several", strategy(4))
    assert len(several[0]) == len(plain[0])


def test_a_requeued_job_s_checkpoint_is_found(tmp_path: Path) -> None:
    """One that SLURM's requeueing has left, ``hpc_ckpt_<n>.ckpt``."""
    expected = expect(make(), vectors(26, 4), [3, 4])
    trainer = quiet_trainer(strategy(3))
    trainer.fit(make(), vectors(26, 4))
    trainer.save_checkpoint(tmp_path / "hpc_ckpt_1.ckpt")
    record = fit(make(), vectors(26, 4), strategy=strategy(4), default_root_dir=tmp_path, ckpt_path="hpc")
    assert_equal(after(expected, LENGTH), record)
