"""Python programs in forks of a process that has imported what takes ten seconds to import, but nothing of ours.

A fork server is a fork of pytest's own process, made before that has loaded the package: it costs no import at all. A
program begins as in an interpreter that was just started, but for modules that are loaded already, none but those that
``import lightning`` loads, and pytest; and torch computes with one thread.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

ROOT = Path(__file__).parents[2]
SECONDS = 200.0
"""The time that a program has."""

LIBRARIES = ("torch", "torch._dynamo", "scipy.signal", "transformers", "matplotlib.pyplot")
"""Those of the modules that ``import lightning`` loads that take long."""

LONGEST = 1 << 17
"""Bytes of a message with the arguments and the environment of a program."""

_servers: dict[str, socket.socket] = {}


def serve() -> None:
    """Start the fork servers, one without and one with Lightning. Where ours is loaded already there are none."""
    if "lightning_hetpipe" in sys.modules:
        return
    for library in LIBRARIES:
        import_module(library)
    if "lightning" not in sys.modules:
        _start("libraries")
    import_module("lightning")
    _start("lightning")


def end() -> None:
    """End the fork servers."""
    while _servers:
        _servers.popitem()[1].close()


def run(
    *arguments: str,
    loaded: str = "lightning",
    cwd: Path = ROOT,
    environment: Mapping[str, str] | None = None,
    timeout: float = SECONDS,
) -> subprocess.CompletedProcess[str]:
    """Run ``python *arguments`` to its end: ``-c CODE``, ``-m MODULE`` or a file, and its own arguments.

    Args:
        loaded: "lightning", or "libraries", which does without Lightning, torchmetrics and lightning_utilities. Where
            there is no such server, as under the mutation check, which has loaded Lightning, it is a real process.
        environment: All of its variables; those of the test by default.
        timeout: Seconds.
    """
    variables = dict(os.environ if environment is None else environment)
    if loaded not in _servers:
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=timeout)
    request = json.dumps([arguments, str(cwd), variables]).encode()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as error:
        heard, told = os.pipe()
        try:
            socket.send_fds(_servers[loaded], [request], [out.fileno(), error.fileno(), told])
        finally:
            os.close(told)
        with open(heard) as answers:
            code = _code(answers, timeout)
        for written in (out, error):
            written.seek(0)
        return subprocess.CompletedProcess(arguments, code, out.read(), error.read())


def _code(answers: Any, timeout: float) -> int:
    """The exit code of the program whose process and exit code are lines of ``answers``; it is killed if it lasts."""
    child = int(answers.readline())
    try:
        if not select.select([answers], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("the fork", timeout)
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
    return int(answers.readline())


def _start(name: str) -> None:
    _flush()  # else each fork would write what is still to be written
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        try:
            _serve(theirs)
        finally:
            os._exit(0)
    theirs.close()
    _servers[name] = ours


def _serve(requests: socket.socket) -> None:
    """Fork for each of ``requests``, until nobody is left who could make one."""
    _servers.clear()
    interrupt = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's is pytest's
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    os.dup2(requests.detach(), 3)
    os.closerange(4, os.sysconf("SC_OPEN_MAX"))
    for standard in range(3):
        os.dup2(os.open(os.devnull, os.O_RDWR), standard)
    sys.meta_path[:] = [finder for finder in sys.meta_path if "pytest" not in type(finder).__module__]
    atexit._clear()
    requests = socket.socket(fileno=3)
    while (received := socket.recv_fds(requests, LONGEST, 3))[0]:
        request, (out, error, told), *_ = received
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            child = os.fork()
            if child == 0:
                signal.signal(signal.SIGINT, interrupt)
                _become(out, error, *json.loads(request))
            os.write(told, f"{child}\n".encode())
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            os.write(told, f"{code}\n".encode())
            os._exit(0)
        for file in (out, error, told):
            os.close(file)


def _become(out: int, error: int, arguments: Sequence[str], folder: str, variables: Mapping[str, str]) -> NoReturn:
    """Be the program ``python *arguments``, from its begin to its end."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    os.dup2(out, 1)
    os.dup2(error, 2)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__
    import_module("torch").set_num_threads(1)  # as OMP_NUM_THREADS=1 does at a real start
    sys.orig_argv = [sys.executable, *arguments]
    code: Any = 0
    try:
        _execute(arguments)
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    _flush()
    os._exit(code or 0)


def _execute(arguments: Sequence[str]) -> None:
    what, *rest = arguments
    first = str(Path(what).parent) if what not in ("-c", "-m") else os.getcwd() if what == "-m" else ""
    sys.path[:0] = [first, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    if what == "-c":
        sys.argv[:] = ["-c", *rest[1:]]
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(main))
    elif what == "-m":
        sys.argv[:] = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = arguments
        runpy.run_path(what, run_name="__main__")


def _flush() -> None:
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is not None:
            stream.flush()
