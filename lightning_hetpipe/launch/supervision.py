"""Supervision of a run: it is started again from its newest checkpoint if virtual worker 0 is lost.

    supervisor        the command that a person has started. It trains nothing, and so outlives the training
    first process     the same command once more: virtual worker 0, which starts the other virtual workers

The first process and its virtual workers hold one end of a pipe. A line in the pipe is the path of a checkpoint from
which a run can go on. An empty line means that virtual worker 0 is lost. The end of the pipe means that all these
processes have ended. The supervisor waits for it, because the lowest remaining virtual worker may save the run after
the death of virtual worker 0.

A virtual worker that a person has started beside a run (`launch/local_rendezvous.py`) has its own supervisor. It
restarts the virtual worker if that was lost, or has lost virtual worker 0, so that it comes to the run that goes on.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from lightning_hetpipe.errors import say
from lightning_hetpipe.launch.command import Command
from lightning_hetpipe.launch.parent_watch import this_child
from lightning_hetpipe.server.process.signals import handled, how


class Progress(NamedTuple):
    """Progress of a run at a checkpoint. A greater value means more progress. ``epoch`` is -1 for an unreadable file.
    ``waves`` counts within the epoch, and counts minibatches in a run without waves. ``steps`` are all optimizer steps.
    """

    epoch: int
    waves: float = 0.0
    steps: int = 0


def progress_of(path: str | Path) -> Progress:
    """Read the progress of the checkpoint at ``path``."""
    try:
        with zipfile.ZipFile(path) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
            with archive.open(name) as file:
                content: Any = _PlainReader(file).load()
        epoch, loop = content["epoch"], content["loops"]["fit_loop"]
        begun, batches = loop["epoch_progress"]["current"], loop["epoch_loop.batch_progress"]["current"]
        is_between = epoch >= begun["ready"]  # the last epoch is over, but its batches are still counted
        waves = 0.0 if is_between else batches["processed"] / content.get("hetpipe", {}).get("wave", 1)
        return Progress(int(epoch), float(waves), int(content["global_step"]))
    except Exception:  # whatever somebody's plugin has written
        return Progress(-1)


def furthest(paths: Iterable[str]) -> str | None:
    """Return the existing path with the most progress, of equal ones the last, or None. The newest file may not have
    the most progress: a slow virtual worker may save last after virtual worker 0 is lost. So the contents decide, from
    which only plain values are unpickled."""
    there = [path for path in paths if os.path.isfile(path)]
    return max(reversed(there), key=progress_of, default=None)


class _PlainReader(pickle.Unpickler):
    """Unpickler of numbers, strings, and lists and dicts of them. Stand-ins replace other objects, whose code never
    runs."""

    def find_class(self, module: str, name: str) -> Any:
        return OrderedDict if (module, name) == ("collections", "OrderedDict") else _Placeholder

    def persistent_load(self, pid: Any) -> Any:
        return _Placeholder()


class _Placeholder:
    """Stand-in for any object, which accepts all operations of unpickling."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def _ignore(self, *_: Any) -> None:
        pass

    __call__ = __setstate__ = __setitem__ = append = extend = add = _ignore


VARIABLE = "HETPIPE_SUPERVISED"
"""Environment variable of a supervised process: the descriptor of its end of the pipe. After a restart, the checkpoint
from which the run goes on follows, as in 7@last.ckpt."""

LONGEST = 120.0
"""Seconds to wait for the other processes after the end of virtual worker 0. They end within seconds of it."""

ENDS = (0, 1, 2, 130, 143)
"""Exit codes with which a command ends by itself. Any other exit code, or a signal, is a loss."""

_PASSED_ON = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2")
_NUMBERED = ("RANK", "NODE_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "JSM_NAMESPACE_RANK")
_SOON = 1.0  # seconds after which SIGINT is passed on: by then Lightning ignores a second one

_pipe: int | None = None
_resumed = ""


def supervised() -> int | None:
    """Return the descriptor of this process's end of the pipe, or None without a supervisor. The variable is removed
    from the environment, because a program that this process starts would misread it."""
    global _resumed
    if (told := os.environ.pop(VARIABLE, None)) is not None:
        descriptor, _, _resumed = told.partition("@")
        tell(int(descriptor))
    return _pipe


def tell(pipe: int) -> None:
    """Report to the supervisor at the other end of ``pipe`` from now on."""
    global _pipe
    _pipe = pipe
    os.set_inheritable(pipe, False)


def resumed_from() -> str:
    """Return the checkpoint from which the run goes on if this process was restarted, or an empty text."""
    return _resumed if supervised() is not None else ""


def note_saved(path: str | Path) -> None:
    """Report to the supervisor, if any, a checkpoint from which the run can go on."""
    _say(os.path.abspath(path))


def note_lost() -> None:
    """Report to the supervisor, if any, that the other virtual workers have lost virtual worker 0, and end."""
    _say("")


def _say(line: str) -> None:
    if _pipe is not None:
        with contextlib.suppress(OSError):  # it is gone
            os.write(_pipe, f"{line}\n".encode(errors="surrogateescape"))


class RunSupervisor:
    """Runner of ``program`` to its end, and again, at most ``restarts`` times, if its first process is lost, which is
    virtual worker ``vw``. ``going_on`` returns the arguments by which virtual worker 0 goes on from a checkpoint. Other
    virtual workers get the checkpoint from virtual worker 0."""

    def __init__(self, program: Command, restarts: int, going_on: Callable[[str], Sequence[str]], vw: int = 0) -> None:
        self._program, self._left, self._going_on, self._vw = program, restarts, going_on, vw
        self._saved: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._told: int | None = None  # the signal by which all are to end

    def run(self) -> int:
        """Run the program, and return the exit code of its last run."""
        path: str | None = None
        known = [getattr(signal, name) for name in _PASSED_ON if hasattr(signal, name)]
        # A signal that is ignored here, as SIGINT in the background of a script, stays ignored in the program.
        heard = [each for each in known if signal.getsignal(each) is not signal.SIG_IGN]
        with handled(dict.fromkeys(heard, self._pass_on)):
            while True:
                code, pid = self._once(path)
                if code in ENDS or self._told is not None:
                    return code if code >= 0 else 128 - code
                lost = f"virtual worker {self._vw} (process {pid}) {how(code)}"
                if not self._left:
                    say(f"{lost}{'' if self._vw else ', and the run has ended'}; no restart is left")
                    return code if code >= 0 else 128 - code
                self._left -= 1
                more = f"({self._left or 'no'} more restart{'s' * (self._left != 1)})"
                if not self._vw:
                    path = furthest(self._saved) or path
                where = f"the run is started again {'anew' if path is None else f'from {path}'}"
                say(f"{lost}, and {'is started again' if self._vw else where} {more}")

    def _once(self, path: str | None) -> tuple[int, int]:
        arguments = () if path is None else self._going_on(path)
        ours, theirs = os.pipe()
        variables = {VARIABLE: str(theirs) if path is None else f"{theirs}@{path}"}
        try:
            process = self._process = self._program.start(variables, [theirs], *arguments)
        finally:
            os.close(theirs)
        if self._told is not None:  # it came before this process existed
            process.send_signal(self._told)
        reader = threading.Thread(target=self._read, args=(ours,), name="hetpipe-supervisor", daemon=True)
        reader.start()
        code = process.wait()
        if code not in ENDS:
            reader.join(LONGEST)
        return code, process.pid

    def _read(self, ours: int) -> None:
        with open(ours, encoding="utf-8", errors="surrogateescape") as pipe:
            for line in pipe:
                if line == "\n":
                    self._send(self._process, signal.SIGCONT)  # a stopped process ends once it goes on
                else:
                    self._saved.append(line.rstrip("\n"))

    def _pass_on(self, signum: int, frame: FrameType | None) -> None:
        """Pass a signal on to the program. A terminal's Ctrl-C reaches the program by itself."""
        self._told = signum
        if signum != signal.SIGINT:
            self._send(self._process, signum)
        elif not _is_in_foreground():
            later = threading.Timer(_SOON, self._send, (self._process, signum))
            later.daemon = True
            later.start()

    @staticmethod
    def _send(process: subprocess.Popen[bytes] | None, signum: int) -> None:
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signum)


def _is_in_foreground() -> bool:
    """Return True if Ctrl-C at a terminal reaches this process, and so all of its group."""
    try:
        with open("/dev/tty") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:  # there is none
        return False


def can_supervise() -> bool:
    """Return True if this process may start its program in another process: a person has started it by a plain
    command."""
    is_started = supervised() is not None or this_child() is not None
    return not is_started and sys.platform != "win32" and not any(name in os.environ for name in _NUMBERED)


def own_number() -> int:
    """Return the number of the virtual worker of this machine that a person has started here."""
    given = os.environ.get("LOCAL_RANK", "")
    return int(given) if given.isdecimal() else 0
