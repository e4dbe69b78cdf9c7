"""Checks of a composed configuration before anything is built: names and values of settings against declarations.

Settings of ours come first, without Lightning. Checks of other packages' sections import these packages.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from inspect import isclass
from typing import Annotated, Any, Literal

from omegaconf import DictConfig, OmegaConf

from lightning_hetpipe import settings
from lightning_hetpipe.cli.start_up import ConsoleScript
from lightning_hetpipe.cli.targets import (
    EARLY,
    STRATEGY,
    YAML,
    ConfigSection,
    as_given,
    is_interpolation,
    is_section,
    known_early,
    locate,
    nodes,
    sections,
)
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.launch.wsp_settings import WSPSettings
from lightning_hetpipe.settings import Bounds, Declared, declared, unknown

GROUPS = ("model", "data", "trainer", "callbacks", "logger", "strategy", "cluster", "experiment")
SETTINGS: Mapping[str, Any] = {
    "seed": Annotated[int | None, Bounds(0, 2**32 - 1)],  # what numpy takes
    "tags": list[str],
    "monitor": str | None,
    "monitor_mode": Literal["min", "max"],
    "output_dir": str,
}
"""Values at the top of all configurations with a Trainer."""

BUILT = ("model", "data", "trainer")
"""Sections that a run needs."""

BY_NAME = ("logger", "callbacks")
"""Lists among the Trainer's arguments. In a configuration their items have names, so that each can be overridden."""

_REFERENCE = re.compile(r"\$\{oc\.select:([\w.]+),.*\}")
_BOUNDS = {
    # Outside of these bounds, Lightning divides by zero, or silently trains in ways that nobody can have meant.
    "trainer.accumulate_grad_batches": Bounds(1),
    "trainer.check_val_every_n_epoch": Bounds(1),
    "trainer.gradient_clip_val": Bounds(0),
    "trainer.log_every_n_steps": Bounds(0),
    "trainer.min_epochs": Bounds(0),
    "trainer.min_steps": Bounds(0),
    "trainer.num_sanity_val_steps": Bounds(-1),
}


def check(config: DictConfig, program: ConsoleScript, needs: Sequence[str] = ()) -> None:
    """Refuse settings of ours that nothing reads, that are missing or of the wrong type, without Lightning.

    Raises:
        SettingError: if a setting is wrong, or a section of ``needs`` is missing. It suggests a near name, if any.
        OmegaConfBaseException: if an interpolation cannot be resolved. It names the key.
    """
    found = sections(config)
    values: Any = OmegaConf.to_container(config, resolve=True)
    _check_top(as_given(config), program)
    for missing in sorted(OmegaConf.missing_keys(config)):
        raise SettingError(f"{missing} has no value", f"give {missing}=...")
    for key in [*needs, *(["cluster"] if values.get("cluster") is not None else [])]:
        _check_needed(key, values.get(key), program)
    for path in ("security", "strategy.wsp.security"):
        _refuse_token(config, path)
    trainer = values.get("trainer") or {}
    if isinstance(strategy := values.get("strategy"), dict) and strategy.get("_target_") is None:
        if isinstance(asked := trainer.get("strategy"), dict) and asked.get("_target_") is None:
            raise SettingError("strategy has no _target_", "choose strategy=hetpipe, or strategy=plain")
        _of_our_strategy().check(strategy, "strategy", "HetPipeStrategy", YAML)
    for section in _values_first(found):
        _check_section(*section, known_early(section[0].target))
    for key, hint in program.settings.items():
        if key in values:
            elsewhere = _REFERENCE.fullmatch(str(as_given(config)[key]))
            settings.check(elsewhere[1] if elsewhere else key, values[key], hint, YAML)
    for name in BY_NAME:
        _check_named(name, trainer.get(name), by_group=is_interpolation(as_given(config).get("trainer", {}).get(name)))


def check_targets(config: DictConfig) -> None:
    """Import every `_target_`. Raise SettingError for arguments that it does not take."""
    for section in _values_first(sections(config)):
        _check_strategy(section[0])
        _check_section(*section, section[0].declared)


def synchronisation(config: DictConfig) -> WSPSettings:
    """Return the checked settings of ``strategy.wsp``, or defaults if something other than a WSPCallback is there.

    Raises:
        SettingError: if settings exclude each other.
    """
    from lightning_hetpipe.strategy.arguments import WSPArguments  # only here: servers and hosts do without

    section: Any = OmegaConf.to_container(OmegaConf.select(config, "strategy.wsp") or DictConfig({}), resolve=True)
    is_ours = section.pop("_target_", None) == "lightning_hetpipe.WSPCallback"
    return WSPArguments(**section if is_ours else {}).settings


def first_key(value: Any) -> str:
    """Return the first key of a mapping as ``.key``, to append to a setting's name, else an empty string."""
    return f".{next(iter(value))!s}" if isinstance(value, dict) and value else ""


def _check_top(given: Mapping[str, Any], program: ConsoleScript) -> None:
    """Refuse keys at the top that are neither read nor used by an interpolation."""
    for key, node in given.items():
        misplaced = key == "experiment" or (isinstance(node, dict) and any(name in node for name in program.read))
        if key in program.settings or (key in program.groups and key != "experiment") or _is_used(str(key), given):
            continue
        if misplaced:
            raise SettingError(
                f"{key}{first_key(node)} is not read there",
                "if a file of yours sets it, begin that file with the line '# @package _global_'",
            )
        raise unknown_at_top(str(key), program, first_key(node))


def _of_our_strategy() -> Declared:
    """Return the declaration of the arguments of HetPipeStrategy."""
    return declared(locate(EARLY[STRATEGY]))


def unknown_at_top(key: str, program: ConsoleScript, rest: str = "") -> SettingError:
    """Return the error for a ``key`` at the top that nothing reads there, with keys below it in ``rest``.

    If the strategy has a setting of that name, the error suggests that setting.
    """
    if "strategy" in program.groups and key in _of_our_strategy().parameters:
        return SettingError(f"{key}{rest} is not a setting", f"did you mean strategy.{key}{rest}?")
    return unknown(key, "", program.read, rest=rest)


def _check_needed(key: str, value: Any, program: ConsoleScript) -> None:
    if value is None:
        can_choose = "experiment" in program.groups
        choose = "choose an experiment, such as experiment=digits" if can_choose else "leave it in"
        raise SettingError(f"No {key} is configured", choose)
    if not is_section(value) or value["_target_"] is None:
        example = "lightning_hetpipe.Cluster" if key == "cluster" else "the.dotted.path of what to build"
        raise SettingError(f"{key} has no _target_", f"give {key}._target_={example}.")


def _refuse_token(config: DictConfig, path: str) -> None:
    """Refuse a token as plain text, because Hydra saves configurations, and others can read command lines."""
    security = OmegaConf.select(config, path)
    token = security.get("token") if isinstance(security, DictConfig) else None
    if token is not None and not OmegaConf.is_interpolation(security, "token"):
        stands = f"{path}.token stands in the configuration, where others can read it"
        raise SettingError(stands, "set HETPIPE_TOKEN instead")


def _values_first(found: Sequence[ConfigSection]) -> list[tuple[ConfigSection, bool]]:
    """Return each section for its values, then again for its interpolations, so that errors name a value's origin."""
    return [(section, referring) for referring in (False, True) for section in found]


def _check_section(section: ConfigSection, referring: bool, own: Declared | None) -> None:
    path, target = section.path, section.target
    if target is None:
        raise SettingError(f"{path}._target_=null names nothing to build", f"leave it out with {path}=null")
    if own is None:
        return
    by_name = {key for key in BY_NAME if isinstance(section.values.get(key), dict) and path == "trainer"}
    arguments = {
        key: value
        for key, value in section.values.items()
        if is_interpolation(section.given[key]) is referring and (key not in by_name or is_section(value))
    }
    bounds = {name: _BOUNDS[f"{path}.{name}"] for name in own.hints if f"{path}.{name}" in _BOUNDS}
    bounded = {name: Annotated[hint, bounds[name]] if name in bounds else hint for name, hint in own.hints.items()}
    replace(own, hints=bounded).check(arguments, path, target, YAML)
    if not section.partial:
        own.check_whole(section.values, path, target)


def _check_strategy(section: ConfigSection) -> None:
    """Refuse settings of HetPipeStrategy in the section of another strategy."""
    if section.path != "strategy" or section.target is None or section.target == STRATEGY:
        return
    ours, found = declared(locate(STRATEGY)), section.declared
    foreign = [key for key in section.values if key in ours.parameters.keys() - found.parameters.keys()]
    if foreign and not (isclass(found.owner) and issubclass(found.owner, ours.owner)):  # type: ignore[arg-type]
        raise SettingError(
            f"strategy._target_={section.target} does not take strategy.{foreign[0]}, which is HetPipeStrategy's",
            "for another strategy give its name to the Trainer, as in strategy=plain trainer.strategy=ddp",
        )


def _check_named(group: str, given: Any, *, by_group: bool) -> None:
    """Refuse sections by name outside of their group, and names in the group without a section."""
    if not isinstance(given, dict) or is_section(given):
        return
    if not by_group:
        setting = f"{group}{first_key(given)}"
        raise SettingError(f"trainer.{setting} is not read there", f"give {setting}=...")
    known = [name for name, value in given.items() if value is None or is_section(value)]
    for name in [name for name in given if name not in known]:
        raise unknown(name, group, known, rest=first_key(given[name]))


def _is_used(key: str, given: Any) -> bool:
    word = re.compile(rf"\b{re.escape(key)}\b")
    return any(is_interpolation(text) and word.search(text) is not None for _, _, text, _ in nodes(given, given))
