"""Settings as the command line writes them: `strategy.stages=null`, where Python says `stages=None`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_hetpipe.cli.targets import locate, parameters

_PLAIN: dict[Any, str] = {None: "null", True: "true", False: "false"}
_ARGUMENT = re.compile(r"(?<![\w.(])(\w+)=(None\b|True\b|False\b|'[^']*'|)")
_WAY_OUT = re.compile(r"\b(leave|set) (\w+)(?= (?:out|to)\b)")
_IT = re.compile(r"\bset it to (None|True|False)\b")


def written(value: Any) -> str:
    """``value`` as YAML would have it."""
    return _PLAIN[value] if value is None or isinstance(value, bool) else str(value)


def as_written(refusal: str, config: DictConfig) -> str:
    """A refusal in Python's words with each argument that a section takes said as its setting.

    `stages=None must be ...; leave stages out` becomes `strategy.stages=null must be ...; leave strategy.stages out`.
    """

    def argument(match: re.Match[str]) -> str:
        setting = _setting(match[1], config)
        return match[0] if setting is None else f"{setting}={_literal(match[2])}"

    def way_out(match: re.Match[str]) -> str:
        return f"{match[1]} {_setting(match[2], config) or match[2]}"

    text = _ARGUMENT.sub(argument, refusal)
    text = _WAY_OUT.sub(way_out, text)
    return _IT.sub(lambda match: f"set it to {_literal(match[1])}", text)


def unresolved(config: DictConfig) -> dict[str, Any]:
    """The configuration as plain dicts and lists, interpolations as the text that they are."""
    plain: Any = OmegaConf.to_container(config, resolve=False)
    return dict(plain)


def is_interpolation(value: Any) -> bool:
    return isinstance(value, str) and "${" in value


def sections(node: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every mapping in a plain configuration that has a `_target_`, with its path."""
    if isinstance(node, list):
        node = dict(enumerate(node))
    if isinstance(node, dict):
        if isinstance(node.get("_target_"), str) and not is_interpolation(node["_target_"]):
            yield path, node
        for name, value in node.items():
            yield from sections(value, f"{path}.{name}" if path else str(name))


def _literal(python: str) -> str:
    return {"None": "null", "True": "true", "False": "false"}.get(python, python.strip("'"))


def _setting(argument: str, config: DictConfig) -> str | None:
    """The setting of that name: one that is given, else one that could be."""
    found = dict(sections(unresolved(config)))
    outer = [path for path in ("strategy", "trainer", "model", "data") if path in found]
    for paths in (outer, [path for path in found if path not in outer]):
        for path in paths:
            if argument in found[path] and not is_interpolation(found[path][argument]):
                return f"{path}.{argument}"
        for path in paths:
            if argument in parameters(locate(found[path]["_target_"], path))[0]:
                return f"{path}.{argument}"
    return None
