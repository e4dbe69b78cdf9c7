"""Case of the golden table, and how it is run: in this process, in an empty folder, with no environment of a launch."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lightning_hetpipe import errors
from lightning_hetpipe.errors import PipelineRefusal, SettingError
from tests.golden.sites import recording

LAUNCH = ("NODE_RANK", "GROUP_RANK", "LOCAL_RANK", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
SERVERS = ("MASTER_ADDR", "MASTER_PORT", "HETPIPE_PORT", "HETPIPE_TOKEN", "HETPIPE_CA", "HETPIPE_CERTIFICATE")


@dataclass(frozen=True)
class Place:
    """Folder of one case, and what the case may change for its time."""

    folder: Path
    patch: pytest.MonkeyPatch

    def environment(self, **values: object) -> None:
        for name, value in values.items():
            self.patch.setenv(name, str(value))


@dataclass(frozen=True)
class Case:
    """One wrong use, and what its sentence must name.

    Attributes:
        name: Id of the test.
        run: Raises the error, or ends as a command does.
        setting: Name of the setting, or of the object at fault.
        value: As the sentence shows the value; empty if the value is the object.
        way_out: Words without which the user does not know what to do: names, numbers, settings, commands.
        error: Class of the error; for a command, the exit code 2 and the sentence on stderr.
        is_ours: False for the text of another library, which we hand on behind the name of the setting.
    """

    name: str
    run: Callable[[Place], object]
    setting: str
    value: str
    way_out: tuple[str, ...]
    error: type[BaseException] = SettingError
    is_ours: bool = True

    def missing(self, sentence: str) -> list[str]:
        """Return what ``sentence`` does not name."""
        return [each for each in (self.setting, self.value, *self.way_out) if each and not _names(sentence, each)]


def case(
    run: Callable[[Place], object],
    setting: str,
    value: object,
    *way_out: str,
    error: type[BaseException] = SettingError,
    name: str = "",
) -> Case:
    shown = value if isinstance(value, str) else repr(value)
    return Case(name or f"{setting}={shown}"[:60], run, setting, shown, way_out, error)


def given(make: Callable[..., object], setting: str, value: object, *way_out: str, **others: Any) -> Case:
    """Case of the argument ``setting`` of ``make``: the sentence shows its value as Python writes it."""
    name = f"{getattr(make, '__name__', '')}({setting}={value!r})"[:70]
    return case(lambda _: make(**{setting: value, **others}), setting, repr(value), *way_out, name=name)


def refusal(run: Callable[[Place], object], what: str, value: object, *way_out: str, name: str = "") -> Case:
    """Case of what no pipeline can train: ``what`` is the object at fault."""
    return case(run, what, value, *way_out, error=PipelineRefusal, name=name or what[:60])


@dataclass(frozen=True)
class Told:
    """End of a case: its error, its sentence, and the places that it reached."""

    error: BaseException | None
    sentence: str
    sites: frozenset[str]


_told: dict[int, Told] = {}


def told(case: Case) -> Told:
    """Run ``case``, once in this process."""
    if id(case) not in _told:
        _told[id(case)] = _run(case)
    return _told[id(case)]


def _run(case: Case) -> Told:
    output = io.StringIO()
    error: BaseException | None = None
    with _place() as place, recording() as reached, contextlib.redirect_stderr(output):
        try:
            case.run(place)
        except (Exception, SystemExit) as raised:
            error = raised
    sentence = str(error)
    if isinstance(error, SystemExit):
        lines = [line for line in output.getvalue().splitlines() if line.startswith("hetpipe-")]
        sentence = lines[-1] if lines else output.getvalue()
    return Told(error, sentence, frozenset(reached))


@contextlib.contextmanager
def _place() -> Iterator[Place]:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        for name in [*LAUNCH, *SERVERS, *(each for each in os.environ if each.startswith("SLURM_"))]:
            patch.delenv(name, raising=False)
        patch.setattr(sys, "path", list(sys.path))
        patch.chdir(folder)
        yield Place(Path(folder), patch)


def public(error: BaseException | None) -> type[BaseException] | None:
    """Return the class by which a user catches ``error``."""
    return next((each for each in type(error).__mro__ if each.__module__ == errors.__name__), None) or type(error)


def is_one_sentence(text: str) -> bool:
    return "\n" not in text and not re.search(r"[.!?]\s+[A-Z]", text)


def _names(sentence: str, words: str) -> bool:
    """Return whether ``sentence`` has ``words``, not as a part of longer ones."""
    start, end = (r"(?<!\w)" if words[0].isalnum() else ""), (r"(?!\w)" if words[-1].isalnum() else "")
    return re.search(start + re.escape(words) + end, sentence) is not None
