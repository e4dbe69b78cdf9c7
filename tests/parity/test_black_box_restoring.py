"""Checkpoints and plugins that suites make by hand: restored from as plainly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import ANY, Mock

import pytest
import torch
from lightning.pytorch.plugins.environments import SLURMEnvironment

from tests.parity.black_box import Model, assert_as_plain, describe, end, fitted, trainer


def _saved(folder: Path, change: Callable[[dict[str, Any]], object] = lambda checkpoint: None) -> Path:
    """A checkpoint of a run of one epoch, changed by hand."""
    made, path = trainer(folder, max_epochs=1), folder / "made.ckpt"
    made.fit(Model())
    made.save_checkpoint(path)
    checkpoint = torch.load(path, weights_only=False)
    change(checkpoint)
    torch.save(checkpoint, path)
    return path


@pytest.mark.parametrize("states", [[], {}], ids=["list", "dict"])
def test_fewer_states_of_optimizers_than_there_are(states: Any, tmp_path: Path) -> None:
    def story(folder: Path) -> Any:
        path = _saved(folder, lambda checkpoint: checkpoint.update(optimizer_states=states))
        made, module = trainer(folder), Model()
        made.fit(module, ckpt_path=path)
        return end(made, module), module.seen

    assert_as_plain(story, tmp_path)


def test_weights_that_a_mock_does_not_load(tmp_path: Path) -> None:
    def story(folder: Path) -> Any:
        path, made, module = _saved(folder), trainer(folder), Model()
        vars(module)["load_state_dict"] = load = Mock()
        made.fit(module, ckpt_path=path)
        load.assert_called_once_with(ANY, strict=True)
        return end(made, module), module.seen

    assert_as_plain(story, tmp_path)


def test_a_checkpoint_read_before_the_module_is_attached(tmp_path: Path) -> None:
    def story(folder: Path) -> Any:
        path, made, module = _saved(folder), trainer(folder), Model()
        made.strategy.connect(module)
        return describe(made.strategy.load_checkpoint(path)), made.validate(module, ckpt_path=path)

    assert_as_plain(story, tmp_path)


def test_slurms_plugin_where_there_is_no_slurm(tmp_path: Path) -> None:
    assert_as_plain(lambda folder: fitted(folder, Model(), plugins=[SLURMEnvironment()]), tmp_path)
