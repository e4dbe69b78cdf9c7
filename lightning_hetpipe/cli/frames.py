"""Whose code an error came out of, read off its traceback."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator
from types import TracebackType

_LIBRARIES = {"torch", "lightning", "lightning_hetpipe", "lightning_utilities", "torchmetrics", "fsspec", "numpy"}
_OTHERS = {"hydra", "omegaconf", "__main__"}  # what stands around: __main__ is this command, run as a module


def frames(tb: TracebackType | None) -> Iterator[TracebackType]:
    """The frames of a traceback, outermost first."""
    while tb is not None:
        yield tb
        tb = tb.tb_next


def module(tb: TracebackType) -> str:
    """The name of the module that the frame's code is in."""
    return str(tb.tb_frame.f_globals.get("__name__", ""))


def innermost(tb: TracebackType | None) -> str:
    """The module in which the error was raised; empty if there is no traceback."""
    *_, last = "", *map(module, frames(tb))
    return last


def passed(tb: TracebackType | None, name: str, function: str) -> bool:
    """Whether the error came through that function of the module ``name``."""
    return any(module(frame) == name and frame.tb_frame.f_code.co_name == function for frame in frames(tb))


def refused_by_lightning(tb: TracebackType | None) -> bool:
    """Whether a `raise` of Lightning's own raised the error, outside of users' code."""
    *_, last = None, *frames(tb)
    if last is None or not module(last).startswith("lightning.") or through_users_code(tb):
        return False
    return linecache.getline(last.tb_frame.f_code.co_filename, last.tb_lineno).strip().startswith("raise")


def through_users_code(tb: TracebackType | None) -> bool:
    """Whether code ran that is neither of the standard library nor of what this package builds on."""
    names = {module(frame).partition(".")[0] for frame in frames(tb)}
    return not names <= _LIBRARIES | sys.stdlib_module_names | _OTHERS
