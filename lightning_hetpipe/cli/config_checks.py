"""Checks a composed configuration before anything is built: names and types of settings against signatures."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from inspect import isclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe.cli.config_sections import ConfigSection, as_given, is_interpolation, items, sections, written
from lightning_hetpipe.cli.console_script import TRAIN, ConsoleScript
from lightning_hetpipe.cli.kinds import expected, is_section
from lightning_hetpipe.cli.targets import TargetSignature, closest, locate
from lightning_hetpipe.errors import SettingError

# Below these Lightning divides by them, or trains on in ways that nobody can have meant, without a word.
_LEAST = {
    "accumulate_grad_batches": 1,
    "check_val_every_n_epoch": 1,
    "gradient_clip_val": 0,
    "log_every_n_steps": 0,
    "min_epochs": 0,
    "min_steps": 0,
    "num_sanity_val_steps": -1,
}

# What a strategy gets from the Trainer, which refuses to have it twice.
_TRAINERS = {
    "accelerator": "accelerator",
    "parallel_devices": "devices",
    "cluster_environment": "plugins",
    "checkpoint_io": "plugins",
    "precision_plugin": "precision",
}


def check(
    config: DictConfig, program: ConsoleScript = TRAIN, needs: Sequence[str] = ("model", "data", "trainer")
) -> None:
    """Refuse settings that nothing reads, that are missing or of the wrong type, or whose `_target_` does not exist.

    Args:
        config: Composed.
        program: Whose configuration it is.
        needs: The sections that must be there.

    Raises:
        SettingError: one sentence that names the setting and, where one is near, the name that was meant.
        OmegaConfBaseException: for an interpolation that cannot be resolved.
    """
    found = sections(config)
    values: Any = OmegaConf.to_container(config, resolve=True)
    _check_top(config, values, program)
    for missing in sorted(OmegaConf.missing_keys(config)):
        raise SettingError(f"{missing} has no value; give {missing}=...")
    for key in needs:
        if values.get(key) is None:
            raise SettingError(f"No {key} is configured; choose an experiment, such as experiment=digits.")
    for key in [*needs, "cluster"]:
        if values.get(key) is not None and (not is_section(values[key]) or values[key]["_target_"] is None):
            example = "lightning_hetpipe.Cluster" if key == "cluster" else "the.dotted.path of what to build"
            raise SettingError(f"{key} has no _target_; give {key}._target_={example}.")
    _check_seed(values.get("seed"))
    _check_checkpoint(values.get("ckpt_path"))
    trainer = values.get("trainer") or {}
    _check_strategy(values.get("strategy"), trainer)
    for flag, least in _LEAST.items():
        value = trainer.get(flag)
        if isinstance(value, int | float) and value < least:
            raise SettingError(f"trainer.{flag}={written(value)} must be at least {least}.")
    for security in ("security", "strategy.wsp.security"):
        _refuse_token(config, security)
    # Sections before those that refer to them, so that an error names the place where the setting stands.
    for section in sorted(found, key=lambda section: section.path.startswith("trainer")):
        _check_section(section)
    _check_callbacks(trainer.get("callbacks"))


def _check_top(config: DictConfig, values: Mapping[str, Any], program: ConsoleScript) -> None:
    """Refuse what stands at the top and is neither read nor used by an interpolation, or is of the wrong type."""
    given = as_given(config)
    for key, node in given.items():
        if key in program.read or _is_used(str(key), given):
            continue
        if key == "experiment" or (isinstance(node, dict) and any(name in node for name in program.read)):
            raise SettingError(
                f"{key}{_first_key(node)} is not read there; if a file of yours sets it, begin that file with the line"
                " '# @package _global_'."
            )
        raise unknown(str(key), "", program.read, rest=_first_key(node))
    for key, hint in program.settings.items():
        if key in values:
            _check_type(key, values[key], hint)


def check_arguments(path: str, arguments: Mapping[str, Any], signature: TargetSignature, owner: str) -> None:
    """Refuse names that ``owner`` does not take, and values of the wrong type."""
    for key, value in arguments.items():
        known = signature.parameters.get(key)
        if known is None and not signature.takes_any:
            raise unknown(key, path, list(signature.parameters), owner=owner)
        if known is not None and value is not known.default and key in signature.hints:
            _check_type(f"{path}.{key}", value, signature.hints[key], classes=signature.trusted)


def _refuse_token(config: DictConfig, path: str) -> None:
    """Refuse a token that is written out: Hydra saves configurations, and command lines can be read."""
    security = OmegaConf.select(config, path)
    token = security.get("token") if isinstance(security, DictConfig) else None
    if token is not None and not OmegaConf.is_interpolation(security, "token"):
        raise SettingError(
            f"{path}.token stands in the configuration, where others can read it; set HETPIPE_TOKEN instead."
        )


def unknown(key: str, path: str, known: list[str], *, owner: str | None = None, rest: str = "") -> SettingError:
    """The error for a key that nothing reads: `path.key` with `rest`, where `known` could have stood instead."""
    prefix = f"{path}." if path else ""
    if (near := closest(key, known)) is not None:
        return SettingError(f"{prefix}{key}{rest} is not a setting; did you mean {prefix}{near}{rest}?")
    place = owner or path or "the configuration"
    return SettingError(f"{prefix}{key}{rest} is not a setting; {place} has {', '.join(known) or 'none'}.")


def refused_argument(config: DictConfig, error: TypeError) -> SettingError | None:
    """The error for a key that a `_target_` took, as it takes any, and something behind it has refused; else None."""
    match = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    for section in sections(config) if match is not None else ():
        signature = section.signature
        if match is not None and signature.takes_any and match[1] in section.given.keys() - signature.parameters:
            return unknown(match[1], section.path, list(signature.parameters), owner=section.target)
    return None


def _check_section(section: ConfigSection) -> None:
    path, target = section.path, section.target
    if target is None:
        raise SettingError(f"{path}._target_=null names nothing to build; leave it out with {path}=null.")
    by_name = path == "trainer" and isinstance(section.values.get("callbacks"), dict)  # the Trainer gets a list of them
    arguments = {key: value for key, value in section.values.items() if not (by_name and key == "callbacks")}
    check_arguments(path, arguments, section.signature, target)
    for name, parameter in section.signature.parameters.items():
        if parameter.default is parameter.empty and name not in section.values and not section.partial:
            raise SettingError(f"{path}.{name} is missing, {target} needs it; give {path}.{name}=...")


def _check_type(path: str, value: Any, hint: Any, *, classes: bool = False) -> None:
    if (kind := expected(value, hint, classes=classes)) is not None:
        said = f"{path}._target_={value['_target_']}" if is_section(value) else f"{path}={written(value)}"
        raise SettingError(f"{said} must be {kind}.")


def _check_seed(seed: int | None) -> None:
    if seed is not None and not 0 <= seed < 2**32:  # what numpy takes
        raise SettingError(f"seed={seed} must be from 0 to {2**32 - 1}, or null to draw one.")


def _check_checkpoint(path: str | None) -> None:
    if path in (None, "best", "last", "hpc") or "://" in path or path.startswith("registry"):
        return
    if not Path(path).exists():
        raise SettingError(f"ckpt_path={path} does not exist; give the path of a checkpoint, or 'last'.")


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
    if not (isclass(found) and issubclass(found, HetPipeStrategy)):
        for key in [
            key for key in strategy if key in own.parameters.keys() - TargetSignature.of(found).parameters.keys()
        ]:
            raise SettingError(
                f"strategy.{key} is a setting of HetPipeStrategy, and strategy._target_={target} takes none of it; for"
                " another strategy give its name to the Trainer, as in strategy=plain trainer.strategy=ddp."
            )
    for key, flag in _TRAINERS.items():
        if not isinstance(value := strategy.get(key), dict | None):
            raise SettingError(f"strategy.{key}={value} comes from the Trainer; give trainer.{flag}=... instead.")


def _check_callbacks(callbacks: Any) -> None:
    """Refuse a callback that is no section: a wrong name on the command line makes such a one."""
    named = callbacks if isinstance(callbacks, dict) else {}
    known = [name for name, value in named.items() if value is None or is_section(value)]
    for name in [name for name in named if name not in known]:
        raise unknown(name, "trainer.callbacks", known, rest=_first_key(named[name]))


def _is_used(key: str, node: Any) -> bool:
    if is_interpolation(node):
        return re.search(rf"\b{re.escape(key)}\b", node) is not None
    return any(_is_used(key, value) for _, _, value in items(node, ""))


def _first_key(value: Any) -> str:
    """The rest of a setting whose first word names nothing: its first key."""
    return f".{next(iter(value))!s}" if isinstance(value, dict) and value else ""
