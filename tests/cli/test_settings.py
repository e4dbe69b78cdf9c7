"""Every key of the configuration must be one that somebody reads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hydra import compose, initialize_config_module
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from lightning_hetpipe.cli.config_checks import check
from lightning_hetpipe.cli.overrides import settled
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


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainer.check_val_every_n_epoch=0", "trainer.check_val_every_n_epoch=0 must be at least 1."),
        ("trainer.accumulate_grad_batches=-1", "trainer.accumulate_grad_batches=-1 must be at least 1."),
        ("trainer.gradient_clip_val=-0.5", "trainer.gradient_clip_val=-0.5 must be at least 0."),
        ("trainer.callbacks.checkpoint._target_=null", "trainer.callbacks.checkpoint._target_=null names nothing"),
        ("output_dir=3", "output_dir=3 must be text."),
        ("seed=4294967296", "seed=4294967296 must be from 0 to 4294967295, or null to draw one."),
        ("seed=true", "seed=true must be a whole number or null."),
        ("model.width.x=3", "model.width={'x': 3} must be a whole number."),
        ("trainer.profiler=3", "trainer.profiler=3 must be a Profiler or text or null."),
        (
            "trainer.profiler._target_=torch.nn.Identity",
            "trainer.profiler._target_=torch.nn.Identity must be a Prof",
        ),
        ("strategy.timeout=abc", "strategy.timeout=abc must be a timedelta or a number."),
        ("strategy.accelerator=gpu", "strategy.accelerator=gpu comes from the Trainer; give trainer.accelerator=..."),
        ("strategy.parallel_devices=3", "strategy.parallel_devices=3 comes from the Trainer; give trainer.devices=..."),
        ("~strategy", "strategy has no _target_; choose strategy=hetpipe, or strategy=plain."),
        (
            "strategy._target_=lightning.pytorch.strategies.DDPStrategy",
            "strategy.stages is a setting of HetPipeStrategy, and strategy._target_=lightning.pytorch.strategies."
            "DDPStrategy takes none of it; for another strategy give its name to the Trainer, as in strategy=plain",
        ),
    ],
)
def test_a_value_that_nothing_can_work_with_is_refused(override: str, said: str) -> None:
    with pytest.raises(SettingError) as caught:
        check(composed(override))
    assert str(caught.value).startswith(said)


def test_a_setting_of_the_strategy_is_checked_where_it_is_not_used() -> None:
    check(composed("strategy=plain", "strategy.in_flight=3"))
    with pytest.raises(SettingError, match=r"strategy\.in_fligt is not a setting; did you mean strategy\.in_flight"):
        check(composed("strategy=plain", "strategy.in_fligt=3"))


def test_targets_inside_a_list_are_checked_too() -> None:
    override = (
        "trainer.plugins=[{_target_: lightning.pytorch.plugins.MixedPrecision, precision: bf16-mixed, devic: cpu}]"
    )
    with pytest.raises(SettingError, match=r"trainer\.plugins\.0\.devic is not .* trainer\.plugins\.0\.device\?"):
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
