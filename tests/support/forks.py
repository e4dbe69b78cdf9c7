"""Python programs in forks of a process that has imported what takes ten seconds to import.

A fork server is a fork of pytest's own process, made before that has loaded the package: it costs no import at all. A
program begins as in an interpreter that was just started, with one thread for torch. But pytest is loaded, and modules
that ``import lightning`` loads. A server with Lightning has loaded also the modules that ``torch.export`` and a fit
load. So its programs run the package that the tests run, whatever else they could find.
The program's process is a child of the process that asks for it. So signals, exit codes and the ends of parents act as
with any process.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import json
import logging
import multiprocessing.util
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NoReturn

ROOT = Path(__file__).parents[2]
SECONDS = 200.0
"""The time that a program has."""

LIBRARIES = ("torch", "torch._dynamo", "scipy.signal", "transformers", "matplotlib.pyplot")
"""Those of the modules that ``import lightning`` loads that take long."""

CAPTURE = "torch.export._trace"
"""Module of torch that a first ``torch.export`` loads, with hundreds of others."""

OURS = {
    "host": ["lightning_hetpipe.hosts.stage_host", "lightning_hetpipe.cli.hetpipe_server"],
    "commands": [
        *(f"lightning_hetpipe.cli.hetpipe_{name}" for name in ("train", "plan", "server")),
        "tests.support.composing",
    ],
    "lightning": [
        "omegaconf",
        "lightning_hetpipe.strategy.virtual_workers",
        "lightning_hetpipe.strategy.hetpipe_strategy",
        "lightning_hetpipe.server.transport.grpc_channel",
        "lightning_hetpipe.server.transport.grpc_server",
        "tests.exact.running",
        "tests.wsp.worker",
        "tests.hosts.test_other_machines",
    ],
}
"""Modules that a host, a command or a fit loads, by server. Lightning loads omegaconf to save a checkpoint. They load
all others that a program needs. Loading takes half of the time of a short program."""

LONGEST = 1 << 17
"""Bytes of a message with the arguments and the environment of a program."""

NAME = "fork server"
"""By which the kernel knows a fork server."""

LAUNCHES = 3
"""Generations of a launch: who starts it again, the first virtual worker, the others, and what these start."""

MOST = 32
"""Descriptors that a program is given."""

LONGEST_COMMAND = 1000
"""Characters of a fork's command that other processes can read."""

_COMMAND = "FORK_COMMAND"

_SET_NAME, _SET_SUBREAPER = 15, 36  # of <linux/prctl.h>
_NETWORK = 0x40000000  # CLONE_NEWNET of <linux/sched.h>
_GUARD = ["-I", "-S", "-c"]  # with which `signals.guarded` begins, whose program runs another one in its place

_servers: dict[str, socket.socket] = {}
_asking = threading.Lock()


def serve() -> None:
    """Start the fork servers: three without and one with Lightning. Where ours is loaded already there are none."""
    if "lightning_hetpipe" in sys.modules:
        return
    for library in LIBRARIES:
        import_module(library)
    if "lightning" not in sys.modules:
        _start("libraries")
        for name in ("host", "commands"):
            _start(name, OURS[name])
    import_module("lightning")
    import_module(CAPTURE)
    _start("lightning", OURS["lightning"])


def end() -> None:
    """End the fork servers."""
    while _servers:
        _servers.popitem()[1].close()


def is_server(pid: int) -> bool:
    """Tell whether a process is a fork server, which programs have that start others."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().rstrip("\n") == NAME
    except OSError:
        return False


class Popen(subprocess.Popen[Any]):
    """A program of this Python's, as ``subprocess.Popen`` would start it: ``-c CODE``, ``-m MODULE`` or a file.

    Whatever cannot be a fork is a process as ever: other programs and options; and all where there is no such server,
    as under the mutation check, which has loaded Lightning.

    Args:
        loaded: "lightning", "libraries", "host" or "commands". The last three lack Lightning, torchmetrics and
            lightning_utilities, and "libraries" lacks the package.
        starting: How many generations of programs that it starts, by ``subprocess.Popen``, are forks as well.
        network: The name of the network namespace that it runs in; by default the starter's namespace.
    """

    def __init__(
        self,
        args: Any,
        *more: Any,
        loaded: str = "lightning",
        starting: int = 0,
        network: str | None = None,
        **told: Any,
    ) -> None:
        self._server = _servers.get(loaded)
        self._more = {"starting": starting, "network": network}
        if network is not None and (self._server is None or not _is_program(args)):
            args = ["ip", "netns", "exec", network, *args]
        super().__init__(args, *more, **told)

    def _execute_child(
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any, env: Any, *rest: Any
    ) -> None:
        pipes, (*others, start_new_session, process_group) = rest[3:9], rest[10:]
        plain = not (executable or preexec_fn or any(rest[:3])) and close_fds and [*others] == [None, None, None, -1]
        if self._server is None or not plain or process_group != -1 or not _is_program(args):
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest)  # type: ignore[misc]
            return
        program = {
            "arguments": [*map(os.fspath, args[1:])],
            "folder": os.fspath(cwd or os.getcwd()),
            "variables": dict(os.environ if env is None else env),
            "descriptors": [0, 1, 2, *map(int, pass_fds)],
            "leads": bool(start_new_session),
            **self._more,
        }
        standard = [own if end == -1 else end for own, end in enumerate((pipes[0], pipes[3], pipes[5]))]
        self.pid = _asked(self._server, program, [*standard, *map(int, pass_fds)])
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


class _Forking(Popen):
    """Takes the place of ``subprocess.Popen`` in a program with a server of its own."""

    generations: ClassVar[int] = 0

    def __init__(self, *more: Any, **told: Any) -> None:
        super().__init__(*more, loaded="own", starting=self.generations, **told)


def run(
    *arguments: str,
    loaded: str = "lightning",
    cwd: Path = ROOT,
    environment: Mapping[str, str] | None = None,
    timeout: float = SECONDS,
    starting: int = 0,
) -> subprocess.CompletedProcess[str]:
    """Run ``python *arguments`` to its end: ``-c CODE``, ``-m MODULE`` or a file, and its own arguments.

    Args:
        loaded, starting: As of ``Popen``.
        environment: All of its variables; those of the test by default.
        timeout: Seconds.
    """
    pipe = subprocess.PIPE
    with Popen(
        [sys.executable, *arguments],
        loaded=loaded,
        starting=starting,
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=pipe,
        stderr=pipe,
        text=True,
    ) as process:
        try:
            out, error = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(arguments, process.returncode, out, error)


def _is_program(args: Any) -> bool:
    """Tell whether a command is a program of this Python's, with no option of Python's but a guard's."""
    if isinstance(args, str | bytes | os.PathLike) or args[0] != sys.executable or len(args) < 2:
        return False
    if args[1:4] == _GUARD:
        return len(args) > 6 and _is_program(args[6:])
    return args[1] in ("-c", "-m") or not os.fspath(args[1]).startswith("-")


def _asked(server: socket.socket, program: Mapping[str, Any], descriptors: Sequence[int]) -> int:
    """Have ``server`` start a program as a child of this process."""
    with _asking, _adopting():
        heard, told = os.pipe()
        try:
            socket.send_fds(server, [json.dumps(program).encode()], [told, *descriptors])
        finally:
            os.close(told)
        with open(heard) as answer:
            said = answer.readline()
    if not said:
        raise OSError("the fork server has started no process")
    return int(said)


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Make this process the parent of what its forks have forked and left."""
    _control(_SET_SUBREAPER, 1)
    try:
        yield
    finally:
        _control(_SET_SUBREAPER, 0)


def _control(what: int, value: Any) -> None:
    ctypes.CDLL(None).prctl(what, value, 0, 0, 0)


def _start(name: str, modules: Sequence[str] = ()) -> None:
    _flush()  # else each fork would write what is still to be written
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        try:
            _serve(theirs, modules)
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
            os._exit(1)
        os._exit(0)
    theirs.close()
    _servers[name] = ours


def _serve(requests: socket.socket, modules: Sequence[str]) -> None:
    """Fork for each of ``requests``, until nobody is left who could make one; ``modules`` are imported at the first."""
    _servers.clear()
    _control(_SET_NAME, NAME.encode())
    interrupt = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's is pytest's
    os.dup2(requests.detach(), 3)
    os.closerange(4, os.sysconf("SC_OPEN_MAX"))
    for standard in range(3):
        os.dup2(os.open(os.devnull, os.O_RDWR), standard)
    sys.meta_path[:] = [finder for finder in sys.meta_path if "pytest" not in type(finder).__module__]
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    for ending in (logging.shutdown, vars(multiprocessing.util)["_exit_function"]):  # as where these are loaded
        atexit.register(ending)
    requests = socket.socket(fileno=3)
    while (received := socket.recv_fds(requests, LONGEST, MOST))[0]:
        for module in modules:
            import_module(module)
        gc.freeze()  # so that no program's garbage collector goes through loaded modules, for 0.3 s
        request, (told, *given), *_ = received
        between = os.fork()
        if between == 0:
            between = os.getpid()
            if os.fork():
                os._exit(0)  # whoever asks is the parent from here on
            while os.getppid() == between:
                time.sleep(0.0005)
            signal.signal(signal.SIGINT, interrupt)
            os.write(told, f"{os.getpid()}\n".encode())
            os.close(told)
            _become(given, **json.loads(request))
        os.waitpid(between, 0)
        for file in (told, *given):
            os.close(file)


def _become(
    given: Sequence[int],
    arguments: Sequence[str],
    folder: str,
    variables: Mapping[str, str],
    descriptors: Sequence[int],
    leads: bool,
    starting: int,
    network: str | None,
) -> NoReturn:
    """Be the program ``python *arguments``, from its begin to its end.

    Args:
        given: Descriptors of whoever asks, which are ``descriptors`` in the program.
        leads: It leads a session.
        starting, network: As of ``Popen``.
    """
    _control(_SET_NAME, b"python")
    if leads:
        os.setsid()
    if network is not None:
        with open(f"/run/netns/{network}") as file:
            ctypes.CDLL(None).setns(file.fileno(), _NETWORK)
    above = max(descriptors) + 1
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD, above) for each in given]
    os.closerange(3, above)
    for own, each in zip(moved, descriptors, strict=True):
        os.dup2(own, each)
    os.closerange(above, os.sysconf("SC_OPEN_MAX"))
    if starting:
        _start("own")
        _Forking.generations = starting - 1
        vars(subprocess)["Popen"] = _Forking
    os.environ.clear()
    os.environ.update(variables)
    tempfile.tempdir = None  # which TMPDIR has not named here
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    import_module("torch").set_num_threads(1)  # as OMP_NUM_THREADS=1 does at a real start
    code: Any = 0
    try:
        os.chdir(folder)
        _execute(arguments)
    except SystemExit as end:
        code = end.code
    except BaseException as error:
        sys.excepthook(*sys.exc_info())
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    _flush()
    if code == -signal.SIGINT:  # as Python ends then
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code or 0)


def command_of(pid: int) -> str:
    """Return the command of a process, or an empty string if it has ended; of a fork the program that it runs."""
    try:
        folder = Path(f"/proc/{pid}")
        shown = (folder / "environ").read_bytes().partition(b"\0")[0].decode(errors="replace")
        name, _, command = shown.partition("=")
        return command if name == _COMMAND else (folder / "cmdline").read_bytes().decode().replace("\0", " ")
    except OSError:
        return ""


def _show_program() -> None:
    """Have others read the program and the variables of this process where the kernel shows the initial variables."""
    begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47:49])
    shown = [(_COMMAND, " ".join(sys.orig_argv)[:LONGEST_COMMAND]), *reversed([*os.environ.items()])]
    text = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in shown)  # the first ones have room
    ctypes.memset(begin, 0, end - begin)
    ctypes.memmove(begin, text, min(len(text), end - begin - 1))


class _Replaced(BaseException):
    """A guard runs the command that it guards."""


def _guarded(guard: str, arguments: Sequence[str]) -> list[str]:
    """Run a guard's program; gives what it runs in its place."""

    def replace(path: str, command: list[str]) -> NoReturn:
        raise _Replaced(command)

    execv, argv = os.execv, sys.argv
    vars(os)["execv"], sys.argv = replace, ["-c", *arguments]
    try:
        exec(guard, {})
    except _Replaced as replaced:
        return [*replaced.args[0][1:]]
    finally:
        vars(os)["execv"], sys.argv = execv, argv
    sys.exit()


def _execute(arguments: Sequence[str]) -> None:
    if [*arguments[:3]] == _GUARD:
        arguments = _guarded(arguments[3], arguments[4:])
    what, *rest = arguments
    sys.orig_argv = [sys.executable, *arguments]
    _show_program()
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
