"""A run that is told to end is saved after its step, exits with 143, and is resumed as the oracle is (laws L1, L6)."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe.run import preemption
from tests.exact.pipelines import even
from tests.exact.running import after, assert_equal, expect
from tests.exact.test_resume import LENGTH, RECIPE, loader, resume, save
from tests.oracle import Recipe
from tests.support.equality import assert_same
from tests.support.marks import quick
from tests.support.models import Task, convnet, resnet
from tests.support.trainers import quiet_trainer


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """Lightning puts handlers back only where it had some."""
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


class Told(L.Callback):
    """Somebody sends signals to this process, once, when the hook ``where`` is called in step ``step``.

    Once, because a second SIGTERM ends a run whose validation takes more than ``preemption.TOGETHER``.
    """

    def __init__(self, step: int, where: str = "on_train_batch_start", *signals: int) -> None:
        self.step = step
        self.signals = signals or (signal.SIGTERM,)
        setattr(self, where, self.tell)

    def tell(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step - 1 and not trainer.sanity_checking:
            self.step = 0
            for each in self.signals:
                os.kill(os.getpid(), each)


def model(make: Callable[[Recipe], Task] = convnet) -> Task:
    torch.manual_seed(0)
    return make(RECIPE)


def told(
    folder: Path,
    told: L.Callback,
    in_flight: int = 4,
    val_loader: Any = None,
    make: Callable[[Recipe], Task] = convnet,
    **settings: Any,
) -> L.Trainer:
    """Fits until it is told to end, which is how it ends."""
    defaults: dict[str, Any] = {"enable_checkpointing": True, "max_epochs": 2, "default_root_dir": str(folder)}
    trainer = quiet_trainer(even(9, 3, in_flight), **{**defaults, "callbacks": [told], **settings})
    with pytest.raises(SystemExit) as ended:
        trainer.fit(model(make), loader(), val_loader)
    assert ended.value.code == 143
    assert trainer.received_sigterm
    return trainer


def saved_in(folder: Path) -> Path:
    """The file in which the run was saved; the Trainer's own ModelCheckpoint saves at the end of each epoch."""
    (file,) = (each for each in folder.rglob("*.ckpt") if each.name.startswith(("preempted", "hpc")))
    return file


@quick("4-2", "4-5")
@pytest.mark.parametrize("p", [1, 2, 5, 10])
@pytest.mark.parametrize("in_flight", [1, 4])
def test_it_is_saved_after_the_step_and_resumed_as_the_oracle_is(
    tmp_path: Path, in_flight: int, p: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the first step, within an epoch, at its end, and at the end of the training. Counters are a plain run's."""
    make = resnet if p == LENGTH else convnet  # which has a graph, and has none
    trainer = told(tmp_path / "ours", Told(p), in_flight, make=make)
    file = saved_in(tmp_path / "ours")
    assert trainer.global_step == p
    assert f"saved in {file}; to resume" in capsys.readouterr().err
    task = model(make)
    batches, done = list(loader()), p % LENGTH
    epochs = [batches, batches, batches]
    epochs[p // LENGTH] = batches[:done] + batches[: LENGTH - done]
    expected = expect(task, epochs, in_flight, restarts={p})
    saved, state = torch.load(file, weights_only=False), expected.states[p]
    assert_same({**state.weights, **state.buffers}, dict(saved["state_dict"]))
    assert_same(state.optimizer, saved["optimizer_states"][0])
    assert_equal(after(expected, p), resume(file, even(9, 2, in_flight), task=make(RECIPE)))


@pytest.mark.parametrize("p", [2, 5])
def test_a_validation_is_finished_first(tmp_path: Path, p: int) -> None:
    """And not made again: the checkpoint is that which a ModelCheckpoint writes at its end, but for its counters."""
    seen: list[int] = []

    class Counts(L.Callback):
        def on_validation_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            seen.append(trainer.global_step)

    callbacks = [Told(p + 1, "on_validation_batch_start"), Counts()]
    told(tmp_path, callbacks[0], 3, loader(), callbacks=callbacks, val_check_interval=p)
    saved = torch.load(file := saved_in(tmp_path), weights_only=False)
    assert saved["global_step"] == p
    assert seen == [p] * LENGTH
    trainer = quiet_trainer(
        even(9, 3, 3), callbacks=[Counts()], val_check_interval=p, max_epochs=1, default_root_dir=str(tmp_path)
    )
    trainer.fit(convnet(RECIPE), loader(), loader(), ckpt_path=str(file))
    rest = [4] * LENGTH if p == 2 else []
    assert seen == [p] * LENGTH + rest


def test_it_is_saved_where_the_users_checkpoints_are(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path / "mine", every_n_epochs=2)
    told(tmp_path, Told(3), callbacks=[Told(3), saver])
    assert saved_in(tmp_path) == tmp_path / "mine" / "preempted-epoch=0-step=3.ckpt"


def test_without_checkpoints_none_is_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As there may be no room for them; one line says so."""
    told(tmp_path, Told(3), enable_checkpointing=False)
    assert list(tmp_path.rglob("*.ckpt")) == []
    said = "told to end after 3 steps, and is not saved; its Trainer saves no checkpoints (enable_checkpointing=False)"
    assert said in capsys.readouterr().err


def test_before_the_training_nothing_is_saved(tmp_path: Path) -> None:
    class TellsAtOnce(L.Callback):
        def on_validation_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer = told(tmp_path, TellsAtOnce(), 3, loader(), num_sanity_val_steps=2)
    assert (trainer.global_step, list(tmp_path.rglob("*.ckpt"))) == (0, [])


@pytest.mark.parametrize("apart", [True, False])
def test_a_second_sigterm_ends_it_as_in_a_plain_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apart: bool
) -> None:
    """One that comes at once is the same, from a scheduler and from who has started the process."""
    if apart:
        monkeypatch.setattr(preemption, "TOGETHER", -1.0)
    trainer = told(tmp_path, Told(3, "on_train_batch_start", signal.SIGTERM, signal.SIGTERM))
    assert trainer.global_step == 3
    assert len(list(tmp_path.rglob("*.ckpt"))) == (0 if apart else 1)


def test_one_that_needs_longer_than_its_grace_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    strategy = HetPipeStrategy(stages=2, in_flight=2, grace=1e-9)
    trainer = quiet_trainer(
        strategy, callbacks=[Told(3)], enable_checkpointing=True, max_epochs=2, default_root_dir=str(tmp_path)
    )
    with pytest.raises(SystemExit):
        trainer.fit(convnet(RECIPE), loader())
    assert "more than the grace=1e-09 s that it has" in capsys.readouterr().err
    assert saved_in(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_job_of_slurms_resumes_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    """SIGTERM, and the signal at which Lightning requeues the job, once."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/requeued\n')
    scontrol.chmod(0o755)
    job = {"NTASKS": 1, "JOB_ID": 7, "JOB_NAME": "train", "NODEID": 0, "PROCID": 0, "LOCALID": 0, "NNODES": 1}
    for name, value in {**job, "NODELIST": "localhost", "NTASKS_PER_NODE": 1}.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    told(tmp_path, Told(3, "on_train_batch_start", number), 3)
    assert saved_in(tmp_path) == tmp_path / "hpc_ckpt_1.ckpt"
    assert (tmp_path / "requeued").exists() == (number == signal.SIGUSR1)
    assert "hpc_ckpt_1.ckpt; the same job of SLURM resumes from it by itself" in capsys.readouterr().err
    again = quiet_trainer(even(9, 3, 3), max_epochs=1, default_root_dir=str(tmp_path))
    starts: list[int] = []

    class Starts(L.Callback):
        def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
            starts.append(trainer.global_step)

    again.callbacks.append(Starts())  # type: ignore[attr-defined]
    again.fit(convnet(RECIPE), loader())
    assert (starts, again.global_step) == ([3], LENGTH)


def test_its_checkpoint_is_that_of_a_callback(tmp_path: Path) -> None:
    """But for the counters of the step's own end, which ModelCheckpoint comes before."""
    told(tmp_path / "ours", Told(3))
    ours = torch.load(saved_in(tmp_path / "ours"), weights_only=False)
    theirs = save(model(), tmp_path / "theirs", loader(), even(9, 3, 4), every_n_train_steps=3)[3]
    assert ours.keys() == theirs.keys()
    for part in ("state_dict", "optimizer_states", "lr_schedulers"):
        assert_same(ours[part], theirs[part])
