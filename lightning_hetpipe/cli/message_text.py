"""Error messages about arguments of Python, in the words of the command line: ``strategy.stages=null``."""

from __future__ import annotations

import re
from itertools import product

from omegaconf import DictConfig

from lightning_hetpipe.cli.config_sections import is_interpolation, sections

_OUTER = ("strategy", "trainer", "model", "data")
_LITERALS = {"None": "null", "True": "true", "False": "false"}
_ARGUMENT = re.compile(r"(?<![\w.(])(\w+)=(None\b|True\b|False\b|'[^']*'|)")
_WAY_OUT = re.compile(r"\b(leave|set) (\w+)(?= (?:out|to)\b)")
_IT = re.compile(r"\bset it to (None|True|False)\b")


def in_settings(message: str, config: DictConfig) -> str:
    """Say each argument that a section takes as its setting.

    `stages=None must be ...; leave stages out` becomes `strategy.stages=null must be ...; leave strategy.stages out`.
    """
    known = _settings(config)

    def argument(match: re.Match[str]) -> str:
        setting, value = known.get(match[1]), match[2]
        return match[0] if setting is None else f"{setting}={_LITERALS.get(value, value.strip(chr(39)))}"

    text = _ARGUMENT.sub(argument, message)
    text = _WAY_OUT.sub(lambda match: f"{match[1]} {known.get(match[2], match[2])}", text)
    return _IT.sub(lambda match: f"set it to {_LITERALS[match[1]]}", text)


def _settings(config: DictConfig) -> dict[str, str]:
    """The setting for each name of an argument: of the outer sections before inner ones, and given before possible."""
    ordered = sorted(
        sections(config), key=lambda section: _OUTER.index(section.path) if section.path in _OUTER else len(_OUTER)
    )
    found: dict[str, str] = {}
    for inner, given in product((False, True), (True, False)):
        for section in [section for section in ordered if (section.path not in _OUTER) is inner]:
            written = (name for name, value in section.given.items() if not is_interpolation(value))
            for name in written if given else section.signature.parameters:
                found.setdefault(name, f"{section.path}.{name}")
    return found
