"""One minibatch in flight is the plain Trainer's run; more are the oracle's, and only what DESIGN names moves."""

from __future__ import annotations

from pathlib import Path

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_hetpipe import HetPipeStrategy
from tests.exact.pipelines import even
from tests.parity.comparing import Scenario, assert_as_oracle, assert_as_plain
from tests.parity.modules import Watched
from tests.support.marks import slow_except

LAYERS = 6


def saver(folder: Path) -> list[ModelCheckpoint]:
    return [ModelCheckpoint(folder, save_top_k=-1, every_n_train_steps=3)]


BASIC = Scenario(Watched, saver, settings={"enable_checkpointing": True, "num_sanity_val_steps": 1})


@pytest.mark.parametrize("stages", slow_except([2, 3], 3))
def test_one_in_flight(tmp_path: Path, stages: int) -> None:
    assert_as_plain(BASIC, even(LAYERS, stages, 1), tmp_path)


def test_one_stage_alone(tmp_path: Path) -> None:
    assert_as_plain(BASIC, HetPipeStrategy(stages=1, in_flight=1), tmp_path)


@pytest.mark.parametrize("in_flight", slow_except([2, 4], 4))
def test_several_in_flight(tmp_path: Path, in_flight: int) -> None:
    assert_as_oracle(BASIC, even(LAYERS, 2, in_flight), tmp_path)
