"""Optimization, callbacks, checkpoints, profilers and tuner, used as people use them: equal to the plain Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe.errors import SettingError
from tests.parity.outcomes import Outcome, outcome_of
from tests.parity.scenarios import SCENARIOS
from tests.support.equality import assert_same
from tests.support.marks import slow_except

REFUSED = {
    "two optimizers": "configure_optimizers returned several optimizers",
    "LBFGS": "LBFGS evaluates the loss several times",
    "manual": "ManualOptimBoringModel uses manual optimization",
    "None": "training_step returned None",
    "own backward": "overrides backward",
    "dataloader_iter": "training_step takes dataloader_iter",
    "toggles": "training_step sets requires_grad",
    "loss without a graph": "depends on no parameter that requires a gradient",
    "pytorch_profiler": "PyTorchProfiler(record_module_names=False)",
}
ONE_LAYER = dict.fromkeys(("manual", "pytorch_profiler"), "stages=2 is more than the 1 layer")
STALE = {"top 2", "by validation", "EarlyStopping", "lr_find, exponential", "lr_find, linear", "LearningRateFinder"}
"""Those of which more than weights and metrics depends on staleness."""

ONE_STAGE = ("there is one device, so HetPipeStrategy trains", "the pipelined module is one layer, so HetPipeStrategy")


def told_by(name: str, strategy: Any, folder: Path) -> Outcome:
    """The outcome, with paths as seen from ``folder``."""
    outcome = outcome_of(SCENARIOS[name], strategy, folder)

    def seen(value: Any) -> Any:
        if isinstance(value, str):
            return value.replace(str(folder), "")
        if isinstance(value, dict):
            return {seen(key): seen(inner) for key, inner in value.items()}
        return [seen(inner) for inner in value] if isinstance(value, list) else value

    found: Outcome = seen(outcome)
    return found


def check(name: str, strategy: Any, tmp_path: Path, refused: dict[str, str], *apart: str) -> None:
    plain, ours = told_by(name, "auto", tmp_path / "plain"), told_by(name, strategy, tmp_path / "ours")
    if name in refused:
        assert ours["error"] is SettingError
        assert refused[name] in ours["message"]
        return
    for outcome in (plain, ours):
        outcome["warnings"] = [text for text in outcome["warnings"] if not any(one in text for one in ONE_STAGE)]
        for part in apart:
            outcome.pop(part, None)
    assert_same(plain, ours, name)


@pytest.mark.parametrize(
    "name",
    slow_except(SCENARIOS, "EarlyStopping", "top 2", "by validation", "plateau without monitor", "optimizer in a dict"),
)
def test_one_stage_is_the_plain_trainers(name: str, tmp_path: Path) -> None:
    check(name, "hetpipe", tmp_path, {})


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_two_stages_with_one_in_flight_are_the_plain_trainers(name: str, tmp_path: Path) -> None:
    strategy = HetPipeStrategy(stages=2, in_flight=1)
    check(name, strategy, tmp_path, ONE_LAYER, "warnings")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SCENARIOS if name not in STALE])
def test_all_but_the_numbers_is_equal_with_several_in_flight(name: str, tmp_path: Path) -> None:
    """Steps, epochs, files, messages. (A BatchSizeFinder that ran evaluation within its own start once failed here.)"""
    strategy = HetPipeStrategy(stages=2, in_flight=3)
    numbers = ("weights", "metrics", "logged", "log", "told", "called", "counts")
    check(name, strategy, tmp_path, REFUSED, "warnings", *numbers)
