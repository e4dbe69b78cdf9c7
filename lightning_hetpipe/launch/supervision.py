"""Supervision of a run: it is started again from its newest checkpoint where virtual worker 0 is lost.

    supervisor        the command that a person has started; it trains nothing, and so outlives what trains
    first process     the same command once more: virtual worker 0, which starts the others

The first process and all that it starts, or that come to it, hold one end of a pipe. Each line in it is the path of a
checkpoint that a run can go on from, an empty one says that virtual worker 0 is lost, and its end that all of them have
ended: the lowest virtual worker that is left may save the run after virtual worker 0 has died.

A virtual worker that a person has started beside a run (`launch/local_rendezvous.py`) has a supervisor of its own,
which starts it again where it was lost, or has lost virtual worker 0: then it comes to the run that goes on.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from lightning_hetpipe.errors import say
from lightning_hetpipe.launch.parent_watch import this_child
from lightning_hetpipe.server.process.server_process import how
from lightning_hetpipe.server.process.signals import guarded


class Progress(NamedTuple):
    """Progress of a run when a checkpoint of it was saved; greater ones are further.

    Attributes:
        epoch: Its epoch; -1 of a file that cannot be read.
        waves: Waves in that epoch; minibatches where there are no waves.
        steps: Optimizer steps in all.
    """

    epoch: int
    waves: float = 0.0
    steps: int = 0


def progress_of(path: str | Path) -> Progress:
    """The progress of the checkpoint at ``path``."""
    try:
        with zipfile.ZipFile(path) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
            with archive.open(name) as file:
                content: Any = _PlainReader(file).load()
        epoch, loop = content["epoch"], content["loops"]["fit_loop"]
        begun, batches = loop["epoch_progress"]["current"], loop["epoch_loop.batch_progress"]["current"]
        is_between = epoch >= begun["ready"]  # the last epoch is over, and its batches are counted still
        waves = 0.0 if is_between else batches["processed"] / content.get("hetpipe", {}).get("wave", 1)
        return Progress(int(epoch), float(waves), int(content["global_step"]))
    except Exception:  # whatever somebody's plugin has written
        return Progress(-1)


def furthest(paths: Iterable[str]) -> str | None:
    """The one of ``paths`` with the most progress; of equal ones the last, and None where none is there.

    The newest file need not be that one: where virtual worker 0 is lost, one that was late may save last what it had.
    So the contents tell, of which nothing but plain values is unpickled.
    """
    there = [path for path in paths if os.path.isfile(path)]
    return max(reversed(there), key=progress_of, default=None)


class _PlainReader(pickle.Unpickler):
    """Unpickles numbers, strings, and lists and dicts of them; others have stand-ins, and no code of theirs runs."""

    def find_class(self, module: str, name: str) -> Any:
        return OrderedDict if (module, name) == ("collections", "OrderedDict") else _Placeholder

    def persistent_load(self, pid: Any) -> Any:
        return _Placeholder()


class _Placeholder:
    """Takes the place of any object, and takes anything that unpickling does with one."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def _ignore(self, *_: Any) -> None:
        pass

    __call__ = __setstate__ = __setitem__ = append = extend = add = _ignore


VARIABLE = "HETPIPE_SUPERVISED"
"""The environment variable of a supervised process: the descriptor of its end of the pipe, and, as in 7@last.ckpt, the
checkpoint that its run goes on from, if it was started again."""

LONGEST = 120.0
"""Seconds that are waited for the others after virtual worker 0, which end within seconds of it."""

ENDS = (0, 1, 2, 130, 143)
"""Exit codes with which a command ends by itself; any other one, or a signal, is a loss."""

_PASSED_ON = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2")
_LOCAL = "LOCAL_RANK"
_NUMBERED = ("RANK", "NODE_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "JSM_NAMESPACE_RANK")
_SOON = 1.0  # seconds after which SIGINT is passed on: by then Lightning ignores a second one

_pipe: int | None = None
_resumed = ""


def supervised() -> int | None:
    """The descriptor of this process's end of the pipe; None where nobody supervises it.

    The variable is taken out of the environment, lest a program believes it of itself that this one starts.
    """
    global _resumed
    if (told := os.environ.pop(VARIABLE, None)) is not None:
        descriptor, _, _resumed = told.partition("@")
        tell(int(descriptor))
    return _pipe


def tell(pipe: int) -> None:
    """Have the supervisor at the other end of ``pipe`` told from now on."""
    global _pipe
    _pipe = pipe
    os.set_inheritable(pipe, False)


def resumed_from() -> str:
    """The checkpoint that this process's run goes on from, as it was started again; empty where it was not."""
    return _resumed if supervised() is not None else ""


def note_saved(path: str | Path) -> None:
    """Tell the supervisor, if there is one, of a checkpoint that the run can go on from."""
    _say(os.path.abspath(path))


def note_lost() -> None:
    """Tell the supervisor, if there is one, that the others have lost virtual worker 0, and end."""
    _say("")


def _say(line: str) -> None:
    if _pipe is not None:
        with contextlib.suppress(OSError):  # it is gone
            os.write(_pipe, f"{line}\n".encode(errors="surrogateescape"))


class RunSupervisor:
    """Runs a program to its end, and again where its first process is lost.

    Args:
        command: Starts the program.
        folder: The folder to start it in.
        restarts: How often it is started again, at most.
        going_on: Gives the arguments by which virtual worker 0 goes on from a checkpoint; others get that from it.
        vw: The virtual worker that it is.
    """

    def __init__(
        self, command: Sequence[str], folder: str, restarts: int, going_on: Callable[[str], Sequence[str]], vw: int = 0
    ) -> None:
        self._vw = vw
        self._command, self._folder, self._left, self._going_on = [*command], folder, restarts, going_on
        self._saved: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._told: int | None = None  # the signal by which all are to end

    def run(self) -> int:
        """Run it; gives the exit code of the last time."""
        path: str | None = None
        with self._passing_signals_on():
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
        try:
            process = self._process = subprocess.Popen(
                guarded([*self._command, *arguments]),
                cwd=self._folder,
                env={**os.environ, VARIABLE: str(theirs) if path is None else f"{theirs}@{path}"},
                pass_fds=[theirs],
            )
        finally:
            os.close(theirs)
        if self._told is not None:  # while there was no process, or not this one
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
                    self._send(self._process, signal.SIGCONT)  # it may be stopped, and ends once it goes on
                else:
                    self._saved.append(line.rstrip("\n"))

    @contextlib.contextmanager
    def _passing_signals_on(self) -> Iterator[None]:
        """Leave signals to the program. A terminal's Ctrl-C reaches it by itself, one sent to all after all."""

        def pass_on(signum: int, frame: FrameType | None) -> None:
            self._told = signum
            if signum != signal.SIGINT:
                self._send(self._process, signum)
            elif not _is_in_foreground():
                later = threading.Timer(_SOON, self._send, (self._process, signum))
                later.daemon = True
                later.start()

        known = [getattr(signal, name) for name in _PASSED_ON if hasattr(signal, name)]
        # One that is ignored here, as SIGINT in the background of a script, stays so in the program.
        heard = [each for each in known if signal.getsignal(each) is not signal.SIG_IGN]
        before = {each: signal.signal(each, pass_on) for each in heard}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    @staticmethod
    def _send(process: subprocess.Popen[bytes] | None, signum: int) -> None:
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signum)


def _is_in_foreground() -> bool:
    """Tell whether Ctrl-C at a terminal reaches this process, and so all of its group."""
    try:
        with open("/dev/tty") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:  # there is none
        return False


def can_supervise() -> bool:
    """Tell whether this process may start its program in another one: a person has started it, by a plain command."""
    is_started = supervised() is not None or this_child() is not None
    return not is_started and sys.platform != "win32" and not any(name in os.environ for name in _NUMBERED)


def own_number() -> int:
    """The virtual worker of this machine that a person has started here."""
    given = os.environ.get(_LOCAL, "")
    return int(given) if given.isdecimal() else 0
