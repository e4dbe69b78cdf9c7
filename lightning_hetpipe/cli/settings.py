"""Checks a composed configuration before anything is built from it: every key must be one that somebody reads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from lightning_hetpipe.cli.kinds import expected, hints
from lightning_hetpipe.cli.targets import closest, locate, parameters
from lightning_hetpipe.errors import SettingError

READ = ("model", "data", "trainer", "strategy", "cluster", "seed", "test", "ckpt_path", "output_dir")
"""What stands at the top of the configuration and is read there."""

_HYDRA = {"_target_", "_partial_", "_recursive_", "_convert_", "_args_"}


def check(config: DictConfig) -> None:
    """Finds settings that nothing would read, that are missing, or whose `_target_` does not exist.

    Raises:
        SettingError: one sentence that names the setting and, where one is near, the name that was meant.
        OmegaConfBaseException: for an interpolation that cannot be resolved.
    """
    for key in config:
        _check_top(str(key), config)
    _check_kind("seed", config.get("seed"), int | None, None)
    _check_kind("test", config.get("test", True), bool, True)
    _check_checkpoint(config.get("ckpt_path"))
    for missing in sorted(OmegaConf.missing_keys(config)):
        raise SettingError(f"{missing} has no value; give {missing}=...")
    for key in ("model", "data", "trainer"):
        node = config.get(key)
        if node is None:
            raise SettingError(f"No {key} is configured; choose an experiment, such as experiment=digits.")
        if not isinstance(node, DictConfig) or node.get("_target_") is None:
            raise SettingError(f"{key} has no _target_; give {key}._target_=the.dotted.path of what to build.")
    # Sections before those that refer to them, so that an error names the place where the setting stands.
    for key in sorted(map(str, config), key=lambda name: name == "trainer"):
        _walk(config, key, key)


def _check_top(key: str, config: DictConfig) -> None:
    """At the top a key must be read here, or elsewhere in the configuration by an interpolation."""
    if key in READ or _interpolated(key, OmegaConf.to_container(config, resolve=False)):
        return
    raise unknown(key, "", list(READ), rest=_first_key(config[key]))


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
    node = parent[key]  # raises, naming the key, where an interpolation leads nowhere
    if OmegaConf.is_interpolation(parent, key):
        return
    if isinstance(node, ListConfig):
        for index in range(len(node)):
            _walk(node, index, f"{path}.{index}")
    elif isinstance(node, DictConfig):
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
    for key in map(str, node):
        if key in _HYDRA:
            continue
        if key in known:
            _check_kind(f"{path}.{key}", node[key], annotations.get(key), known[key].default)
        elif not takes_any:
            raise unknown(key, path, list(known), owner=target)
    if node.get("_partial_") or node.get("_args_"):
        return
    for name, parameter in known.items():
        if parameter.default is parameter.empty and name not in node:
            raise SettingError(f"{path}.{name} is missing, {target} needs it; give {path}.{name}=...")


def _check_kind(path: str, value: Any, hint: Any, default: Any) -> None:
    if value is not default and (kind := expected(value, hint)) is not None:
        raise SettingError(f"{path}={'null' if value is None else value} must be {kind}.")


def refused_argument(config: DictConfig, error: TypeError) -> SettingError | None:
    """The error for a key that a `_target_` took, as it takes any, and something behind it has refused; else None."""
    match = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    if match is None:
        return None
    for path, node in _sections(config, ""):
        target = str(node["_target_"])
        known, takes_any = parameters(locate(target, path))
        if takes_any and match[1] in node and match[1] not in known:
            return unknown(match[1], path, list(known), owner=target)
    return None


def _sections(node: DictConfig, path: str) -> Iterator[tuple[str, DictConfig]]:
    """Every section below `node` that has a `_target_`, with its path."""
    for name in node:
        value = node[name]
        if isinstance(value, DictConfig):
            below = f"{path}.{name!s}" if path else str(name)
            if value.get("_target_") is not None:
                yield below, value
            yield from _sections(value, below)


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
