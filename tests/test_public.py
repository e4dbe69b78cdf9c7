"""Promises to users: the root's names, the registered strategy, Hydra's way to it, and pytest's."""

from __future__ import annotations

import inspect
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from hydra.utils import instantiate
from lightning.pytorch.strategies import ParallelStrategy, StrategyRegistry
from omegaconf import ListConfig, OmegaConf

import lightning_hetpipe
from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe.errors import warn_if_untested
from tests.support.small import Learner, batches
from tests.support.trainers import quiet_trainer


def test_the_root_exports_these_names_and_no_others() -> None:
    names = ["Cluster", "Device", "HetPipeStrategy", "Link", "Node", "Plan", "WSPCallback"]
    assert lightning_hetpipe.__all__ == dir(lightning_hetpipe) == names
    assert all(inspect.isclass(getattr(lightning_hetpipe, name)) for name in names)
    with pytest.raises(AttributeError, match="module 'lightning_hetpipe' has no attribute 'HetPipe'"):
        getattr(lightning_hetpipe, "HetPipe")  # noqa: B009


def test_the_arguments_of_the_strategy_and_their_defaults() -> None:
    """DESIGN, section 7; by name and position."""
    parameters = inspect.signature(HetPipeStrategy).parameters
    assert {name: parameter.default for name, parameter in parameters.items()} == {
        "stages": "auto",
        "in_flight": "auto",
        "virtual_workers": 1,
        "weights": "auto",
        "module": None,
        "plan": None,
        "cluster": None,
        "allocation": "auto",
        "compile": False,
        "recompute": False,
        "split": False,
        "timeline": False,
        "stage_hosts": None,
        "lr_correction": "auto",
        "wsp": None,
        "timeout": timedelta(minutes=5),
        "capture_timeout": 60.0,
        "grace": timedelta(seconds=30),
        "accelerator": None,
        "parallel_devices": None,
        "cluster_environment": None,
        "checkpoint_io": None,
        "precision_plugin": None,
    }
    assert list(parameters)[:5] == ["stages", "in_flight", "virtual_workers", "weights", "module"]


def test_every_argument_is_documented() -> None:
    text = inspect.getdoc(HetPipeStrategy) or ""
    names = list(inspect.signature(HetPipeStrategy).parameters)
    assert [name for name in names if name not in text] == []


def test_it_is_a_parallel_strategy() -> None:
    assert issubclass(HetPipeStrategy, ParallelStrategy)


def test_the_constructor_only_stores() -> None:
    strategy = HetPipeStrategy(stages=3, in_flight=5, module="net", timeout=30)
    assert (strategy.stages, strategy.in_flight, strategy.module) == (3, 5, ["net"])
    assert strategy.timeout == 30.0
    assert strategy.last_run.stages == []


def test_the_strategy_is_registered() -> None:
    assert "hetpipe" in StrategyRegistry
    assert isinstance(StrategyRegistry.get("hetpipe"), HetPipeStrategy)


def test_the_trainer_knows_it_by_name() -> None:
    trainer = quiet_trainer("hetpipe")
    trainer.fit(Learner(), batches(3))
    assert isinstance(trainer.strategy, HetPipeStrategy)
    assert trainer.strategy.last_run.stages
    assert trainer.global_step == 3


def fit_with(strategy: Any) -> HetPipeStrategy:
    assert isinstance(strategy, HetPipeStrategy)
    quiet_trainer(strategy).fit(Learner(), batches(3))
    assert strategy.last_run.stages
    return strategy


@pytest.mark.parametrize("module", ["net", ["net"]])
def test_hydra_makes_it(module: Any) -> None:
    """A list in a configuration is a ListConfig, unless ``_convert_`` says otherwise."""
    config = OmegaConf.create(
        {"_target_": "lightning_hetpipe.HetPipeStrategy", "stages": 2, "module": module, "timeout": 30.0}
    )
    strategy = fit_with(instantiate(config))
    assert strategy.module == ["net"]
    assert len(strategy.last_run.stages) == 2


def test_a_list_config_by_hand() -> None:
    assert fit_with(HetPipeStrategy(module=ListConfig(["net"]), stages=2)).module == ["net"]


def test_the_package_is_typed() -> None:
    assert (Path(lightning_hetpipe.__file__).parent / "py.typed").exists()


def test_lightning_finds_no_fault_with_its_distributed_side() -> None:
    """One process is one virtual worker: nothing is distributed, and no sampler is put in."""
    strategy = HetPipeStrategy()
    trainer: L.Trainer = quiet_trainer(strategy)
    assert (trainer.world_size, trainer.global_rank, trainer.local_rank, trainer.node_rank) == (1, 0, 0, 0)
    assert (trainer.num_nodes, trainer.is_global_zero, strategy.is_distributed) == (1, True, False)


@pytest.mark.parametrize(
    ("library", "version", "warns"),
    [
        ("torch", "2.15.0+cu132", False),
        ("torch", "2.16.0", True),
        ("torch", "3.0.0a0+git", True),
        ("lightning", "2.6.9", False),
        ("lightning", "2.7.0", True),
    ],
)
def test_versions_that_were_not_tested_are_warned_of(library: str, version: str, warns: bool) -> None:
    """pip would have refused them, for everybody, on the day that they were released."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        warn_if_untested(library, version)
    assert [str(each.message).startswith(f"lightning_hetpipe was not tested with {library}") for each in told] == [
        True
    ] * warns
