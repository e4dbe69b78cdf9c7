"""Every key of the configuration must be one that somebody reads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hydra import compose, initialize_config_module
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from lightning_hetpipe.cli.overrides import settled
from lightning_hetpipe.cli.settings import check
from lightning_hetpipe.errors import SettingError


@pytest.fixture(autouse=True)
def _configuration() -> Iterator[None]:
    with initialize_config_module("lightning_hetpipe.conf", version_base="1.3"):
        yield


def composed(*overrides: str) -> DictConfig:
    # Outside a Hydra job nothing says where its output goes.
    return compose("train", overrides=settled(["output_dir=somewhere", *overrides]))


@pytest.mark.parametrize("experiment", ["digits", "gpt"])
@pytest.mark.parametrize("strategy", ["hetpipe", "plain"])
def test_the_experiments_are_right(experiment: str, strategy: str) -> None:
    check(composed(f"experiment={experiment}", f"strategy={strategy}"))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("strategy.in_fligt=6", "strategy.in_fligt is not a setting; did you mean strategy.in_flight?"),
        ("+strategy.in_fligt=6", "strategy.in_fligt is not a setting; did you mean strategy.in_flight?"),
        ("trainer.max_epoch=3", "trainer.max_epoch is not a setting; did you mean trainer.max_epochs?"),
        ("+trainer.max_epoch=3", "trainer.max_epoch is not a setting; did you mean trainer.max_epochs?"),
        ("model.widht=3", "model.widht is not a setting; did you mean model.width?"),
        ("data.batch_siz=3", "data.batch_siz is not a setting; did you mean data.batch_size?"),
        ("strateg.in_flight=6", "strateg.in_flight is not a setting; did you mean strategy.in_flight?"),
        ("+sead=3", "sead is not a setting; did you mean seed?"),
        (
            "trainer.callbacks.checkpoint.monitr=x",
            "trainer.callbacks.checkpoint.monitr is not a setting; did you mean trainer.callbacks.checkpoint.monitor?",
        ),
        (
            "trainer.callbacks.checkpont.monitor=x",
            "trainer.callbacks.checkpont.monitor is not a setting; did you mean trainer.callbacks.checkpoint.monitor?",
        ),
        (
            "model.zzz=1",
            "model.zzz is not a setting; lightning_hetpipe.demo.ResNet has width, blocks, classes, lr, weight_decay.",
        ),
    ],
)
def test_a_setting_that_nothing_reads_is_refused_with_the_nearest_name(override: str, said: str) -> None:
    with pytest.raises(SettingError) as caught:
        check(composed(override))
    assert str(caught.value) == said


@pytest.mark.parametrize(
    "override",
    [
        "trainer.gradient_clip_val=1",
        "strategy.virtual_workers=2",
        "+strategy.weights=stash",
        "trainer.callbacks.progress=null",
        "trainer.strategy=auto",
        "trainer.plugins=[{_target_: lightning.pytorch.plugins.environments.LightningEnvironment}]",
    ],
)
def test_what_the_target_takes_may_be_set_although_the_yaml_leaves_it_out(override: str) -> None:
    check(composed(override))


def test_targets_inside_a_list_are_checked_too() -> None:
    override = "trainer.plugins=[{_target_: lightning.pytorch.callbacks.EarlyStopping, monitor: x, patienc: 1}]"
    with pytest.raises(SettingError, match=r"trainer\.plugins\.0\.patienc is not .* trainer\.plugins\.0\.patience\?"):
        check(composed(override))


def test_a_value_of_the_users_may_stand_at_the_top_if_something_refers_to_it() -> None:
    check(composed("+size=8", "model.width=${size}"))
    with pytest.raises(SettingError, match="size is not a setting"):
        check(composed("+size=8"))


def test_an_argument_without_default_must_be_given() -> None:
    with pytest.raises(SettingError) as caught:
        check(composed("model._target_=tests.cli.test_settings.needy"))
    assert str(caught.value) == ("model.depth is missing, tests.cli.test_settings.needy needs it; give model.depth=...")
    check(composed("model._target_=tests.cli.test_settings.needy", "model._partial_=true"))


def needy(depth: int, width: int = 1, **rest: object) -> None: ...


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.width=???", r"model\.width has no value; give model\.width="),
        ("~model", "No model is configured; choose an experiment"),
        ("~data._target_", r"data has no _target_; give data\._target_="),
    ],
)
def test_what_is_missing_is_named(override: str, said: str) -> None:
    with pytest.raises(SettingError, match=said):
        check(composed(override))


def test_an_interpolation_that_leads_nowhere_names_its_key() -> None:
    with pytest.raises(OmegaConfBaseException) as caught:
        check(composed("model.width=${nowhere}"))
    assert "full_key: model.width" in str(caught.value)
