"""Tools that people use around a Trainer: the tuner, profilers, progress bars, notebooks, runs one after another."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.profilers import AdvancedProfiler, SimpleProfiler
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.connectors import accelerator_connector
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_hetpipe import HetPipeStrategy
from tests.exact.pipelines import even
from tests.parity.comparing import Scenario, assert_as_oracle
from tests.parity.describing import describe, digest
from tests.parity.modules import Watched
from tests.parity.stale import Stale
from tests.support.equality import assert_same
from tests.support.marks import quick
from tests.support.models import vectors
from tests.support.trainers import quiet_trainer

NM = pytest.mark.parametrize("in_flight", [1, 3])


def weights(module: torch.nn.Module) -> dict[str, str]:
    return {name: digest(value) for name, value in module.state_dict().items()}


class Tuned(Watched):
    """Has a learning rate, and a batch size, to be found."""

    def __init__(self) -> None:
        super().__init__()
        self.lr, self.batch_size = 0.02, 2

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def train_dataloader(self) -> Any:
        return vectors(48, self.batch_size)


@quick("3")
@NM
def test_lr_find_and_the_fit_after_it(tmp_path: Path, in_flight: int) -> None:
    found = []
    for strategy in (Stale(in_flight), even(6, 2, in_flight)):
        torch.manual_seed(5)
        module = Tuned()
        trainer = quiet_trainer(strategy, default_root_dir=tmp_path)
        finder = Tuner(trainer).lr_find(module, num_training=12, early_stop_threshold=None)
        assert finder is not None
        assert not list(tmp_path.iterdir())  # its checkpoint is gone
        results = describe(finder.results)
        trainer.fit(module)
        found.append([results, module.lr, trainer.global_step, weights(module)])
    assert_same(found[0], found[1], "run", ordered=True)


@pytest.mark.slow
@pytest.mark.parametrize("in_flight", [1, 3])
def test_the_batch_size_that_is_found(tmp_path: Path, in_flight: int) -> None:
    found = []
    for strategy in (Stale(in_flight), even(6, 2, in_flight)):
        torch.manual_seed(5)
        module = Tuned()
        trainer = quiet_trainer(strategy, default_root_dir=tmp_path)
        size = Tuner(trainer).scale_batch_size(module, max_trials=3, steps_per_trial=2)
        trainer.fit(module)
        found.append([size, trainer.global_step, weights(module)])
    assert_same(found[0], found[1], "run", ordered=True)


@pytest.mark.parametrize("profiler", [SimpleProfiler, AdvancedProfiler])
def test_profilers_see_lightnings_actions(tmp_path: Path, profiler: Any) -> None:
    def actions(strategy: Any) -> set[str]:
        torch.manual_seed(5)
        watching = profiler(dirpath=tmp_path, filename="profile")
        trainer = quiet_trainer(strategy, profiler=watching)
        trainer.fit(Watched())
        text: str = watching.summary()
        names = (
            "run_training_batch",
            "train_dataloader_next",
            "on_train_batch_end",
            "validation_step",
            "optimizer_step",
        )
        return {name for name in names if name in text}

    assert actions(even(6, 2, 3)) == actions("auto")


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_progress_bars_end_full(bar: Any, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = quiet_trainer(even(6, 2, 3), callbacks=[bar()], enable_progress_bar=True)
    trainer.fit(Watched())
    said = capsys.readouterr().out + capsys.readouterr().err
    assert "7/7" in said


def test_a_sequence_of_loaders_is_refused_by_lightning_itself() -> None:
    loader: Any = CombinedLoader([vectors(8, 4), vectors(8, 4)], "sequential")
    said = []
    for strategy in ("auto", even(6, 2, 3)):
        with pytest.raises(ValueError, match="sequential") as caught:
            quiet_trainer(strategy).fit(Watched(), loader)
        said.append(str(caught.value))
    assert said[0] == said[1]


def test_notebooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts no process of which a notebook could not be the parent."""
    monkeypatch.setattr(accelerator_connector, "_IS_INTERACTIVE", True)
    for devices in (1, 3):
        strategy = HetPipeStrategy(stages=2, in_flight=3)
        trainer = quiet_trainer(strategy, devices=devices)
        assert trainer.strategy is strategy
        trainer.fit(Watched())
        assert trainer.global_step == 7


def test_one_strategy_object_in_run_after_run() -> None:
    """With another model each time."""
    trainer = quiet_trainer(even(6, 2, 3))
    for number in range(3):
        trainer.fit_loop.max_epochs = number + 1
        torch.manual_seed(number)
        module = Watched()
        trainer.fit(module)
        torch.manual_seed(number)
        expected = Watched()
        quiet_trainer(Stale(3)).fit(expected)
        assert weights(module) == weights(expected), number


@pytest.mark.parametrize("strategy", [DDPStrategy, partial(even, 6, 2, 3)])
def test_one_strategy_object_in_two_trainers_is_refused_by_lightning_itself(strategy: Any) -> None:
    made = strategy()
    quiet_trainer(made)
    with pytest.raises(MisconfigurationException, match="accelerator set through both"):
        quiet_trainer(made)


class Failing(Watched):
    fails = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.fails and batch_idx == 4:
            raise ArithmeticError("once")
        return super().training_step(batch, batch_idx)


def again(trainer: L.Trainer, module: L.LightningModule) -> None:
    """The same Trainer, once more, after a run that failed."""
    assert isinstance(module, Failing)
    with pytest.raises(ArithmeticError, match="once"):
        trainer.fit(module)
    module.fails = False
    trainer.fit(module)


def test_the_same_trainer_after_a_failure(tmp_path: Path) -> None:
    assert_as_oracle(Scenario(Failing, run=again, settings={"max_epochs": 2}), even(6, 2, 3), tmp_path)
