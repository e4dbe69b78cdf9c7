"""Checks of a composed configuration before anything is built: names and types of settings against signatures."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from omegaconf import DictConfig, OmegaConf

from lightning_hetpipe import settings
from lightning_hetpipe.cli.start_up import ConsoleScript
from lightning_hetpipe.cli.targets import YAML, ConfigSection, as_given, is_interpolation, is_section, items, sections
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.settings import Bounds, unknown

_LISTS = ("callbacks", "logger")
"""Arguments of the Trainer that may be sections by name, of which it gets a list."""


def check(
    config: DictConfig, program: ConsoleScript, needs: Sequence[str] = (), bounds: Mapping[str, Bounds] | None = None
) -> None:
    """Refuse settings that nothing reads, that are missing or of the wrong type, or whose `_target_` does not exist.

    Args:
        config: Composed.
        program: Whose configuration it is.
        needs: The sections that must be there.
        bounds: Bounds of numbers that the `_target_` does not declare, by their paths.

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
            choose = (
                "choose an experiment, such as experiment=digits" if "experiment" in program.groups else "leave it in"
            )
            raise SettingError(f"No {key} is configured; {choose}.")
        if not is_section(values[key]) or values[key]["_target_"] is None:
            example = "lightning_hetpipe.Cluster" if key == "cluster" else "the.dotted.path of what to build"
            raise SettingError(f"{key} has no _target_; give {key}._target_={example}.")
    for path in ("security", "strategy.wsp.security"):
        _refuse_token(config, path)
    for referring in (False, True):  # values before references to them, so that an error names where a value stands
        for section in found:
            _check_section(section, referring, bounds or {})


def first_key(value: Any) -> str:
    """The rest of a setting whose first word names nothing: its first key."""
    return f".{next(iter(value))!s}" if isinstance(value, dict) and value else ""


def _check_top(config: DictConfig, values: Mapping[str, Any], program: ConsoleScript) -> None:
    """Refuse what stands at the top and is neither read nor used by an interpolation, or is of the wrong type."""
    given = as_given(config)
    for key, node in given.items():
        misplaced = key == "experiment" or (isinstance(node, dict) and any(name in node for name in program.read))
        if key in program.settings or (key in program.groups and key != "experiment") or _is_used(str(key), given):
            continue
        if misplaced:
            raise SettingError(
                f"{key}{first_key(node)} is not read there; if a file of yours sets it, begin that file with the line"
                " '# @package _global_'."
            )
        raise unknown(str(key), "", program.read, rest=first_key(node))
    for key, hint in program.settings.items():
        if key in values:
            settings.check(key, values[key], hint, YAML)


def _refuse_token(config: DictConfig, path: str) -> None:
    """Refuse a token that is written out: Hydra saves configurations, and command lines can be read."""
    security = OmegaConf.select(config, path)
    token = security.get("token") if isinstance(security, DictConfig) else None
    if token is not None and not OmegaConf.is_interpolation(security, "token"):
        raise SettingError(
            f"{path}.token stands in the configuration, where others can read it; set HETPIPE_TOKEN instead."
        )


def _check_section(section: ConfigSection, referring: bool, bounds: Mapping[str, Bounds]) -> None:
    path, target = section.path, section.target
    if target is None:
        raise SettingError(f"{path}._target_=null names nothing to build; leave it out with {path}=null.")
    by_name = {key for key in _LISTS if isinstance(section.values.get(key), dict) and path == "trainer"}
    arguments = {
        key: value
        for key, value in section.values.items()
        if is_interpolation(section.given[key]) is referring and (key not in by_name or is_section(value))
    }
    declared = section.declared
    bounded = {
        name: Annotated[hint, bounds[f"{path}.{name}"]] if f"{path}.{name}" in bounds else hint
        for name, hint in declared.hints.items()
    }
    replace(declared, hints=bounded).check(arguments, path, target, YAML)
    if not section.partial:
        declared.check_whole(section.values, path, target)


def _is_used(key: str, node: Any) -> bool:
    if is_interpolation(node):
        return re.search(rf"\b{re.escape(key)}\b", node) is not None
    return any(_is_used(key, value) for _, _, value in items(node, ""))
