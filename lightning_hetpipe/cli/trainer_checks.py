"""Checks of the sections that a Trainer is built from: model, data, trainer and what it is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import isclass
from typing import Annotated, Any, Literal

import lightning as L
from lightning.pytorch.loggers import Logger
from omegaconf import DictConfig, OmegaConf

from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe.cli import config_checks
from lightning_hetpipe.cli.config_checks import first_key
from lightning_hetpipe.cli.start_up import ConsoleScript
from lightning_hetpipe.cli.targets import YAML, as_given, is_interpolation, is_section, locate
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.settings import Bounds, declared, unknown

GROUPS = ("model", "data", "trainer", "callbacks", "logger", "strategy", "cluster", "experiment")
SETTINGS: Mapping[str, Any] = {
    "seed": Annotated[int | None, Bounds(0, 2**32 - 1)],  # what numpy takes
    "tags": list[str],
    "monitor": str | None,
    "monitor_mode": Literal["min", "max"],
    "output_dir": str,
}
"""Values at the top that all configurations with a Trainer have."""
LISTS: Mapping[str, type[Any]] = {"logger": Logger, "callbacks": L.Callback}
"""Arguments of the Trainer that are lists there and have names in a configuration, so that each can be overridden."""
BUILT = ("model", "data", "trainer")

_BOUNDS = {
    # Beyond these Lightning divides by them, or trains on in ways that nobody can have meant, without a word.
    "trainer.accumulate_grad_batches": Bounds(1),
    "trainer.check_val_every_n_epoch": Bounds(1),
    "trainer.gradient_clip_val": Bounds(0),
    "trainer.log_every_n_steps": Bounds(0),
    "trainer.min_epochs": Bounds(0),
    "trainer.min_steps": Bounds(0),
    "trainer.num_sanity_val_steps": Bounds(-1),
}


def check(config: DictConfig, program: ConsoleScript, needs: Sequence[str] = BUILT) -> None:
    """Refuse whatever :func:`config_checks.check` does, and what makes no Trainer.

    Raises:
        SettingError: one sentence that names the setting.
        OmegaConfBaseException: for an interpolation that cannot be resolved.
    """
    sections: Any = OmegaConf.to_container(config, resolve=True)
    trainer = sections.get("trainer") or {}
    _check_strategy(sections.get("strategy"), trainer)
    needs = [*needs, *(["cluster"] if sections.get("cluster") is not None else [])]
    config_checks.check(config, program, needs, _BOUNDS)
    for name in LISTS:
        _check_named(name, trainer.get(name), by_group=is_interpolation(as_given(config).get("trainer", {}).get(name)))


def _check_strategy(strategy: Any, trainer: Mapping[str, Any]) -> None:
    """Refuse what HetPipeStrategy does not take, also where the Trainer is given another strategy, or none."""
    if not isinstance(strategy, dict):
        return
    own = declared(HetPipeStrategy)
    if (target := strategy.get("_target_")) is None:
        if isinstance(asked := trainer.get("strategy"), dict) and asked.get("_target_") is None:
            raise SettingError("strategy has no _target_; choose strategy=hetpipe, or strategy=plain.")
        own.check(strategy, "strategy", "HetPipeStrategy", YAML)
        return
    found = locate(str(target), "strategy")
    foreign = [key for key in strategy if key in own.parameters.keys() - declared(found).parameters.keys()]
    if foreign and not (isclass(found) and issubclass(found, HetPipeStrategy)):
        raise SettingError(
            f"strategy._target_={target} does not take strategy.{foreign[0]}, which is HetPipeStrategy's; for another"
            " strategy give its name to the Trainer, as in strategy=plain trainer.strategy=ddp."
        )


def _check_named(group: str, given: Any, *, by_group: bool) -> None:
    """Refuse sections by name that do not come from the group, and among them what is no section: a wrong name."""
    if not isinstance(given, dict) or is_section(given):
        return
    if not by_group:
        raise SettingError(f"trainer.{group}{first_key(given)} is not read there; give {group}{first_key(given)}=...")
    known = [name for name, value in given.items() if value is None or is_section(value)]
    for name in [name for name in given if name not in known]:
        raise unknown(name, group, known, rest=first_key(given[name]))
