"""Attribution of errors: find the setting that caused a job's error, and phrase the error in the configuration's words.

The error's class and the place where it was raised decide whether a setting is at fault. Texts of other packages are
read only for names that stand nowhere else. These are a setting of Lightning's, a keyword that a function refuses, and
a class that torch does not load from a checkpoint.
"""

from __future__ import annotations

import linecache
import os
import re
import sys
from collections.abc import Iterator
from types import TracebackType

from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from lightning_hetpipe.cli.targets import as_given, is_interpolation, nodes, sections, written
from lightning_hetpipe.errors import SettingError, first_line, one_line
from lightning_hetpipe.settings import unknown

_OUTER = ("strategy", "trainer", "model", "data")
_OF_TRAINER = ("accumulate_grad_batches",)
"""Settings of the Trainer that hetpipe-plan reads without importing the Trainer."""
_LITERALS = {"None": "null", "True": "true", "False": "false"}
_ARGUMENT = re.compile(r"(?<![\w.(])(\w+)(\[[^\]]*\]|)=(None\b|True\b|False\b|'[^']*'|)")
_WAY_OUT = re.compile(r"\b(leave|set) (\w+)(?= (?:out|to)\b)")
_INTERPOLATION = re.compile(r"\$\{([\w.]+)\}")
_CHECKPOINTS = "lightning.pytorch.trainer.connectors.checkpoint_connector"
_ACCELERATORS = ("lightning.pytorch.accelerators", "lightning.fabric.accelerators")
_CHECKS = {(f"{__package__}.config_checks", name) for name in ("check", "check_targets")}
"""Functions whose errors already are in the configuration's words, as errors raised in this folder are."""
_FIT = ("lightning.pytorch.trainer.trainer", "fit")
_REFUSED = re.compile(r"unexpected keyword argument '(\w+)'")
_LONGEST = 200  # characters quoted of an error's text, which may fill pages
_LIBRARIES = {"torch", "lightning", "lightning_hetpipe", "lightning_utilities", "torchmetrics", "fsspec", "numpy"}
_LIBRARIES |= {"hydra", "omegaconf", "__main__", *sys.stdlib_module_names}  # __main__ is this command, run as a module


def attributed(error: Exception, config: DictConfig) -> SettingError | None:
    """Return ``error`` in words of the configuration, or None if the program or user code is at fault."""
    calls = [(module, tb.tb_frame.f_code.co_name) for tb, module in frames(error.__traceback__)]
    said: str | None
    if isinstance(error, SettingError):
        said = one_line(error)
        if not _CHECKS.intersection(calls) and not any(module.startswith(__package__) for module, _ in calls[-1:]):
            said = in_settings(said, config)
    elif isinstance(error, OmegaConfBaseException):
        key, first = str(error.full_key or ""), first_line(error)  # of `${data.context}` of data without a context
        said = f"{key}: {first}; give {key}=..., or choose an experiment that has it" if key else first
    else:
        said = _refused_key(error, config) or _lightnings(error, calls, config) or _path(error, config)
    if said is None:
        return None
    found = SettingError(said)
    found.__cause__ = error
    return found


def frames(tb: TracebackType | None) -> Iterator[tuple[TracebackType, str]]:
    """Yield each frame of a traceback, outermost first, with the name of its module."""
    while tb is not None:
        yield tb, str(tb.tb_frame.f_globals.get("__name__", ""))
        tb = tb.tb_next


def in_settings(message: str, config: DictConfig) -> str:
    """Replace each Python argument in ``message`` by its setting.

    `stages=None must be ...; leave stages out` becomes `strategy.stages=null must be ...; leave strategy.stages out`.
    """
    known = _settings(config)

    def argument(match: re.Match[str]) -> str:
        setting, value = known.get(match[1]), match[3]
        return match[0] if setting is None else f"{setting}{match[2]}={_LITERALS.get(value, value.strip(chr(39)))}"

    text = _ARGUMENT.sub(argument, message)
    return _WAY_OUT.sub(lambda match: f"{match[1]} {known.get(match[2], match[2])}", text)


def _settings(config: DictConfig) -> dict[str, str]:
    """Map each argument's name to its setting. Outer sections go first, and given arguments before possible ones.

    The setting of an argument that is an interpolation, such as ``${cluster}``, is the interpolation's key.
    """
    found: dict[str, str] = {}
    every = sections(config)
    outer = [section for path in _OUTER for section in every if section.path == path]
    for group in (outer, [section for section in every if section.path not in _OUTER]):
        for section in group:
            for name in (name for name, value in section.given.items() if not is_interpolation(value)):
                found.setdefault(name, f"{section.path}.{name}")
        for section in group:
            others = _OF_TRAINER if section.path == "trainer" else ()
            for name in section.loaded.parameters if section.loaded else others:
                elsewhere = _INTERPOLATION.fullmatch(str(section.given.get(name)))
                found.setdefault(name, elsewhere[1] if elsewhere else f"{section.path}.{name}")
    return found


def _refused_key(error: Exception, config: DictConfig) -> str | None:
    """Return the sentence for a key that a `_target_` with ``**kwargs`` passed on, and that was refused later."""
    if not isinstance(error, TypeError) or (match := _REFUSED.search(str(error))) is None:
        return None
    for section in sections(config):
        own = section.loaded
        if own is not None and own.takes_any and match[1] in section.given.keys() - own.parameters:
            return str(unknown(match[1], section.path, list(own.parameters), str(section.target)))
    return None


def _path(error: Exception, config: DictConfig) -> str | None:
    """Return the sentence for an unusable file or folder, if a setting is its path or the path of a folder above."""
    if not isinstance(error, OSError) or not isinstance(error.filename, str):
        return None
    wanted, given = os.path.abspath(error.filename), as_given(config)
    for setting, key, value, _ in nodes(given, given):
        if not isinstance(value, str) or not value or key == "_target_" or is_interpolation(value):
            continue
        path = os.path.abspath(value)
        denied = isinstance(error, PermissionError) or not os.path.isdir(path)
        if wanted == path or (wanted.startswith(path + os.sep) and denied):
            return f"{setting}={value} cannot be used ({error.strerror}: {error.filename}); give another path."
    return None


def _lightnings(error: Exception, calls: list[tuple[str, str]], config: DictConfig) -> str | None:
    """Return the sentence for an error that Lightning raises on purpose, or for a checkpoint that it cannot restore."""
    if (exceptions := sys.modules.get("lightning.pytorch.utilities.exceptions")) is None:
        return None
    if isinstance(error, exceptions.MisconfigurationException):
        return _with_setting(error, config)
    if not {module.partition(".")[0] for module, _ in calls} <= _LIBRARIES:
        return None
    restoring = _CHECKPOINTS in dict(calls) and (_CHECKPOINTS, "dump_checkpoint") not in calls
    if restoring and config.get("ckpt_path") is not None:
        return _checkpoint(error, config, read_by_torch="torch.serialization" in dict(calls))
    if not calls[-1][0].startswith("lightning."):
        return None
    if isinstance(error, ModuleNotFoundError) and any(module.startswith(_ACCELERATORS) for module, _ in calls):
        return f"trainer.accelerator={config.trainer.accelerator}: {one_line(error)}; or set it to cpu, gpu or auto."
    *_, (last, _) = frames(error.__traceback__)
    line = linecache.getline(last.tb_frame.f_code.co_filename, last.tb_lineno).strip()
    if line.startswith("raise"):  # otherwise an operation failed
        return _with_setting(error, config)
    return f"trainer: {one_line(error)}" if isinstance(error, TypeError | ValueError) and _FIT not in calls else None


def _with_setting(error: Exception, config: DictConfig) -> str:
    """Return Lightning's own text, after the setting if the text names one."""
    text = one_line(error)
    named: list[tuple[int, str]] = []
    valued: list[str] = []
    of_lightning = ("trainer", "callbacks", "logger")
    plain = [
        (f"{section.path}.{name}", name, value)
        for section in sections(config)
        if section.path.startswith(of_lightning) and str(section.target).startswith("lightning.")
        for name, value in section.given.items()
        if not isinstance(value, dict) and not is_interpolation(value)
    ]
    for setting, name, value in plain:
        place = re.search(rf"`{name}`|\b{name}=|(?<!\w){name}(?!\w)", text)
        has_value = value != "" and re.search(rf"(?<![\w.-]){re.escape(str(value))}(?![\w.])", text) is not None
        if place is not None and (has_value or place[0] != name):
            named.append((place.start(), f"{setting}={written(value)}: {text}"))
        elif has_value and isinstance(value, str):
            valued.append(f"{setting}={value}: {text}")
    return min(named)[1] if named else valued[0] if len(valued) == 1 else text


def _checkpoint(error: Exception, config: DictConfig, read_by_torch: bool) -> str:
    """Return the sentence for an error while Lightning restored `ckpt_path`."""
    path, text = config.ckpt_path, one_line(error)
    if holds := re.search(r"Unsupported global: GLOBAL (\S+)", text):
        return (
            f"ckpt_path={path} holds a {holds[1]}, which torch reads only from files that one trusts; if you trust this"
            " one, set TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 in the environment."
        )
    reason = f"{type(error).__name__}: {text[:_LONGEST]}{'...' if len(text) > _LONGEST else ''}"
    return (
        f"ckpt_path={path} cannot be restored ({'torch cannot read it, ' if read_by_torch else ''}{reason}); give a"
        " checkpoint of this model and this trainer, or ckpt_path=null to begin anew."
    )
