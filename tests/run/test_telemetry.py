"""Reports of a run: metrics on Lightning's loggers, and ``strategy.last_run``."""

from __future__ import annotations

import csv
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor, nn

from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe.reporting.report import NOTHING
from tests.support.ahead import Memory
from tests.support.marks import quick
from tests.support.small import Learner, batches
from tests.support.trainers import quiet_trainer

LENGTH = 8  # batches of an epoch, of four samples each
OF_STAGES = [f"hetpipe/stage_{stage}/{what}" for stage in (0, 1) for what in ("busy", "memory_bytes")]
NAMES = ["hetpipe/in_flight", "hetpipe/samples_per_second", *OF_STAGES, "hetpipe/staleness"]


def run(in_flight: int, logger: Any, epochs: int = 2, stages: int = 2, every: int = 1, **settings: Any) -> L.Trainer:
    strategy = HetPipeStrategy(stages=stages, in_flight=in_flight, recompute=in_flight == 1)  # a pipeline in any case
    trainer = quiet_trainer(strategy, logger=logger, log_every_n_steps=every, max_epochs=epochs, **settings)
    trainer.fit(Learner(), batches(LENGTH))
    return trainer


def ours(memory: Memory) -> list[dict[str, float]]:
    found = [{name: value for name, value in row.items() if name.startswith("hetpipe/")} for _, row in memory.logged]
    return [row for row in found if row]


def staleness(minibatch: int, in_flight: int) -> int:
    """Age in minibatches of the weights that it uses, where each epoch starts empty (law L1)."""
    return min((minibatch - 1) % LENGTH, in_flight - 1)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_names(stages: int) -> None:
    memory = Memory()
    run(2, memory, stages=stages)
    expected = {f"hetpipe/stage_{stage}/{what}" for stage in range(stages) for what in ("busy", "memory_bytes")}
    expected |= {"hetpipe/samples_per_second", "hetpipe/staleness", "hetpipe/in_flight"}
    assert ours(memory)
    assert all(set(row) == expected for row in ours(memory))


@pytest.mark.parametrize("in_flight", [1, 3, 5])
def test_each_minibatch_reports_its_staleness(in_flight: int) -> None:
    """All but the first, which ran before there was a pipeline; also the last ones of an epoch and of the run."""
    memory = Memory()
    run(in_flight, memory)
    found = [row["hetpipe/staleness"] for row in ours(memory)]
    assert found == [staleness(p, in_flight) for p in range(2, 2 * LENGTH + 1)]


@quick("2-1", "3-3", "8-3")
@pytest.mark.parametrize("in_flight", [1, 3])
@pytest.mark.parametrize("every", [2, 3, LENGTH])
def test_every_so_many_steps(every: int, in_flight: int) -> None:
    memory = Memory()
    run(in_flight, memory, every=every)
    found = [row["hetpipe/staleness"] for row in ours(memory)]
    assert found == [staleness(p, in_flight) for p in range(2, 2 * LENGTH + 1) if p % every == 0]


@pytest.mark.parametrize("in_flight", [1, 3])
def test_steps_on_the_logger_grow(in_flight: int) -> None:
    memory = Memory()
    run(in_flight, memory)
    steps = [step for step, row in memory.logged if "hetpipe/staleness" in row]
    assert all(step is not None for step in steps)
    assert steps == sorted(set(steps), key=lambda step: step or 0)


def test_values_are_plausible() -> None:
    memory = Memory()
    run(3, memory, every=4)  # more than are in flight, so that every stage works in every interval
    assert ours(memory)
    for row in ours(memory):
        assert row["hetpipe/samples_per_second"] > 0
        assert row["hetpipe/in_flight"] > 0
        assert all(0 < row[f"hetpipe/stage_{stage}/busy"] <= 1 for stage in (0, 1))
        assert all(row[f"hetpipe/stage_{stage}/memory_bytes"] > 0 for stage in (0, 1))


def test_several_loggers_get_the_same() -> None:
    first, second = Memory(), Memory()
    run(3, [first, second])
    assert ours(first) == ours(second) != []


def test_no_logging_where_lightning_does_not_log() -> None:
    memory = Memory()
    run(3, memory, every=0)
    assert ours(memory) == []


def test_the_users_own_metrics_are_logged_as_in_a_plain_run() -> None:
    class Logs(Learner):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("batch_idx", float(batch_idx))
            return loss

    rows: list[list[Any]] = []
    for strategy in ("auto", HetPipeStrategy(stages=2, in_flight=3)):
        memory = Memory()
        quiet_trainer(strategy, logger=memory, log_every_n_steps=2).fit(Logs(), batches(LENGTH))
        rows.append([(step, row["batch_idx"]) for step, row in memory.logged if "batch_idx" in row])
    assert rows[0] == rows[1] != []


def test_a_csv_file(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    run(3, logger)
    with open(Path(logger.log_dir) / "metrics.csv") as file:
        rows = [row for row in csv.DictReader(file) if row.get("hetpipe/staleness")]
    assert rows
    assert all(row[name] for row in rows for name in NAMES)
    assert {float(row["hetpipe/staleness"]) for row in rows} == {0.0, 1.0, 2.0}


def test_a_tensorboard_file(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    run(3, logger)
    reader: Any = import_module("tensorboard.backend.event_processing.event_accumulator")  # it has no types
    events = reader.EventAccumulator(logger.log_dir)
    events.Reload()
    assert [tag for tag in sorted(events.Tags()["scalars"]) if tag.startswith("hetpipe/")] == NAMES
    assert {scalar.value for scalar in events.Scalars("hetpipe/staleness")} == {0.0, 1.0, 2.0}


class Tested(Learner):
    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.net(batch[0])


class TestLastRun:
    def test_it_says_that_there_is_none_before_a_fit(self) -> None:
        """Also after an evaluation, and after a fit that ended in its first minibatch, before there were stages."""

        def step(module: Any, x: Any, y: Any, batch_idx: int) -> Any:
            raise ArithmeticError("in the first minibatch")

        strategy = HetPipeStrategy(stages=2)
        assert (str(strategy.last_run), strategy.last_run.minibatches) == (NOTHING, 0)
        trainer = quiet_trainer(strategy)
        trainer.test(Tested(), batches(2), verbose=False)
        assert str(strategy.last_run) == NOTHING
        trainer.fit(Learner(), batches(LENGTH))
        assert "pipeline of 2 stages" in str(strategy.last_run)
        trainer.fit_loop.max_epochs = 2
        with pytest.raises(ArithmeticError):
            trainer.fit(Learner(step), batches(LENGTH))
        assert str(strategy.last_run) == NOTHING

    @pytest.mark.parametrize("logger", [False, True])
    def test_its_content(self, logger: bool) -> None:
        strategy = HetPipeStrategy(stages=3, in_flight=4)
        module = Learner()
        quiet_trainer(strategy, logger=Memory() if logger else False).fit(module, batches(LENGTH))
        report = strategy.last_run
        assert (report.in_flight, report.minibatches) == (4, LENGTH - 1)
        assert report.samples_per_second > 0
        layers = [name for stage in report.stages for name in stage.layers]
        assert layers == ["net.0", "net.1", "net.2", "net.3"]
        types = [kind for stage in report.stages for kind in stage.layer_types]
        assert types == ["Linear", "Tanh", "Linear", "Linear"]
        for stage in report.stages:
            assert stage.device == "cpu"
            assert stage.layers
            assert stage.busy is not None
            assert 0 < stage.busy <= 1
            assert stage.time_s > 0
            named = [module.get_submodule(name) for name in stage.layers]
            assert stage.parameters == sum(p.numel() for p in nn.ModuleList(named).parameters())
            assert stage.versions_bytes == 4 * 4 * stage.parameters
            assert stage.held in range(1, 5)
            assert stage.activations_bytes
            assert stage.memory_bytes
            assert bool(stage.gradients_bytes) == bool(stage.parameters)  # a Tanh may be alone on its stage
            assert stage.device_bytes is None

    @pytest.mark.parametrize(("stages", "in_flight"), [("auto", 1), (1, 1), (2, 3), (4, 5)])
    def test_in_flight_by_default(self, stages: Any, in_flight: int) -> None:
        """One more than there are stages, but one for one stage; stages are devices, here one."""
        strategy = HetPipeStrategy(stages=stages)
        quiet_trainer(strategy).fit(Learner(), batches(LENGTH))
        assert strategy.last_run.in_flight == in_flight
        assert len(strategy.last_run.stages) == (1 if stages == "auto" else stages)

    def test_it_is_that_of_the_last_fit(self) -> None:
        strategy = HetPipeStrategy(stages=2)
        trainer = quiet_trainer(strategy)
        trainer.fit(Learner(), batches(LENGTH))
        first = strategy.last_run
        trainer.fit_loop.max_epochs = 2
        trainer.fit(Learner(), batches(3))
        assert (first.minibatches, strategy.last_run.minibatches) == (LENGTH - 1, 2)

    def test_it_is_there_in_on_train_end(self) -> None:
        seen: list[Any] = []

        class Looks(L.Callback):
            def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
                assert isinstance(trainer.strategy, HetPipeStrategy)
                seen.append(trainer.strategy.last_run)

        strategy = HetPipeStrategy(stages=2)
        quiet_trainer(strategy, callbacks=[Looks()]).fit(Learner(), batches(LENGTH))
        assert seen == [strategy.last_run]
        assert seen[0].minibatches == LENGTH - 1

    def test_an_evaluation_leaves_it(self) -> None:
        strategy = HetPipeStrategy(stages=2)
        trainer = quiet_trainer(strategy)
        trainer.fit(Tested(), batches(LENGTH))
        report = strategy.last_run
        trainer.test(Tested(), batches(2), verbose=False)
        assert strategy.last_run is report
        assert str(report).startswith("Trained as a pipeline of 2 stages, 3 minibatches in flight\n")

    def test_it_tells_how_far_a_fit_came_that_failed(self) -> None:
        def step(module: Any, x: Any, y: Any, batch_idx: int) -> Any:
            if batch_idx == 5:
                raise ArithmeticError("in training_step")
            return module.net(x).sum()

        strategy = HetPipeStrategy(stages=2, in_flight=3)
        with pytest.raises(ArithmeticError, match="in training_step"):
            quiet_trainer(strategy).fit(Learner(step), batches(LENGTH))
        assert strategy.last_run.minibatches == 4

    def test_a_run_of_a_single_minibatch_has_no_pipeline(self) -> None:
        strategy = HetPipeStrategy(stages=2)
        quiet_trainer(strategy).fit(Learner(), batches(1))
        assert strategy.last_run.minibatches == 0
