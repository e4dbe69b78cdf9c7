"""Calls inside a module's ``forward`` that its graph would leave out without a difference in its values.

Such calls act in the backward pass (hooks on tensors), on computed gradients (``inference_mode``), or on the default
generators (seeds). Or they write something that the program does not read. ``FrozenValues`` profiles the module while
it runs, and asks here about each call.
"""

from __future__ import annotations

import dis
import inspect
import io
import linecache
import logging
import os
import sysconfig
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from lightning import LightningModule
from torch import Tensor
from torch.autograd import graph as autograd_graph
from torch.utils import checkpoint

from lightning_hetpipe.accelerator import default_generators

HOOK, JOINT_HOOK, INFERENCE, SEED, STATE = "hook", "joint hook", "inference mode", "seed", "random state"
OUTPUT = "output"
NOWHERE = JOINT_HOOK, STATE
"""Kinds of calls that no pipelined module and no user code in a pipeline may make. A piece has its own backward, a
minibatch its own generators."""
IN_NO_GRAPH = HOOK, INFERENCE, OUTPUT, SEED
"""Kinds of calls that a graph would leave out, and that user code in a pipeline may make."""

_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_PACKAGE = Path(__file__).parent.parent
_OURS = tuple(str(path) for path in _PACKAGE.iterdir() if path.name != "demo")
_NOT_USERS = (_TORCH, *_OURS, "<frozen")
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
PACKAGES = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
"""Folders of installed packages."""


def _code(function: Callable[..., Any]) -> CodeType:
    code: CodeType = inspect.unwrap(function).__code__  # behind contextlib.contextmanager, and other decorators
    return code


_OUTPUT = (OUTPUT, "prints, logs or opens a file")
_FUNCTIONS: list[tuple[Callable[..., Any], tuple[str, str]]] = [
    (Tensor.register_hook, (HOOK, "puts a hook on a tensor")),
    (Tensor.register_post_accumulate_grad_hook, (HOOK, "puts a hook on a tensor")),
    (autograd_graph.register_multi_grad_hook, (JOINT_HOOK, "puts a hook on tensors (register_multi_grad_hook)")),
    (autograd_graph.saved_tensors_hooks.__enter__, (HOOK, "packs what autograd saves (saved_tensors_hooks)")),
    (torch.inference_mode.__enter__, (INFERENCE, "computes in torch.inference_mode()")),
    (torch.manual_seed, (SEED, "sets a seed (torch.manual_seed)")),
    (logging.Logger.callHandlers, _OUTPUT),
    (LightningModule.log, _OUTPUT),
]
"""Functions, each with the kind of the call and its description."""
_CALLS = {id(_code(function)): told for function, told in _FUNCTIONS}  # a code's own hash takes long

_OF_NODES: dict[str, tuple[str, str]] = {
    "register_prehook": (HOOK, "puts a hook on a node of autograd's graph"),
    "register_hook": (HOOK, "puts a hook on a node of autograd's graph"),
}
"""Methods of autograd's nodes, which have no Python code."""

_OF_GENERATORS: dict[str, tuple[str, str]] = {
    "manual_seed": (SEED, "sets a seed of one device"),
    "seed": (SEED, "sets a seed of one device"),
    "set_state": (STATE, "sets the state of a default random generator (set_rng_state)"),
}
"""Methods of default generators, written in C, by which functions of all devices set seeds and states."""

_WRITERS = (print, open)
_WRITING = {"write", "writelines"}
"""Methods of files, including the console."""

_NAMES = {*(each.__name__ for each in _WRITERS), *_WRITING, *_OF_NODES, *_OF_GENERATORS}
"""Names of all noticed functions that are written in C."""

_FORK = _code(torch.random.fork_rng)


class NoticedCalls(dict[str, tuple[str, str]]):
    """Profiler that records the first noticed call of each kind: its description, and the user's line that makes it.

    Attributes:
        functions: The called functions: their codes with their globals, by the ``id`` of both. Code alone is not
            enough, because functions of two files with equal lines have equal codes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.functions: dict[tuple[int, int], tuple[CodeType, dict[str, Any]]] = {}

    def __call__(self, frame: FrameType, event: str, called: Any) -> None:
        if event == "call":  # thousands in a forward, so each takes as little as possible
            code, names = frame.f_code, frame.f_globals
            if (key := (id(code), id(names))) not in self.functions:
                self.functions[key] = code, names
            if id(code) in _CALLS:
                self._check(frame)
        # torch 2.11 traces profilers, and fails at such names
        elif event == "c_call" and not torch.compiler.is_dynamo_compiling() and called.__name__ in _NAMES:
            self._check_c(frame, called)

    def _check(self, frame: FrameType) -> None:
        """Check the function that begins in ``frame``."""
        found = _CALLS[id(frame.f_code)]  # dynamo, which may trace this, has no guard for a code as a key
        if found[0] in self:
            return
        caller = frame.f_back
        if found is _OUTPUT and not _asked_by_user(caller):
            return
        if caller is not None and caller.f_code.co_filename == checkpoint.__file__:
            return  # what checkpoints do for themselves is known (`FrozenValues.checkpoints`)
        self[found[0]] = (found[1], _users_line(caller))

    def _check_c(self, frame: FrameType, function: Any) -> None:
        """Check ``function``, which is written in C and called in ``frame``."""
        name, owner = function.__name__, getattr(function, "__self__", None)
        found = None
        if any(function is each for each in _WRITERS) or (name in _WRITING and isinstance(owner, io.IOBase)):
            found = _OUTPUT if _asked_by_user(frame) else None
        elif isinstance(owner, autograd_graph.Node):
            found = _OF_NODES.get(name)
        elif isinstance(owner, torch.Generator) and name in _OF_GENERATORS and not _is_torchs_own(frame):
            is_default = any(owner is each for each in (torch.default_generator, *default_generators()))
            found = _OF_GENERATORS[name] if is_default else None
        if found is not None and found[0] not in self:
            self[found[0]] = (found[1], _users_line(frame))

    def told(self, *kinds: str) -> tuple[str, str] | None:
        """Return the description and the line of a noticed call of these ``kinds``, or None."""
        return next((self[kind] for kind in kinds if kind in self), None)


def line_for_people(file: str, line: int) -> str:
    """Format the name of ``file``, the number of a ``line`` in it, and its text."""
    return f"{Path(file).name}:{line}, `{linecache.getline(file, line).strip()}`"


def is_users(code: CodeType) -> bool:
    """Return True if the code belongs neither to torch, nor to Python, nor to this package."""
    file = code.co_filename
    if file.startswith(_NOT_USERS):
        return False
    return file.startswith(PACKAGES) or not file.startswith(_STANDARD_LIBRARY)


def line_that_names(codes: Iterable[CodeType], path: str) -> str | None:
    """Return for people the first line of ``codes`` that names the last part of ``path``."""
    name = path.partition("' in the closure")[0].rpartition("'")[2] or path
    for part in (part.partition("[")[0] for part in reversed(name.split("."))):
        for code in codes:
            if part in (*code.co_names, *code.co_freevars, *code.co_cellvars):
                naming = (each.positions for each in dis.get_instructions(code) if each.argval == part)
                if (positions := next(naming, None)) is not None and positions.lineno is not None:
                    return line_for_people(code.co_filename, positions.lineno)
    return None


def _asked_by_user(frame: FrameType | None) -> bool:
    """Return True if a user's own code writes, itself or by the standard library, except for warnings."""
    while frame is not None and not frame.f_code.co_filename.startswith(PACKAGES):
        if is_users(frame.f_code):
            return True
        if not frame.f_code.co_filename.startswith(_STANDARD_LIBRARY) or frame.f_code.co_filename == warnings.__file__:
            return False
        frame = frame.f_back
    return False


def _is_torchs_own(frame: FrameType | None) -> bool:
    """Return True if torch itself sets a seed or a state, to restore it, rather than by its functions for the user."""
    while frame is not None:
        code = frame.f_code
        is_torchs = code.co_filename.startswith(_TORCH)
        passes_on = (is_torchs and Path(code.co_filename).name == "random.py") or code.co_name == "_lazy_call"
        if code is _FORK or not passes_on:
            return is_torchs
        frame = frame.f_back
    return False


def _users_line(frame: FrameType | None) -> str:
    while frame is not None and (not is_users(frame.f_code) or frame.f_code.co_filename.startswith("<")):
        frame = frame.f_back
    return "" if frame is None else line_for_people(frame.f_code.co_filename, frame.f_lineno)
