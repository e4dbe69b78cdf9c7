"""Tracebacks: whose code an error came out of, and what of it a person should see."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator
from types import TracebackType

_LIBRARIES = {"torch", "lightning", "lightning_hetpipe", "lightning_utilities", "torchmetrics", "fsspec", "numpy"}
_OTHERS = {"hydra", "omegaconf", "__main__"}  # what stands around: __main__ is this command, run as a module
_MACHINERY = ("hydra", "omegaconf", "lightning_hetpipe.cli")


def calls(tb: TracebackType | None) -> list[tuple[str, str]]:
    """Module and function of each frame, outermost first."""
    return [(_module(frame), frame.tb_frame.f_code.co_name) for frame in _frames(tb)]


def innermost(tb: TracebackType | None) -> str:
    """The module in which the error was raised; empty if there is no traceback."""
    return [("", ""), *calls(tb)][-1][0]


def passed(tb: TracebackType | None, module: str, function: str) -> bool:
    """Whether the error came through that function."""
    return (module, function) in calls(tb)


def refused_by_lightning(tb: TracebackType | None) -> bool:
    """Whether a `raise` of Lightning's own raised the error, outside of users' code."""
    *_, last = None, *_frames(tb)
    if last is None or not _module(last).startswith("lightning.") or through_users_code(tb):
        return False
    return linecache.getline(last.tb_frame.f_code.co_filename, last.tb_lineno).strip().startswith("raise")


def through_users_code(tb: TracebackType | None) -> bool:
    """Whether code ran that is neither of the standard library nor of what this package builds on."""
    names = {module.partition(".")[0] for module, _ in calls(tb)}
    return not names <= _LIBRARIES | sys.stdlib_module_names | _OTHERS


def without_machinery(tb: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame on that is neither Hydra's nor this application's."""
    return next((frame for frame in _frames(tb) if not _module(frame).startswith(_MACHINERY)), tb)


def _frames(tb: TracebackType | None) -> Iterator[TracebackType]:
    while tb is not None:
        yield tb
        tb = tb.tb_next


def _module(tb: TracebackType) -> str:
    return str(tb.tb_frame.f_globals.get("__name__", ""))
