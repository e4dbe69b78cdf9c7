"""Checks a composed configuration before anything is built from it: every key must be one that somebody reads."""

from __future__ import annotations

import re
from collections.abc import Sequence
from inspect import isclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe.cli.kinds import Built, expected, hints
from lightning_hetpipe.cli.program import TRAIN, Program
from lightning_hetpipe.cli.targets import closest, locate, parameters
from lightning_hetpipe.cli.wording import sections, unresolved, written
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

_OWN = ("lightning", "lightning_hetpipe")  # the packages whose annotations are known to hold

_HYDRA = {"_target_", "_partial_", "_recursive_", "_convert_", "_args_"}


def check(config: DictConfig, program: Program = TRAIN, needs: Sequence[str] = ("model", "data", "trainer")) -> None:
    """Finds settings that nothing would read, that are missing, or whose `_target_` does not exist.

    Args:
        config: Composed.
        program: Whose configuration it is.
        needs: The sections that must be there.

    Raises:
        SettingError: one sentence that names the setting and, where one is near, the name that was meant.
        OmegaConfBaseException: for an interpolation that cannot be resolved.
    """
    OmegaConf.to_container(config, resolve=True)  # raises, with the key, where an interpolation leads nowhere
    for key in config:
        _check_top(str(key), config, program.read)
    _check_seed(config.get("seed"))
    _check_kind("output_dir", config.get("output_dir"), str, "")
    _check_kind("test", config.get("test", True), bool, True)
    _check_checkpoint(config.get("ckpt_path"))
    for missing in sorted(OmegaConf.missing_keys(config)):
        raise SettingError(f"{missing} has no value; give {missing}=...")
    for key in needs:
        node = config.get(key)
        if node is None:
            raise SettingError(f"No {key} is configured; choose an experiment, such as experiment=digits.")
        if not isinstance(node, DictConfig) or node.get("_target_") is None:
            raise SettingError(f"{key} has no _target_; give {key}._target_=the.dotted.path of what to build.")
    _check_cluster(config.get("cluster"))
    _check_strategy(config)
    _check_least(config)
    _check_secret(config)
    # Sections before those that refer to them, so that an error names the place where the setting stands.
    for key in sorted(map(str, config), key=lambda name: name == "trainer"):
        _walk(config, key, key)


def _check_top(key: str, config: DictConfig, read: Sequence[str]) -> None:
    """At the top a key must be read here, or elsewhere in the configuration by an interpolation."""
    if key in read or _interpolated(key, OmegaConf.to_container(config, resolve=False)):
        return
    node, rest = config[key], _first_key(config[key])
    if key == "experiment" or (isinstance(node, DictConfig) and any(name in node for name in read)):
        raise SettingError(
            f"{key}{rest} is not read there; if a file of yours sets it, begin that file with the line"
            " '# @package _global_'."
        )
    raise unknown(key, "", list(read), rest=rest)


def _check_seed(seed: Any) -> None:
    _check_kind("seed", seed, int | None, None)
    if seed is not None and not 0 <= seed < 2**32:  # what numpy takes
        raise SettingError(f"seed={seed} must be from 0 to {2**32 - 1}, or null to draw one.")


def _check_cluster(cluster: Any) -> None:
    if cluster is not None and (not isinstance(cluster, DictConfig) or cluster.get("_target_") is None):
        raise SettingError(
            "cluster has no _target_; begin the file with '_target_: lightning_hetpipe.Cluster', or give"
            " cluster._target_=lightning_hetpipe.Cluster."
        )


def _check_strategy(config: DictConfig) -> None:
    """The strategy's section holds HetPipeStrategy's settings; also where another one is asked for, and unasked."""
    strategy, asked = config.get("strategy"), config.trainer.get("strategy")
    if not isinstance(strategy, DictConfig):
        return
    own = parameters(HetPipeStrategy)[0]
    target = strategy.get("_target_")
    if target is None:
        if isinstance(asked, DictConfig) and asked.get("_target_") is None:
            raise SettingError("strategy has no _target_; choose strategy=hetpipe, or strategy=plain.")
        for key in map(str, strategy):
            if key not in own:
                raise unknown(key, "strategy", list(own))
        return
    found = locate(str(target), "strategy")
    known = parameters(found)[0]
    if not (isclass(found) and issubclass(found, HetPipeStrategy)):
        for key in map(str, strategy):
            if key in own and key not in known:
                raise SettingError(
                    f"strategy.{key} is a setting of HetPipeStrategy, and strategy._target_={target} takes none of it;"
                    " for another strategy give its name to the Trainer, as in strategy=plain trainer.strategy=ddp."
                )
    for key, flag in _TRAINERS.items():
        value = strategy.get(key)
        if value is not None and not isinstance(value, DictConfig):
            raise SettingError(f"strategy.{key}={value} comes from the Trainer; give trainer.{flag}=... instead.")


def _check_least(config: DictConfig) -> None:
    for flag, least in _LEAST.items():
        value = config.trainer.get(flag)
        if isinstance(value, int | float) and value < least:
            raise SettingError(f"trainer.{flag}={written(value)} must be at least {least}.")


def _check_secret(config: DictConfig) -> None:
    """Hydra saves configurations, and command lines can be read."""
    security = OmegaConf.select(config, "strategy.wsp.security")
    if not isinstance(security, DictConfig) or "token" not in security:
        return
    if not OmegaConf.is_interpolation(security, "token") and security.token is not None:
        raise SettingError(
            "strategy.wsp.security.token stands in the configuration, where others can read it; set HETPIPE_TOKEN"
            " instead."
        )


def _check_checkpoint(path: Any) -> None:
    _check_kind("ckpt_path", path, str | None, None)
    if path in (None, "best", "last", "hpc") or "://" in path or path.startswith("registry"):
        return
    if not Path(path).exists():
        raise SettingError(f"ckpt_path={path} does not exist; give the path of a checkpoint, or 'last'.")


def _interpolated(key: str, value: Any) -> bool:
    if isinstance(value, dict):
        return any(_interpolated(key, item) for item in value.values())
    if isinstance(value, list):
        return any(_interpolated(key, item) for item in value)
    return isinstance(value, str) and "${" in value and re.search(rf"\b{re.escape(key)}\b", value) is not None


def _walk(parent: DictConfig | ListConfig, key: Any, path: str) -> None:
    """Checks the node at `path` and all that it holds; what an interpolation points to is checked where it stands."""
    node = parent[key]
    if OmegaConf.is_interpolation(parent, key):
        return
    if isinstance(node, ListConfig):
        for index in range(len(node)):
            _walk(node, index, f"{path}.{index}")
    elif isinstance(node, DictConfig):
        if "_target_" in node and node["_target_"] is None:
            raise SettingError(f"{path}._target_=null names nothing to build; leave it out with {path}=null.")
        if node.get("_target_") is not None:
            _check_arguments(node, path)
        if path == "trainer.callbacks":
            _check_callbacks(node, path)
        for name in node:
            _walk(node, name, f"{path}.{name!s}")


def _check_arguments(node: DictConfig, path: str) -> None:
    """Every key must be an argument of the node's `_target_`, and every argument it cannot do without a key."""
    target = str(node["_target_"])
    found = locate(target, path)
    known, takes_any = parameters(found)
    annotations = hints(found)
    classes = found.__module__.partition(".")[0] in _OWN
    for key in map(str, node):
        if key in _HYDRA:
            continue
        if key in known:
            if f"{path}.{key}" == "trainer.callbacks" and isinstance(node[key], DictConfig):
                continue  # by name, here; the Trainer gets a list of them
            value = _value(node[key], f"{path}.{key}")
            _check_kind(f"{path}.{key}", value, annotations.get(key), known[key].default, classes=classes)
        elif not takes_any:
            raise unknown(key, path, list(known), owner=target)
    if node.get("_partial_") or node.get("_args_"):
        return
    for name, parameter in known.items():
        if parameter.default is parameter.empty and name not in node:
            raise SettingError(f"{path}.{name} is missing, {target} needs it; give {path}.{name}=...")


def _check_kind(path: str, value: Any, hint: Any, default: Any, *, classes: bool = False) -> None:
    if value is not default and (kind := expected(value, hint, classes=classes)) is not None:
        is_section = isinstance(value, Built)
        raise SettingError(f"{path}{'._target_' if is_section else ''}={written(value)} must be {kind}.")


def _value(node: Any, path: str) -> Any:
    """What `kinds.expected` can judge: plain values, lists and dicts of them, and what a `_target_` will be."""
    if isinstance(node, ListConfig):
        return [_value(item, f"{path}.{index}") for index, item in enumerate(node)]
    if not isinstance(node, DictConfig):
        return node
    if (target := node.get("_target_")) is None:
        return OmegaConf.to_container(node)
    found = None if node.get("_partial_") else locate(str(target), path)
    return Built(found if isclass(found) else None)


def refused_argument(config: DictConfig, error: TypeError) -> SettingError | None:
    """The error for a key that a `_target_` took, as it takes any, and something behind it has refused; else None."""
    match = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    if match is None:
        return None
    for path, node in sections(unresolved(config)):
        target = node["_target_"]
        known, takes_any = parameters(locate(target, path))
        if takes_any and match[1] in node and match[1] not in known:
            return unknown(match[1], path, list(known), owner=target)
    return None


def _check_callbacks(node: DictConfig, path: str) -> None:
    callbacks = [
        str(name)
        for name, value in node.items()
        if value is None or (isinstance(value, DictConfig) and "_target_" in value)
    ]
    for name, value in node.items():
        if str(name) not in callbacks:
            raise unknown(str(name), path, callbacks, rest=_first_key(value))


def _first_key(value: Any) -> str:
    """What a person wrote after a section's name, if the value is that section."""
    return f".{next(iter(value))!s}" if isinstance(value, DictConfig) and len(value) else ""


def unknown(key: str, path: str, known: list[str], *, owner: str | None = None, rest: str = "") -> SettingError:
    """The error for a key that nothing reads: `path.key` with `rest`, where `known` could have stood instead."""
    prefix = f"{path}." if path else ""
    near = closest(key, known)
    if near is not None:
        return SettingError(f"{prefix}{key}{rest} is not a setting; did you mean {prefix}{near}{rest}?")
    place = owner or path or "the configuration"
    return SettingError(f"{prefix}{key}{rest} is not a setting; {place} has {', '.join(known) or 'none'}.")
