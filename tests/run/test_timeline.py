"""HetPipeStrategy(timeline=...): what a fit records, where it leaves it, and what Lightning's profilers hear."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from omegaconf import ListConfig
from torch import Tensor
from torch._C._profiler import _ExperimentalConfig

from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe.emulation import Emulation
from lightning_hetpipe.pipeline.recorder import KEPT
from lightning_hetpipe.reporting.timeline import Timeline
from lightning_hetpipe.rules.schedule import LIGHTNING, USER_CODE
from tests.exact.pipelines import even
from tests.support.small import Learner, batches, pipeline, refused
from tests.support.trainers import quiet_trainer
from tests.test_emulation import PADS

LENGTH = 8


def fit(
    strategy: HetPipeStrategy, folder: Path, module: Any = None, length: int = LENGTH, **settings: Any
) -> L.Trainer:
    trainer = quiet_trainer(strategy, default_root_dir=folder, **settings)
    trainer.fit(Learner() if module is None else module, batches(length))
    return trainer


def timeline_of(strategy: HetPipeStrategy) -> Timeline:
    assert strategy.last_run.timeline is not None
    return strategy.last_run.timeline


class Validated(Learner):
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch[0]).sum()
        return loss

    def val_dataloader(self) -> Any:
        return batches(4)


def test_without_it_nothing_is_recorded_and_nothing_left(tmp_path: Path) -> None:
    """Stages are then told to call nothing: off, a pass costs one comparison with None."""

    class Looks(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            pipeline = trainer.strategy._run.pipeline
            asked.extend(stage._settings.before_pass for stage in getattr(pipeline, "stages", []))

    asked: list[Any] = []
    strategy = pipeline(3)
    fit(strategy, tmp_path, callbacks=[Looks()])
    assert strategy.last_run.timeline is None
    assert asked
    assert set(asked) == {None}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("in_flight", [1, 3])
def test_what_a_fit_records(tmp_path: Path, in_flight: int) -> None:
    """All but the first minibatch, which ran before there were stages."""
    strategy = pipeline(in_flight, timeline=True)
    fit(strategy, tmp_path, Validated(), max_epochs=2)
    found = timeline_of(strategy)
    assert (found.stages, found.in_flight, found.virtual_worker) == (2, in_flight, 0)
    assert found.devices == ("cpu", "cpu")
    assert found.minibatches == range(2, 2 * LENGTH + 1)
    numbers = list(found.minibatches)
    for stage, works in ((0, ["forward", "backward"]), (1, ["forward", "loss", "backward"])):
        for work in works:
            assert [span.minibatch for span in found.row(stage) if span.work == work] == numbers
    # Each epoch starts empty (law L1).
    assert found.versions == {p: max((p - 1) // LENGTH * LENGTH, p - in_flight) for p in numbers}
    assert {span.minibatch for span in found.row(USER_CODE)} == set(numbers)
    lightning = {span.work for span in found.row(LIGHTNING)}
    assert {"wait_for_minibatch", "step", "publish", "drain", "evaluation"} <= lightning
    assert {span.minibatch for span in found.row(LIGHTNING) if span.work == "step"} == set(numbers)
    assert ({"fetch", "look_ahead"} <= lightning) == (in_flight > 1)
    evaluated = [span for span in found.spans if span.work == "evaluate"]
    assert bool(evaluated) == (in_flight > 1)  # else evaluation is Lightning's own
    for row in found.rows:
        assert all(one.end <= other.start for one, other in pairwise(found.row(row))), f"row {row} overlaps"


def test_no_more_than_was_in_flight(tmp_path: Path) -> None:
    strategy = pipeline(3, timeline=True)
    fit(strategy, tmp_path, length=30)
    counts = [count for _, count in timeline_of(strategy).in_flight_over_time()]
    assert 1 <= max(counts) <= 3
    assert min(counts) == 0


def test_it_does_not_change_what_is_trained(tmp_path: Path) -> None:
    left = []
    for timeline in (False, True):
        torch.manual_seed(1)
        module = Learner()
        fit(pipeline(3, timeline=timeline), tmp_path, module)
        left.append([parameter.detach().clone() for parameter in module.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*left, strict=True))


def test_emulated_devices_take_as_long_in_it_as_told(tmp_path: Path) -> None:
    """Their sleep is part of a pass: here by a clock that moves where they sleep, which is not the timeline's."""
    strategy = even(4, 2, 3, timeline=True)
    slept: list[float] = []
    strategy._before_pass = Emulation(PADS, lambda: 0.0, slept.append)
    fit(strategy, tmp_path)
    assert len(slept) == 4 * (LENGTH - 1)
    assert len([span for span in timeline_of(strategy).spans if isinstance(span.row, int)]) == 5 * (LENGTH - 1)


def test_one_stage_with_one_minibatch_in_flight(tmp_path: Path) -> None:
    """There is no pipeline, and there is a timeline all the same."""
    strategy = HetPipeStrategy(stages=1, timeline=True)
    fit(strategy, tmp_path)
    found = timeline_of(strategy)
    works = [(span.work, span.minibatch) for span in found.row(0)]
    assert works == [(work, p) for p in range(2, LENGTH + 1) for work in ("forward", "backward")]
    assert found.rows == [0]
    assert (tmp_path / f"timeline-2-{LENGTH}.json").exists()


def test_a_window(tmp_path: Path) -> None:
    strategy = pipeline(3, timeline=(5, 9))
    fit(strategy, tmp_path, max_epochs=3)
    assert timeline_of(strategy).minibatches == range(5, 10)
    assert (tmp_path / "timeline-5-9.json").exists()


def test_the_last_minibatches(tmp_path: Path) -> None:
    strategy = pipeline(3, timeline=True)
    fit(strategy, tmp_path, length=KEPT + 40)
    found = timeline_of(strategy)
    assert found.minibatches == range(41, KEPT + 41)
    # The last one's step, too, after which comes nothing that would end it.
    assert {span.minibatch for span in found.row(LIGHTNING) if span.work == "step"} == set(found.minibatches)


def test_a_window_that_a_run_does_not_reach(tmp_path: Path) -> None:
    strategy = pipeline(3, timeline=(50, 60))
    with pytest.warns(
        UserWarning, match=rf"timeline=\(50, 60\) recorded nothing: .* after minibatch {LENGTH},"
    ) as found:
        fit(strategy, tmp_path)
    assert sum("recorded nothing" in str(warning.message) for warning in found) == 1
    assert timeline_of(strategy).spans == ()
    assert list(tmp_path.iterdir()) == []


def test_several_fits(tmp_path: Path) -> None:
    """Each has its own, and its own file."""
    strategy = pipeline(3, timeline=True)
    trainer = fit(strategy, tmp_path)
    first = timeline_of(strategy)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(Learner(), batches(LENGTH))
    assert first.minibatches == range(2, LENGTH + 1)
    assert timeline_of(strategy).minibatches == range(LENGTH + 2, 2 * LENGTH + 1)
    fit(pipeline(3, timeline=True), tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["timeline-10-16.json", "timeline-2-8-v1.json", "timeline-2-8.json"]


def test_an_epoch_that_ends_early(tmp_path: Path) -> None:
    """Minibatches that were run ahead are not in it, and their numbers are used again."""

    class Stops(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            trainer.should_stop = trainer.global_step == 4

    strategy = pipeline(3, timeline=True)
    fit(strategy, tmp_path, callbacks=[Stops()])
    assert timeline_of(strategy).minibatches == range(2, 5)


def test_a_run_that_fails_leaves_its_timeline(tmp_path: Path) -> None:
    def step(module: Any, x: Any, y: Any, batch_idx: int) -> Any:
        if batch_idx == 6:
            raise ArithmeticError("in training_step")
        return module.net(x).sum()

    strategy = pipeline(3, timeline=True)
    with pytest.raises(ArithmeticError, match="in training_step"):
        fit(strategy, tmp_path, Learner(step))
    found = timeline_of(strategy)
    assert {2, 3, 4, 5, 6} <= set(found.minibatches)
    assert len(list(tmp_path.glob("timeline-2-*.json"))) == 1


def test_the_trace_is_in_the_runs_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    strategy = pipeline(3, timeline=True)
    trainer = fit(strategy, tmp_path, logger=TensorBoardLogger(tmp_path))
    assert trainer.log_dir is not None
    path = Path(trainer.log_dir) / f"timeline-2-{LENGTH}.json"
    assert json.loads(path.read_text()) == json.loads(json.dumps(timeline_of(strategy).to_chrome_trace()))
    (said,) = [record.message for record in caplog.records if "timeline" in record.message]
    assert str(path) in said
    assert "\n" not in said


def images(trainer: L.Trainer) -> dict[str, list[Any]]:
    reader: Any = import_module("tensorboard.backend.event_processing.event_accumulator")  # it has no types
    events = reader.EventAccumulator(trainer.log_dir)
    events.Reload()
    return {tag: events.Images(tag) for tag in events.Tags()["images"]}


def test_the_picture_is_on_tensorboard(tmp_path: Path) -> None:
    trainer = fit(pipeline(3, timeline=True), tmp_path, logger=TensorBoardLogger(tmp_path))
    ((tag, (picture,)),) = images(trainer).items()
    assert tag == "hetpipe/timeline"
    assert picture.step == trainer.global_step
    assert picture.width > picture.height > 100


def test_without_matplotlib_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.warns(UserWarning, match=r"TensorBoard does not show the timeline.*lightning-hetpipe\[plot\]") as found:
        trainer = fit(pipeline(3, timeline=True), tmp_path, logger=TensorBoardLogger(tmp_path))
    assert sum("matplotlib" in str(warning.message) for warning in found) == 1
    assert images(trainer) == {}
    assert list(Path(trainer.log_dir or "").glob("timeline-*.json"))


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    strategy = pipeline(3, timeline=True)
    with pytest.warns(UserWarning, match="the timeline could not be written"):
        fit(strategy, tmp_path / "file" / "folder")
    assert timeline_of(strategy).spans


def test_a_fast_dev_run_leaves_no_file(tmp_path: Path) -> None:
    fit(pipeline(3, timeline=True), tmp_path, fast_dev_run=4)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [1, 0, None, "true", (5,), (0, 3), (5, 4), (1, 2, 3), (1.0, 2.0), (True, 5), "ab"])
def test_values_that_are_no_window(value: Any) -> None:
    with refused(f"timeline={value!r} must be True, False, or the first and the last minibatch to keep"):
        HetPipeStrategy(timeline=value)


def test_a_window_that_is_too_long() -> None:
    HetPipeStrategy(timeline=(1, 2000))
    with refused("timeline=(1, 2001) must be True, False, or the first and the last", "at most 2000"):
        HetPipeStrategy(timeline=(1, 2001))


def test_hydras_lists_are_windows(tmp_path: Path) -> None:
    strategy = HetPipeStrategy(stages=2, timeline=ListConfig([3, 4]))
    fit(strategy, tmp_path)
    assert timeline_of(strategy).minibatches == range(3, 5)


# Lightning's profilers.

SECTIONS = {"look_ahead": LENGTH - 1, "publish": LENGTH - 1, "wait_for_minibatch": LENGTH - 1, "drain": 1}


def test_the_simple_profiler_hears_our_sections() -> None:
    profiler = SimpleProfiler()
    quiet_trainer(pipeline(3), profiler=profiler).fit(Validated(), batches(LENGTH))
    ours = {name: len(times) for name, times in profiler.recorded_durations.items() if name.startswith("[HetPipe]")}
    assert ours == {f"[HetPipe]{name}": count for name, count in SECTIONS.items()}


def test_the_advanced_profiler_hears_our_sections(tmp_path: Path) -> None:
    profiler = AdvancedProfiler(tmp_path, "profile")
    quiet_trainer(pipeline(3), profiler=profiler).fit(Validated(), batches(LENGTH))
    (file,) = tmp_path.iterdir()
    said = file.read_text()
    assert all(f"Profile stats for: [HetPipe]{name}" in said for name in SECTIONS)


def test_torchs_profiler_sees_our_sections_and_stages(tmp_path: Path) -> None:
    """Stages only if it looks at all threads, which it does not by itself."""
    for everywhere in (False, True):
        config: Any = {"experimental_config": _ExperimentalConfig(profile_all_threads=True)} if everywhere else {}
        profiler = PyTorchProfiler(tmp_path, "profile", schedule=None, record_module_names=False, **config)
        quiet_trainer(pipeline(3), profiler=profiler).fit(Validated(), batches(LENGTH))
        assert profiler.function_events is not None
        names = {event.name for event in profiler.function_events}
        assert {f"[pl][profile][HetPipe]{name}" for name in SECTIONS} <= names
        stages = {name for name in names if name.startswith("[HetPipe]stage")}
        passes = {f"[HetPipe]stage {stage} {work}" for stage in (0, 1) for work in ("forward", "backward", "evaluate")}
        assert stages == (passes | {"[HetPipe]stage 1 loss"} if everywhere else set())
