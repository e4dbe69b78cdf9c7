"""Checks of the sections that a Trainer is built from: model, data, trainer, strategy and cluster."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from inspect import isclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe.cli import config_checks
from lightning_hetpipe.cli.config_checks import Bounds, check_arguments, first_key, unknown
from lightning_hetpipe.cli.console_script import ConsoleScript
from lightning_hetpipe.cli.kinds import is_section
from lightning_hetpipe.cli.targets import TargetSignature, locate
from lightning_hetpipe.errors import SettingError

GROUPS = ("model", "data", "trainer", "strategy", "cluster", "experiment")
BUILT = ("model", "data", "trainer")

_BOUNDS: Bounds = {
    "seed": (0, 2**32 - 1),  # what numpy takes
    # Beyond these Lightning divides by them, or trains on in ways that nobody can have meant, without a word.
    "trainer.accumulate_grad_batches": (1, math.inf),
    "trainer.check_val_every_n_epoch": (1, math.inf),
    "trainer.gradient_clip_val": (0, math.inf),
    "trainer.log_every_n_steps": (0, math.inf),
    "trainer.min_epochs": (0, math.inf),
    "trainer.min_steps": (0, math.inf),
    "trainer.num_sanity_val_steps": (-1, math.inf),
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
    _check_callbacks(trainer.get("callbacks"))


def _check_strategy(strategy: Any, trainer: Mapping[str, Any]) -> None:
    """Refuse what HetPipeStrategy does not take, also where the Trainer is given another strategy, or none."""
    if not isinstance(strategy, dict):
        return
    own = TargetSignature.of(HetPipeStrategy)
    if (target := strategy.get("_target_")) is None:
        if isinstance(asked := trainer.get("strategy"), dict) and asked.get("_target_") is None:
            raise SettingError("strategy has no _target_; choose strategy=hetpipe, or strategy=plain.")
        check_arguments("strategy", strategy, TargetSignature(own.parameters, False, {}), "HetPipeStrategy")
        return
    found = locate(str(target), "strategy")
    foreign = [key for key in strategy if key in own.parameters.keys() - TargetSignature.of(found).parameters.keys()]
    if foreign and not (isclass(found) and issubclass(found, HetPipeStrategy)):
        raise SettingError(
            f"strategy._target_={target} does not take strategy.{foreign[0]}, which is HetPipeStrategy's; for another"
            " strategy give its name to the Trainer, as in strategy=plain trainer.strategy=ddp."
        )


def _check_callbacks(callbacks: Any) -> None:
    """Refuse a callback that is no section: a wrong name on the command line makes such a one."""
    named = callbacks if isinstance(callbacks, dict) else {}
    known = [name for name, value in named.items() if value is None or is_section(value)]
    for name in [name for name in named if name not in known]:
        raise unknown(name, "trainer.callbacks", known, rest=first_key(named[name]))
