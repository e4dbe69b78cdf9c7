"""Settings that are right pass the checks."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf

from lightning_hetpipe import HetPipeStrategy, WSPCallback
from lightning_hetpipe.cli import config_checks
from lightning_hetpipe.cli.composition import settled
from lightning_hetpipe.cli.hetpipe_train import PROGRAM
from lightning_hetpipe.cli.targets import as_given, hyperparameters
from lightning_hetpipe.settings import declared, seconds
from tests.support.marks import quick

CONF = Path(__file__).parents[2] / "conf"
DEFAULT_CALLBACKS = ("model_checkpoint", "progress_bar", "learning_rate_monitor")


@pytest.fixture(autouse=True)
def _configuration() -> Iterator[None]:
    with initialize_config_module("lightning_hetpipe.conf", version_base="1.3"):
        yield


def check(config: DictConfig) -> None:
    config_checks.check(config, PROGRAM, config_checks.BUILT)
    config_checks.check_targets(config)


def composed(*overrides: str) -> DictConfig:
    # Outside a Hydra job nothing says where its output goes.
    return compose("train", overrides=settled(["output_dir=somewhere", *overrides]))


@quick("hetpipe-digits", "plain-gpt")
@pytest.mark.parametrize("experiment", ["digits", "gpt"])
@pytest.mark.parametrize("strategy", ["hetpipe", "plain"])
def test_the_experiments_are_right(experiment: str, strategy: str) -> None:
    check(composed(f"experiment={experiment}", f"strategy={strategy}"))


@quick(
    "strategy.virtual_workers=2",
    "callbacks.progress_bar=null",
    "trainer.plugins=[{_target_: lightning.pytorch.plugins.environments.LightningEnvironment}]",
)
@pytest.mark.parametrize(
    "override",
    [
        "trainer.gradient_clip_val=1",
        "strategy.virtual_workers=2",
        "strategy.weights=stash",
        "callbacks.progress_bar=null",
        "trainer.strategy=auto",
        "trainer.plugins=[{_target_: lightning.pytorch.plugins.environments.LightningEnvironment}]",
    ],
)
def test_what_the_target_takes_may_be_set_although_the_yaml_leaves_it_out(override: str) -> None:
    check(composed(override))


@pytest.mark.parametrize("group", ["callbacks", "logger"])
def test_each_choice_of_callbacks_and_loggers_is_right(group: str) -> None:
    for option in sorted(path.stem for path in (CONF / group).glob("*.yaml")):
        check(composed(f"{group}={option}"))


def test_several_choices_add_up() -> None:
    config = composed("callbacks=[early_stopping,rich_progress_bar]", "logger=[tensorboard,csv]")
    check(config)
    assert set(config.trainer.callbacks) == {*DEFAULT_CALLBACKS, "early_stopping"}
    assert config.callbacks.progress_bar._target_.endswith("RichProgressBar")
    assert set(config.trainer.logger) == {"tensorboard", "csv"}
    assert set(composed().trainer.callbacks) == set(DEFAULT_CALLBACKS)
    none = composed("callbacks=none", "logger=none")
    assert none.trainer.callbacks == none.trainer.logger == {}


@pytest.mark.parametrize(("owner", "path"), [(HetPipeStrategy, ""), (WSPCallback, "wsp")])
def test_the_strategys_file_has_the_defaults_of_the_declarations(owner: type, path: str) -> None:
    file = as_given(OmegaConf.load(CONF / "strategy" / "hetpipe.yaml"))  # type: ignore[arg-type]
    section = file[path] if path else file
    written = {name: value for name, value in section.items() if name not in ("_target_", "wsp", "cluster")}
    defaults = {name: declared(owner).parameters[name].default for name in written}
    assert written == {name: seconds(it) if isinstance(it, timedelta) else it for name, it in defaults.items()}


def test_what_loggers_are_told_holds_no_secret_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "abc")
    told = hyperparameters(composed("+key='${oc.env:SECRET}'", "experiment=gpt"))
    assert told["key"] == "${oc.env:SECRET}"
    assert told["model"]["context"] == 96, "other interpolations are resolved"
    assert told["trainer"]["strategy"] == "${strategy}", "and what stands elsewhere is not repeated"


def test_an_experiments_settings_of_the_strategy_may_stand_where_another_one_is_used() -> None:
    check(composed("strategy=plain", "strategy.in_flight=3"))


def test_a_value_of_the_users_may_stand_at_the_top_if_something_refers_to_it() -> None:
    check(composed("+size=8", "model.width=${size}"))


def test_an_argument_without_default_may_be_given_later() -> None:
    check(composed("model._target_=tests.cli.test_settings.needy", "model._partial_=true"))


def needy(depth: int, width: int = 1, **rest: object) -> None: ...
