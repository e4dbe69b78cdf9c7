"""The sections of a configuration: mappings with a `_target_`, which names what they are the arguments of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_hetpipe.cli.targets import TargetSignature, locate

_HYDRA = {"_target_", "_partial_", "_recursive_", "_convert_", "_args_"}
_PLAIN = {None: "null", True: "true", False: "false"}


@dataclass(frozen=True)
class ConfigSection:
    """A mapping that has a `_target_`.

    Attributes:
        path: Where it stands, such as ``trainer.logger``.
        given: Its arguments, interpolations as the text that they are.
        values: Its arguments, interpolations resolved.
        target: What it names.
        partial: Whether Hydra gets further arguments for it elsewhere.
    """

    path: str
    given: Mapping[str, Any]
    values: Mapping[str, Any]
    target: str | None
    partial: bool

    @property
    def signature(self) -> TargetSignature:
        return TargetSignature.of(locate(str(self.target), self.path))


def sections(config: DictConfig) -> list[ConfigSection]:
    """Every section, each where it is written, not where an interpolation repeats it.

    Raises:
        OmegaConfBaseException: for an interpolation that cannot be resolved; it names the key.
    """
    return list(_sections(as_given(config), OmegaConf.to_container(config, resolve=True), ""))


def as_given(config: DictConfig) -> Any:
    """The configuration as plain dicts and lists, interpolations as the text that they are."""
    return OmegaConf.to_container(config, resolve=False)


def hyperparameters(config: DictConfig) -> dict[str, Any]:
    """The settings of a run for its loggers: every section, the strategy's too, and the values at the top.

    Interpolations are resolved, but for those that repeat a section, and those of the environment, which may hold
    secrets.
    """
    return _logged(as_given(config), OmegaConf.to_container(config, resolve=True))  # type: ignore[no-any-return]


def _logged(given: Any, value: Any) -> Any:
    if isinstance(given, dict):
        return {str(key): _logged(given[key], value[key]) for key in given}
    keeps = is_interpolation(given) and (isinstance(value, dict | list) or "oc.env" in given)
    return given if keeps else value


def is_interpolation(value: Any) -> bool:
    return isinstance(value, str) and "${" in value


def items(node: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    """The path, key and value of whatever a mapping or a list holds."""
    if isinstance(node, dict | list):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield f"{path}.{key}" if path else str(key), key, value


def written(value: Any) -> str:
    """``value`` as YAML would have it."""
    if value is None or isinstance(value, bool):
        return _PLAIN[value]
    return str(value)


def _sections(given: Any, values: Any, path: str) -> Iterator[ConfigSection]:
    if isinstance(given, dict) and "_target_" in given:
        written, resolved = ({str(k): v for k, v in node.items() if k not in _HYDRA} for node in (given, values))
        partial = bool(values.get("_partial_") or values.get("_args_"))
        yield ConfigSection(path, written, resolved, values["_target_"], partial)
    for inner, key, value in items(given, path):
        yield from _sections(value, values[key] if isinstance(value, dict | list) else None, inner)
