"""Targets: the class or function that a `_target_` names, its arguments, and the object that it makes.

The sections of a configuration are its mappings with a `_target_`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, TypeVar

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from lightning_hetpipe.errors import SettingError, closest
from lightning_hetpipe.settings import Declared, Style, declared

_HYDRA = {"_target_", "_partial_", "_recursive_", "_convert_", "_args_"}
_PLAIN: dict[Any, str] = {None: "null", True: "true", False: "false"}
STRATEGY = "lightning_hetpipe.HetPipeStrategy"
EARLY = {
    STRATEGY: "lightning_hetpipe.strategy.arguments.HetPipeArguments",
    "lightning_hetpipe.WSPCallback": "lightning_hetpipe.strategy.arguments.WSPArguments",
    **{name: name for name in (f"lightning_hetpipe.{each}" for each in ("Cluster", "Device", "Link", "Node"))},
}
"""Declaration of each of our public classes' arguments that can be imported without Lightning."""


def locate(target: str, path: str = "") -> Callable[..., Any]:
    """Import the class or function at dotted path ``target``, the `_target_` of the section at ``path``.

    Raises:
        SettingError: if ``target`` does not exist. Errors inside an imported module are raised unchanged.
    """
    found: Any = None
    name = ""
    for part in target.split("."):
        parent, name = name, f"{name}.{part}" if name else part
        if parent and hasattr(found, part):
            found = getattr(found, part)
        elif parent and not isinstance(found, ModuleType):
            raise _not_found(target, path, f"{parent} has no {part}", found, part)
        else:
            try:
                found = import_module(name)
            except (ModuleNotFoundError, ValueError) as error:
                if isinstance(error, ModuleNotFoundError) and error.name != name:
                    raise  # the module exists, and something that it imports is missing
                reason = f"{parent} has no {part}" if parent else f"there is no module {part}"
                raise _not_found(target, path, reason, found, part) from None
    if not callable(found):
        raise SettingError(f"{path}._target_={target} is a {type(found).__name__}; name a class or a function.")
    return found  # type: ignore[no-any-return]


def known_early(target: str | None) -> Declared | None:
    """Return the declaration of ``target``, or None if that needs Lightning."""
    return declared(locate(EARLY[target])) if target in EARLY else None


def _not_found(target: str, path: str, reason: str, parent: object, part: str) -> SettingError:
    near = closest(part, [name for name in dir(parent) if not name.startswith("_")]) if parent is not None else None
    advice = "it is looked for in the working directory and among the installed packages"
    if near is not None:
        advice = f"did you mean {target.removesuffix(part) if target.endswith(part) else ''}{near}?"
    return SettingError(f"{path}._target_={target} cannot be found, {reason}", advice)


T = TypeVar("T")


def built(config: DictConfig, path: str, kind: type[T], **arguments: Any) -> T:
    """Build the section at ``path``, which must make a ``kind``.

    Raises:
        SettingError: if it makes something else. Errors of the section's `_target_` are raised unchanged.
    """
    node: DictConfig = OmegaConf.select(config, path)
    try:
        made = instantiate(node, _convert_="all", **arguments)
    except InstantiationException as error:
        cause: BaseException = error
        while isinstance(cause, InstantiationException) and cause.__cause__ is not None:
            cause = cause.__cause__
        raise cause from None
    if not isinstance(made, kind):
        other, package = type(made), kind.__module__.partition(".")[0]
        raise SettingError(
            f"{path}._target_={node['_target_']} makes a {other.__module__}.{other.__qualname__}, but {path} must be"
            f" a {package}.{kind.__name__}; name such a class, or a function that makes one."
        )
    return made


@dataclass(frozen=True)
class ConfigSection:
    """Mapping with a `_target_` at a ``path`` such as ``trainer.logger``.

    The arguments are in ``given`` with interpolations as text, and in ``values`` with interpolations resolved. With
    ``partial``, Hydra gets further arguments elsewhere.
    """

    path: str
    given: Mapping[str, Any]
    values: Mapping[str, Any]
    target: str | None
    partial: bool

    @property
    def declared(self) -> Declared:
        return declared(locate(str(self.target), self.path))

    @property
    def loaded(self) -> Declared | None:
        """Declaration of the target, or None if that needs Lightning, which is not loaded yet."""
        return self.declared if "lightning.pytorch" in sys.modules else known_early(self.target)


def sections(config: DictConfig) -> list[ConfigSection]:
    """List every section where it is written, but not where an interpolation repeats it.

    Raises:
        OmegaConfBaseException: if an interpolation cannot be resolved. It names the key.
    """
    found = []
    for path, _, given, value in nodes(as_given(config), OmegaConf.to_container(config, resolve=True)):
        if is_section(given):
            written, resolved = ({str(k): v for k, v in each.items() if k not in _HYDRA} for each in (given, value))
            partial = bool(value.get("_partial_") or value.get("_args_"))
            found.append(ConfigSection(path, written, resolved, value["_target_"], partial))
    return found


def as_given(config: DictConfig) -> Any:
    """Return the configuration as plain dicts and lists, with interpolations as text."""
    return OmegaConf.to_container(config, resolve=False)


def hyperparameters(config: DictConfig) -> dict[str, Any]:
    """Return the settings of a run for its loggers: every section, and the values at the top.

    Keep as text the interpolations that repeat a section or read the environment, which may hold secrets.
    """
    return _logged(as_given(config), OmegaConf.to_container(config, resolve=True))  # type: ignore[no-any-return]


def _logged(given: Any, value: Any) -> Any:
    if isinstance(given, dict):
        return {str(key): _logged(given[key], value[key]) for key in given}
    keeps = is_interpolation(given) and (isinstance(value, dict | list) or "oc.env" in given)
    return given if keeps else value


def is_interpolation(value: Any) -> bool:
    return isinstance(value, str) and "${" in value


def nodes(given: Any, values: Any, path: str = "") -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield path, key, given value and resolved value of every item of a mapping or list, at every depth."""
    keys = [*given] if isinstance(given, dict) else range(len(given)) if isinstance(given, list) else ()
    for key in keys:
        inner = f"{path}.{key}" if path else str(key)
        yield inner, key, given[key], values[key]
        yield from nodes(given[key], values[key], inner)


def written(value: Any) -> str:
    """Return ``value`` as written in YAML."""
    if value is None or isinstance(value, bool):
        return _PLAIN[value]
    return str(value)


def is_section(value: Any) -> bool:
    return isinstance(value, dict) and "_target_" in value


def _made(value: Any) -> Any:
    """Return the class that a section makes, or Any if it is unknown. Return other values unchanged."""
    if not is_section(value):
        return value
    made = None if value.get("_partial_") else locate(str(value["_target_"]))
    return made if inspect.isclass(made) else Any


YAML = Style(
    lambda path, value: f"{path}._target_={value['_target_']}" if is_section(value) else f"{path}={written(value)}",
    _PLAIN,
    _made,
    builds=False,
)
"""Style of errors in the words of a configuration."""
