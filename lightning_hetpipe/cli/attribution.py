"""Attribution of errors: finds the setting that has caused the error of a job, and says it in the settings' words."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import product
from types import TracebackType
from typing import Any

from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from lightning_hetpipe.cli.start_up import ConsoleScript
from lightning_hetpipe.cli.targets import as_given, is_interpolation, items, sections
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.settings import unknown

_OUTER = ("strategy", "trainer", "model", "data")
_LITERALS = {"None": "null", "True": "true", "False": "false"}
_ARGUMENT = re.compile(r"(?<![\w.(])(\w+)(\[[^\]]*\]|)=(None\b|True\b|False\b|'[^']*'|)")
_WAY_OUT = re.compile(r"\b(leave|set) (\w+)(?= (?:out|to)\b)")
_INTERPOLATION = re.compile(r"\$\{([\w.]+)\}")


def attributed(error: Exception, config: DictConfig, program: ConsoleScript) -> SettingError | None:
    """The error in words of the configuration, its cause; None if the program is at fault, or users' code."""
    said: str | None
    if isinstance(error, SettingError):
        raised_in = [module for _, module in frames(error.__traceback__)][-1:]
        said = " ".join(str(error).split())
        if not any(module.startswith(__package__) for module in raised_in):
            said = in_settings(said, config)
    elif isinstance(error, OmegaConfBaseException):
        said = _interpolation(error)
    else:
        said = _refused_argument(error, config) or program.sentence(error, config) or _path(error, config)
    if said is None:
        return None
    found = SettingError(said)
    found.__cause__ = error
    return found


def frames(tb: TracebackType | None) -> Iterator[tuple[TracebackType, str]]:
    """Each frame of a traceback, outermost first, with the name of its module."""
    while tb is not None:
        yield tb, str(tb.tb_frame.f_globals.get("__name__", ""))
        tb = tb.tb_next


def in_settings(message: str, config: DictConfig) -> str:
    """Say each argument of Python that a section takes as its setting.

    `stages=None must be ...; leave stages out` becomes `strategy.stages=null must be ...; leave strategy.stages out`.
    """
    known = _settings(config)

    def argument(match: re.Match[str]) -> str:
        setting, value = known.get(match[1]), match[3]
        return match[0] if setting is None else f"{setting}{match[2]}={_LITERALS.get(value, value.strip(chr(39)))}"

    text = _ARGUMENT.sub(argument, message)
    return _WAY_OUT.sub(lambda match: f"{match[1]} {known.get(match[2], match[2])}", text)


def _settings(config: DictConfig) -> dict[str, str]:
    """The setting for each name of an argument: of the outer sections before inner ones, and given before possible.

    What a section takes from elsewhere, as ``${cluster}``, is set there.
    """
    ordered = sorted(
        sections(config), key=lambda section: _OUTER.index(section.path) if section.path in _OUTER else len(_OUTER)
    )
    found: dict[str, str] = {}
    for inner, given in product((False, True), (True, False)):
        for section in [section for section in ordered if (section.path not in _OUTER) is inner]:
            written = (name for name, value in section.given.items() if not is_interpolation(value))
            for name in written if given else section.declared.parameters:
                elsewhere = _INTERPOLATION.fullmatch(str(section.given.get(name)))
                found.setdefault(name, elsewhere[1] if elsewhere else f"{section.path}.{name}")
    return found


def _refused_argument(error: Exception, config: DictConfig) -> str | None:
    """The sentence for a key that a `_target_` took, as it takes any, and something behind it has refused."""
    match = re.search(r"unexpected keyword argument '(\w+)'", str(error)) if isinstance(error, TypeError) else None
    for section in sections(config) if match is not None else ():
        own = section.declared
        if match is not None and own.takes_any and match[1] in section.given.keys() - own.parameters:
            return str(unknown(match[1], section.path, list(own.parameters), str(section.target)))
    return None


def _path(error: Exception, config: DictConfig) -> str | None:
    """The sentence for a file or folder that cannot be used, where a setting is its path, or one on the way to it."""
    if not isinstance(error, OSError) or not isinstance(error.filename, str):
        return None
    wanted = os.path.abspath(error.filename)
    for setting, value in _texts(as_given(config), ""):
        path = os.path.abspath(value)
        denied = isinstance(error, PermissionError) or not os.path.isdir(path)
        if wanted == path or (wanted.startswith(path + os.sep) and denied):
            return f"{setting}={value} cannot be used ({error.strerror}: {error.filename}); give another path."
    return None


def _texts(node: Any, path: str) -> Iterator[tuple[str, str]]:
    """Every text in a plain configuration that is written there, not taken from elsewhere by an interpolation."""
    for inner, key, value in items(node, path):
        if isinstance(value, str) and value and key != "_target_" and not is_interpolation(value):
            yield inner, value
        yield from _texts(value, inner)


def _interpolation(error: OmegaConfBaseException) -> str:
    """The sentence for `${data.context}` where the data that was chosen has no context, say."""
    first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    key = str(error.full_key or "")
    return f"{key}: {first}; give {key}=..., or choose an experiment that has it" if key else first
