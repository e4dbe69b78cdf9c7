"""Private names of Lightning for its loops, and for what decides where they stop, save and validate."""

from __future__ import annotations

import signal
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from lightning_hetpipe import lightning_private as of_lightning
from tests.private.guarding import guards
from tests.support.small import Learner, Validated, batches
from tests.support.trainers import quiet_trainer


@guards("from_training_step_output", "closure_loss")
def test_closure_results() -> None:
    loss = torch.tensor(6.0, requires_grad=True)
    broken = "the pipeline would differentiate another loss than Lightning"
    for output in (loss, {"loss": loss, "extra": 1}):
        found = of_lightning.closure_loss(output, 2)
        assert found is not None, broken
        assert (found.item(), found.requires_grad) == (3.0, True), broken
    assert of_lightning.closure_loss(None, 2) is None, broken


class Looks(L.Callback):
    """Looks at what is private, where a step begins."""

    def __init__(self) -> None:
        self.progress: list[tuple[int, int]] = []
        self.arguments: list[tuple[Any, ...]] = []

    def on_before_zero_grad(self, trainer: L.Trainer, pl_module: Any, optimizer: Any) -> None:
        self.progress.append(of_lightning.begun_minibatches(trainer))
        self.arguments.append(of_lightning.step_arguments(trainer, "batch", 3))


class LooksAtCuts(L.Callback):
    """State of the loop when a checkpoint or a validation could come."""

    def __init__(self) -> None:
        self.in_a_step: list[bool] = []
        self.at_the_end: list[bool] = []

    def on_before_zero_grad(self, trainer: L.Trainer, *_: Any) -> None:
        self.in_a_step.append(of_lightning.in_a_step(trainer))

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.in_a_step.append(of_lightning.in_a_step(trainer))

    def on_validation_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.at_the_end.append(of_lightning.validates_at_the_end(trainer))


@guards("batch_progress")
@pytest.mark.parametrize(("interval", "at_the_end"), [(0.5, [False, True]), (2, [False, False]), (1.0, [True])])
def test_where_checkpoints_and_validations_come(interval: float, at_the_end: list[bool]) -> None:
    looks = LooksAtCuts()
    trainer = quiet_trainer("auto", callbacks=[looks], val_check_interval=interval)
    trainer.fit(Validated(), batches(4), batches(1))
    assert looks.in_a_step == [True, False] * 4, "a checkpoint in the middle of a step would be taken for a cut"
    assert looks.at_the_end == at_the_end, "virtual workers with other numbers of batches would validate alone"


class Stops(L.Callback):
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.should_stop = True


@guards("_can_stop_early")
@pytest.mark.parametrize(("min_epochs", "at_the_end"), [(None, [True]), (1, [False, False])])
def test_a_stop_validates_where_it_may_stop(min_epochs: int | None, at_the_end: list[bool]) -> None:
    looks = LooksAtCuts()
    settings = {"val_check_interval": 2, "min_epochs": min_epochs}
    quiet_trainer("auto", callbacks=[Stops(), looks], **settings).fit(Validated(), batches(4), batches(1))
    assert looks.at_the_end == at_the_end, "virtual workers would take a validation of mid-epoch for the last"


@guards("_signal_connector", "_slurm_sigusr_handler_fn")
def test_the_signal_of_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SLURMEnvironment, "detect", staticmethod(lambda: False))
    trainer = quiet_trainer("auto", plugins=[SLURMEnvironment(requeue_signal=signal.SIGUSR2)], devices=1)
    heard = []
    redirect = of_lightning.on_requeue(trainer, lambda redirect, *args: heard.append(args[0]))
    before = signal.getsignal(signal.SIGUSR2)
    trainer._signal_connector.register_signal_handlers()
    try:
        signal.raise_signal(signal.SIGUSR2)
    finally:
        trainer._signal_connector.teardown()
        redirect.remove()
    assert signal.getsignal(signal.SIGUSR2) is before
    assert heard == [signal.SIGUSR2], "a checkpoint would be saved in the middle of whatever runs, and hang"


@guards("_sigterm_notifier_fn", "_checkpoint_connector", "_is_training_done")
def test_sigterm(tmp_path: Path) -> None:
    trainer = quiet_trainer("auto", default_root_dir=tmp_path)
    heard = []
    redirect = of_lightning.on_sigterm(trainer, lambda redirect, *args: heard.append(args[0]))
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    trainer._signal_connector.register_signal_handlers()
    try:
        signal.raise_signal(signal.SIGTERM)
    finally:
        trainer._signal_connector.teardown()
        redirect.remove()
        signal.signal(signal.SIGTERM, before)
    assert (heard, trainer.received_sigterm) == ([signal.SIGTERM], False), "a run would end without a checkpoint"
    of_lightning.note_sigterm(trainer)
    assert trainer.received_sigterm, "callbacks would not know that the run was told to end"
    assert of_lightning.requeue_path(trainer) == str(tmp_path / "hpc_ckpt_1.ckpt"), "SLURM's job would begin anew"
    ends: list[bool] = []

    class Ends(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            ends.append(of_lightning.ends_epoch(trainer))

    quiet_trainer("auto", callbacks=[Ends()]).fit(Learner(), batches(3))
    assert ends == [False, False, True], "a run would be saved before its epoch has ended"


@guards("_every_n_train_steps", "_train_time_interval", "_interval", "_val_check_time_interval")
def test_what_decides_by_steps_or_by_time() -> None:
    hour = timedelta(hours=1)
    callbacks: list[L.Callback] = [
        ModelCheckpoint(every_n_train_steps=2),
        ModelCheckpoint(train_time_interval=hour),
        ModelCheckpoint(),
    ]
    callbacks += [Timer(hour), Timer(hour, interval="epoch"), Timer(), L.Callback()]
    by_steps, at_every_step = (
        map(of_lightning.saves_by_steps, callbacks),
        map(of_lightning.asks_at_every_step, callbacks),
    )
    broken = "what ties virtual workers to each other would go unnoticed"
    assert [*by_steps] == [True, False, False, False, False, False, False], broken
    assert [*at_every_step] == [False, True, False, True, False, False, False], broken
    trainers = [quiet_trainer("auto", val_check_interval=interval) for interval in ("00:01:00:00", 3, 0.5)]
    assert [*map(of_lightning.seconds_between_validations, trainers)] == [3600, None, None]


@guards("_every_n_train_steps", "_monitor_candidates", "is_last_batch", "_combined_loader")
def test_the_interval_of_checkpoints_and_what_their_names_hold() -> None:
    saver, never = ModelCheckpoint(every_n_train_steps=3), ModelCheckpoint(every_n_train_steps=0)
    key, before, found = saver.state_key, list[int](), list[Any]()
    savers = quiet_trainer("auto", callbacks=[saver, never], enable_checkpointing=True)

    def changed(interval: int) -> int:
        before.append(interval)
        return 4

    of_lightning.change_saving_intervals(savers, changed)
    assert before == [3], "virtual workers of unequal speed would save at different waves"
    assert saver.state_key != key, "the interval would be another one"

    class Looks(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            found.append((of_lightning.is_last_batch(trainer), len(of_lightning.train_loaders(trainer))))
            found.append(saver._monitor_candidates(trainer)["step"])

    redirect = of_lightning.on_monitor_candidates(saver, lambda redirect, *args: {"step": 7})
    trainer = quiet_trainer("auto", max_epochs=1, callbacks=[Looks()])
    assert of_lightning.train_loaders(trainer) == []
    trainer.fit(Learner(), batches(2))
    assert found == [(False, 1), 7, (True, 1), 7], "virtual workers would name checkpoints by steps of their own"
    redirect.remove()


@guards("_combined_loader", "_max_batches", "_mode")
@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle"])
def test_batches_are_counted_again(mode: Any) -> None:
    """When the samplers of all loaders get shorter or longer between two epochs."""

    class Sampler:
        length = 3

        def __iter__(self) -> Any:
            return iter(range(self.length))

        def __len__(self) -> int:
            return self.length

    samplers, counted = [Sampler() for _ in range(3)], []

    class Changes(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.current_epoch == 0:
                for sampler, length in zip(samplers, (6, 5, 4), strict=True):
                    sampler.length = length
                of_lightning.recount_batches(trainer)

        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            counted.append((trainer.current_epoch, "train"))

        def on_validation_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            counted.append((trainer.current_epoch, "validate"))

    class Two(Validated):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch[0], batch_idx)

    dataset: Any = batches(8).dataset
    one, other, validation = (DataLoader(dataset, 1, sampler=sampler) for sampler in samplers)
    trainer = quiet_trainer("auto", max_epochs=2, callbacks=[Changes()], val_check_interval=0.5, limit_val_batches=0.75)
    trainer.fit(Two(), CombinedLoader([one, other], mode), validation)
    train = {"min_size": 5, "max_size_cycle": 6}[mode]
    found = Counter(counted)
    # Validations: three times of two batches, as each is of one minibatch; then two of three, at 2 and 4, or 3 and 6.
    assert [found[0, "train"], found[1, "train"]] == [3, train], "batches would be left out, or asked for in vain"
    assert [found[0, "validate"], found[1, "validate"]] == [3 * 2, 2 * 3], "so would batches of a validation"


@pytest.mark.parametrize(("limit", "left"), [(0.25, 1), (0.75, 1), (4, 2), (0.0, 0), (0, 0)])
def test_a_part_of_a_validation_is_at_least_one_batch(limit: int | float, left: int) -> None:
    """A virtual worker without any would miss the validation of the others."""
    trainer = quiet_trainer("auto", max_epochs=1, limit_val_batches=limit)
    trainer.fit(Validated(), batches(2), batches(4))
    validation = trainer.fit_loop.epoch_loop.val_loop
    if validation._combined_loader is not None:
        validation._combined_loader.flattened = [batches(2)]
    of_lightning.recount_batches(trainer)
    assert sum(trainer.num_val_batches) == left


@guards("_last_train_dl_reload_epoch", "_last_val_dl_reload_epoch")
def test_loaders_are_made_in_the_epochs_of_another_fit() -> None:
    """Else one that comes back would make its own in other epochs, and wait for the others there."""
    made: list[tuple[str, int]] = []

    class Loads(Validated):
        def train_dataloader(self) -> Any:
            made.append(("train", self.trainer.current_epoch))
            return batches(2)

        def val_dataloader(self) -> Any:
            made.append(("validate", self.trainer.current_epoch))
            return batches(2)

    class Goes(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.current_epoch == 0:
                assert of_lightning.loaders_made(trainer) == [0, 0]
                of_lightning.make_loaders_as(trainer, [1.0, None])
                assert of_lightning.loaders_made(trainer) == [1.0, None]
                of_lightning.make_loaders_as(trainer, [1.0, 1.0])

    trainer = quiet_trainer("auto", max_epochs=4, callbacks=[Goes()], reload_dataloaders_every_n_epochs=2)
    trainer.fit(Loads())
    assert made == [("train", 0), ("validate", 0), ("validate", 0), ("train", 3), ("validate", 3)]


class ReadiesEpoch(L.Callback):
    """Does what a virtual worker does that comes back, where an epoch begins; counts batches by epoch."""

    def __init__(self) -> None:
        self.batches: Counter[int] = Counter()

    def on_train_epoch_start(self, trainer: L.Trainer, *_: Any) -> None:
        of_lightning.begin_next_epoch(trainer)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.batches[trainer.current_epoch] += 1


@guards("_restarting")
@pytest.mark.parametrize("max_steps", [-1, 6])
def test_a_state_from_between_two_epochs_has_all_batches_of_the_next_one(max_steps: int, tmp_path: Path) -> None:
    """With ``max_steps`` a virtual worker that came back trained on nothing in its first epoch."""
    path, first, then = tmp_path / "state.ckpt", quiet_trainer("auto", max_epochs=1), ReadiesEpoch()
    first.fit(Validated(), batches(4), batches(1))
    first.save_checkpoint(path)
    trainer = quiet_trainer("auto", max_epochs=2, max_steps=max_steps, callbacks=[then])
    trainer.fit(Validated(), batches(4), batches(1), ckpt_path=path)
    assert then.batches == {1: 4 if max_steps < 0 else 2}
    assert trainer.current_epoch == 2


@guards("_build_kwargs", "batch_progress")
def test_progress_and_arguments_of_a_step() -> None:
    looks = Looks()
    quiet_trainer("auto", callbacks=[looks], max_epochs=2).fit(Learner(), batches(2))
    assert looks.progress == [(1, 1), (2, 2), (3, 1), (4, 2)], "minibatches would be numbered otherwise"
    assert looks.arguments == [("batch", 3)] * 4, "training_step would be given other arguments"


@guards()
def test_arguments_of_a_step_without_batch_idx() -> None:
    class Short(Learner):
        def training_step(self, batch: Any) -> Any:  # type: ignore[override]
            return self.net(batch[0]).sum()

    looks = Looks()
    quiet_trainer("auto", callbacks=[looks]).fit(Short(), batches(1))
    assert looks.arguments == [("batch",)], "training_step(batch) would be given a batch_idx too"


class Evaluates(Learner):
    """Looks at the evaluating loop in its own step."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 5) -> None:
        loop = of_lightning.evaluating_loop(self.trainer)
        hook = {"validate": "validation_step", "predict": "predict_step"}[self.trainer.state.fn or ""]
        fetcher = of_lightning.fetcher_of(loop)
        assert fetcher is not None
        of_lightning.set_fetcher(loop, fetcher)
        self.found.append((fetcher.done, of_lightning.evaluation_arguments(loop, hook, "batch", 3, 1)))

    predict_step = validation_step


@guards(
    "_EvaluationLoop",
    "_PredictionLoop",
    "_build_kwargs",
    "_build_step_args_from_hook_kwargs",
    "_data_fetcher",
)
@pytest.mark.parametrize("task", ["validate", "predict"])
@pytest.mark.parametrize("loaders", [1, 2])
def test_the_fetcher_and_the_arguments_of_an_evaluation(task: str, loaders: int) -> None:
    module = Evaluates()
    given = [batches(2) for _ in range(loaders)]
    getattr(quiet_trainer("auto"), task)(module, given if loaders > 1 else given[0])
    args = ("batch", 3, 1) if loaders > 1 else ("batch", 3)
    assert [a for _, a in module.found] == [args] * 2 * loaders, "the evaluation's step would be given other arguments"
    assert [done for done, _ in module.found][-2:] == [False, True], "this would not be the loop's own fetcher"


@guards()
def test_the_checkpoint_of_a_fit_that_launchers_call_can_be_named(tmp_path: Path) -> None:
    trainer = quiet_trainer("auto", max_epochs=1)
    trainer.fit(Learner(), batches(2))
    saved = tmp_path / "one.ckpt"
    trainer.save_checkpoint(saved, weights_only=False)
    again = quiet_trainer("auto", max_epochs=2)

    class Launcher(of_lightning.BaseLauncher):
        is_interactive_compatible = False

        def launch(self, function: Any, *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
            args, kwargs = of_lightning.with_checkpoint(function, args, kwargs, saved)
            return function(*args, **kwargs)

        def kill(self, signum: Any) -> None: ...

    again.strategy._launcher = Launcher()
    again.fit(Learner(), batches(2))
    assert again.global_step == 4, "a virtual worker that comes back would begin anew"
