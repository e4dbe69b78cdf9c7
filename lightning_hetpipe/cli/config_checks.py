"""Checks of a composed configuration before anything is built: names and types of settings against signatures."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from omegaconf import DictConfig, OmegaConf

from lightning_hetpipe.cli.start_up import ConsoleScript
from lightning_hetpipe.cli.targets import (
    ConfigSection,
    TargetSignature,
    as_given,
    closest,
    is_interpolation,
    items,
    locate,
    sections,
    written,
)
from lightning_hetpipe.errors import SettingError

Bounds = Mapping[str, tuple[float, float]]
"""The least and the most that a setting may be, by its path."""
_LISTS = ("callbacks", "logger")
"""Arguments of the Trainer that may be sections by name, of which it gets a list."""
_OPTIONAL = {"seed"}
"""Settings with bounds that may be null as well."""


def check(config: DictConfig, program: ConsoleScript, needs: Sequence[str] = (), bounds: Bounds | None = None) -> None:
    """Refuse settings that nothing reads, that are missing or of the wrong type, or whose `_target_` does not exist.

    Args:
        config: Composed.
        program: Whose configuration it is.
        needs: The sections that must be there.
        bounds: Of numbers.

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
    for path, (least, most) in (bounds or {}).items():
        value = OmegaConf.select(config, path)
        if isinstance(value, int | float) and not least <= value <= most:
            allowed = f"at least {least}" if most == math.inf else f"from {least} to {most}"
            optional = ", or null" if path in _OPTIONAL else ""
            raise SettingError(f"{path}={written(value)} must be {allowed}{optional}.")
    for path in ("security", "strategy.wsp.security"):
        _refuse_token(config, path)
    # Sections before those that refer to them, so that an error names the place where the setting stands.
    for section in sorted(found, key=lambda section: section.path.startswith("trainer")):
        _check_section(section)


def check_arguments(path: str, arguments: Mapping[str, Any], signature: TargetSignature, owner: str) -> None:
    """Refuse names that ``owner`` does not take, and values of the wrong type."""
    for key, value in arguments.items():
        known = signature.parameters.get(key)
        if known is None and not signature.takes_any:
            raise unknown(key, path, list(signature.parameters), owner=owner)
        if known is not None and value is not known.default and key in signature.hints:
            _check_type(f"{path}.{key}", value, signature.hints[key], classes=signature.trusted)


def unknown(key: str, path: str, known: list[str], *, owner: str | None = None, rest: str = "") -> SettingError:
    """The error for a key that nothing reads: `path.key` with `rest`, where `known` could have stood instead."""
    prefix = f"{path}." if path else ""
    if (near := closest(key, known)) is not None:
        return SettingError(f"{prefix}{key}{rest} is not a setting; did you mean {prefix}{near}{rest}?")
    place = owner or path or "the configuration"
    return SettingError(f"{prefix}{key}{rest} is not a setting; {place} has {', '.join(known) or 'none'}.")


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
            _check_type(key, values[key], hint, classes=True)


def _refuse_token(config: DictConfig, path: str) -> None:
    """Refuse a token that is written out: Hydra saves configurations, and command lines can be read."""
    security = OmegaConf.select(config, path)
    token = security.get("token") if isinstance(security, DictConfig) else None
    if token is not None and not OmegaConf.is_interpolation(security, "token"):
        raise SettingError(
            f"{path}.token stands in the configuration, where others can read it; set HETPIPE_TOKEN instead."
        )


def _check_section(section: ConfigSection) -> None:
    path, target = section.path, section.target
    if target is None:
        raise SettingError(f"{path}._target_=null names nothing to build; leave it out with {path}=null.")
    by_name = {key for key in _LISTS if isinstance(section.values.get(key), dict) and path == "trainer"}
    arguments = {key: value for key, value in section.values.items() if key not in by_name or is_section(value)}
    check_arguments(path, arguments, section.signature, target)
    for name, parameter in section.signature.parameters.items():
        if parameter.default is parameter.empty and name not in section.values and not section.partial:
            raise SettingError(f"{path}.{name} is missing, {target} needs it; give {path}.{name}=...")


def _check_type(path: str, value: Any, hint: Any, *, classes: bool = False) -> None:
    if (kind := expected(value, hint, classes=classes)) is not None:
        said = f"{path}._target_={value['_target_']}" if is_section(value) else f"{path}={written(value)}"
        raise SettingError(f"{said} must be {kind}.")


def _is_used(key: str, node: Any) -> bool:
    if is_interpolation(node):
        return re.search(rf"\b{re.escape(key)}\b", node) is not None
    return any(_is_used(key, value) for _, _, value in items(node, ""))


_NAMES: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    NoneType: "null",
}
_IMPLIED = {float: int, str: Path}
"""Types that another one implies: a number may be whole, a path is text."""


def expected(value: Any, hint: Any, *, classes: bool = False) -> str | None:
    """Describe what ``hint`` wants where ``value`` is something else; None where it fits, or nobody can tell.

    Args:
        value: Plain: a section is a mapping with a `_target_`.
        hint: The annotation. Those that are made of bool, int, float, str, None and Literal are judged.
        classes: Judge annotations that name classes and containers, too.
    """
    members = _members(hint)
    if not all(_is_plain(member) or (classes and _is_class(member)) for member in members):
        return None
    if is_section(value) and not classes:
        return None
    try:
        fits = any(_fits(value, member) for member in members)
    except TypeError:  # a protocol that cannot be asked
        return None
    return None if fits else _words(members)


def is_section(value: Any) -> bool:
    return isinstance(value, dict) and "_target_" in value


def _members(hint: Any) -> list[Any]:
    if get_origin(hint) in (Union, UnionType):
        return [member for each in get_args(hint) for member in _members(each)]
    return [hint]


def _is_plain(member: Any) -> bool:
    return member in _NAMES or get_origin(member) is Literal


def _is_class(member: Any) -> bool:
    """A class, or a container such as list[int]; not a type variable or a signature."""
    kind = get_origin(member) or member
    if not inspect.isclass(kind) or kind in (Any, object, type, Callable):
        return False
    return kind is member or issubclass(kind, Iterable)


def _fits(value: Any, member: Any) -> bool:
    kind = get_origin(member) or member
    if kind is Literal:
        return value in get_args(member)
    if is_section(value):
        made = None if value.get("_partial_") else locate(str(value["_target_"]))
        return not inspect.isclass(made) or issubclass(made, (int, float) if kind is float else kind)
    if isinstance(value, dict):
        return issubclass(kind, Mapping)
    if isinstance(value, list):  # YAML has no tuples
        return issubclass(kind, Iterable) and not issubclass(kind, str | Mapping) and _items_fit(value, member)
    if isinstance(value, bool) and kind in (int, float):
        return False
    is_generic = kind is not member  # Iterable[str] does not mean a text's letters
    return isinstance(value, (int, float) if kind is float else kind) and not (is_generic and isinstance(value, str))


def _items_fit(values: list[Any], member: Any) -> bool:
    """Return whether a list's items are what `list[int]`, `tuple[float, float]` or a bare `list` says."""
    hints = [hint for hint in get_args(member) if hint is not ...]
    if len(hints) > 1 and len(hints) != len(values):
        return False
    pairs = zip(values, hints * len(values) if len(hints) == 1 else hints, strict=False)
    return all(expected(value, hint, classes=True) is None for value, hint in pairs)


def _words(members: list[Any]) -> str:
    implied = [_IMPLIED.get(member) for member in members]
    return " or ".join(dict.fromkeys(word for each in members if each not in implied for word in _word(each)))


def _word(member: Any) -> list[str]:
    kind = get_origin(member) or member
    if kind is Literal:
        return [repr(value) for value in get_args(member)]
    if member in _NAMES:
        return [_NAMES[member]]
    if not inspect.isclass(kind):
        return ["anything"]
    if issubclass(kind, Mapping):
        return ["a mapping"]
    if not get_args(member):
        return [f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__}"]
    items = [_words(_members(hint)) for hint in get_args(member) if hint is not ...]
    return [f"[{', '.join(items)}{', ...' if len(items) == 1 else ''}]"]
