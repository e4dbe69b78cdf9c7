"""Command that runs this program again: same interpreter and flags, same script or module, same arguments."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType
from typing import Any

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.server.process.signals import guarded

_START = os.getcwd()
"""Working folder at import, the best guess of the folder in which the program was started."""

_OVERRIDE = re.compile(r"[^-].*=|~")
_WITH_VALUE = {"--config-dir", "-cd", "--config-path", "-cp", "--config-name", "-cn", "--package", "-p", "--cfg", "-c"}
"""Hydra's options whose value is the next argument."""
# Overrides that we set for a child, or that it cannot use: it runs one job, in its launcher's folder, without log.
_OURS = re.compile(
    r"[+~]*hydra(\.mode|\.run\.dir|\.output_subdir|\.sweep\b|\.sweeper\b|\.launcher\b|\.job\.(num|id)|\.job_logging\b"
    r"|\.hydra_logging\b|/(sweeper|launcher|job_logging|hydra_logging)\b)"
)
_LOG = re.compile(r"[+~]*hydra[./](job|hydra)_logging\b")


@dataclass(frozen=True)
class Command:
    """Command, the folder to start it in, and the Hydra job that it runs (None without Hydra)."""

    command: Sequence[str]
    folder: str
    job: str | None

    def start(
        self, variables: Mapping[str, str], descriptors: Sequence[int], *more: str, in_session: bool = False
    ) -> subprocess.Popen[bytes]:
        """Start the command with ``more`` arguments and further environment variables. It inherits ``descriptors``, and
        ends with this process. With ``in_session``, it has its own process session."""
        return subprocess.Popen(
            guarded([*self.command, *more]),
            cwd=self.folder,
            env={**os.environ, **variables},
            pass_fds=descriptors,
            start_new_session=in_session,
        )


def this_program(*, is_first: bool = False) -> Command:
    """Return the command by which a child runs this program. ``is_first`` is True for virtual worker 0, which writes
    Hydra's log. Under Hydra, the command runs the present job in its run directory, with the values of its sweep. Raise
    SettingError if the program came through standard input, because it cannot run again."""
    hydra = _hydra()
    interpreter, program, arguments = _parts(sys.orig_argv[1:], sys.modules["__main__"])
    if hydra is None:
        return Command([sys.executable, *interpreter, *program, *arguments], _START, None)
    command = [sys.executable, *interpreter, *program, *_options(arguments), *_overrides(hydra, is_first)]
    return Command(command, hydra.runtime.cwd, current_job())


def current_job() -> str | None:
    """Return the run directory of the present Hydra job, which identifies the job, or None without Hydra."""
    hydra = _hydra()
    return None if hydra is None else str(hydra.runtime.output_dir)


# Python's command line.


def _parts(original: Sequence[str], main: ModuleType) -> tuple[list[str], list[str], list[str]]:
    """Return the interpreter's flags, the script or module, and the program's arguments. ``original`` are Python's own
    arguments, and ``main`` is the module ``__main__``. If Python was told to run another module, a debugger runs the
    program, and a child runs it without the debugger."""
    flags, rest = _split(original)
    if not rest:
        raise SettingError(
            "virtual_workers needs a program that can be started again, and this one came through standard input; save"
            " it as a file and run that"
        )
    target = rest[0]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if target == "-m":
        module = rest[1]
        if spec is not None and spec.name in (module, f"{module}.__main__"):
            return flags, ["-m", module], rest[2:]
    elif target == "-c":
        if file is None:
            return flags, ["-c", rest[1]], rest[2:]
    elif file is not None and spec is None and os.path.basename(file) == os.path.basename(target):
        return flags, [os.path.abspath(file)], rest[1:]
    elif spec is not None and spec.name == "__main__":  # a folder, or a zip, with a __main__.py
        return flags, [os.path.join(_START, target)], rest[1:]
    if spec is not None:
        return flags, ["-m", spec.name.removesuffix(".__main__")], sys.argv[1:]
    return flags, [os.path.abspath(file or sys.argv[0])], sys.argv[1:]


def _split(original: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split Python's arguments into its own flags, and the rest from the script, the ``-m`` or the ``-c`` on."""
    at = 0
    while at < len(original):
        word = original[at]
        if word == "-" or not word.startswith("-"):
            return list(original[:at]), [] if word == "-" else list(original[at:])
        if word.startswith("--"):
            at += 2 if word == "--check-hash-based-pycs" else 1
            continue
        for place, letter in enumerate(word[1:], start=1):
            if letter in "mc":  # as in -Im module, or -mmodule
                before = [word[:place]] if place > 1 else []
                attached = [word[place + 1 :]] if word[place + 1 :] else []
                return [*original[:at], *before], [f"-{letter}", *attached, *original[at + 1 :]]
            if letter in "WX":  # as in -Wignore, or -W ignore
                at += word[place + 1 :] == ""
                break
        at += 1
    return list(original), []


# Hydra's.


def _hydra() -> Any:
    """Return Hydra's configuration, if a Hydra application is running."""
    if "hydra" not in sys.modules:
        return None
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    if not HydraConfig.initialized():
        return None
    hydra = HydraConfig.get()
    # A configuration that was only composed has no running job.
    return None if OmegaConf.is_missing(hydra.runtime, "output_dir") else hydra


def _options(arguments: Sequence[str]) -> list[str]:
    """Return the arguments without overrides and without the flag for a sweep."""
    options = [argument for argument, is_override in told_apart(arguments) if not is_override]
    return [each for each in options if each != "-m" and not (len(each) > 3 and "--multirun".startswith(each))]


def told_apart(arguments: Sequence[str]) -> list[tuple[str, bool]]:
    """Return each of Hydra's arguments, and whether it is an override."""
    pairs = pairwise(["", *arguments])
    return [(each, _OVERRIDE.match(each) is not None and before not in _WITH_VALUE) for before, each in pairs]


def _overrides(hydra: Any, is_first: bool = False) -> list[str]:
    """Return the overrides that lead to the present job, including the values of its sweep."""
    from omegaconf import OmegaConf

    asked = [each for each in hydra.overrides.hydra if not _OURS.match(each) or (is_first and _LOG.match(each))]
    pinned = {"hydra.mode": "RUN", "hydra.output_subdir": "null"}
    pinned |= {} if is_first else {"hydra/job_logging": "none", "hydra/hydra_logging": "none"}
    pinned["hydra.run.dir"] = quoted(hydra.runtime.output_dir)
    for name in ("num", "id"):
        if not OmegaConf.is_missing(hydra.job, name):
            pinned[f"hydra.job.{name}"] = str(hydra.job[name])
            pinned["hydra.sweep.dir"] = quoted(os.path.join(hydra.runtime.cwd, hydra.sweep.dir))
            pinned["hydra.sweep.subdir"] = quoted(hydra.sweep.subdir)
    return [*hydra.overrides.task, *asked, *(f"{name}={value}" for name, value in pinned.items())]


def quoted(text: str) -> str:
    """Quote ``text`` for Hydra's overrides."""
    escaped = re.sub(r"(\\*)'", lambda match: match[1] * 2 + r"\'", text)
    escaped = re.sub(r"\\+$", lambda match: match[0] * 2, escaped)
    return f"'{escaped}'"
