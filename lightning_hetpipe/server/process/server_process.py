"""Server as a child process that never outlives its parent, and is restarted if it dies (law L5).

:func:`serve` is the main loop of a server process, until SIGTERM, SIGINT, or the end of its parent.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from multiprocessing.connection import wait
from pkgutil import resolve_name
from typing import Any, NoReturn, Self, cast

from lightning_hetpipe.errors import SettingError, say
from lightning_hetpipe.server.process.signals import (
    close_in_forks,
    exit_now,
    forget,
    how,
    search_path,
    start_child,
    until_signal,
)
from lightning_hetpipe.server.transport.interface import Handler
from lightning_hetpipe.server.transport.security import Security

_START = 120.0  # seconds in which a child must serve: on a busy machine torch alone takes many to import
_STOP = 10.0  # seconds in which a child must end by itself
_LOOK = 0.2  # seconds between checks of the child
_HELD = 5.0  # seconds that calls may take to leave the handler once it is closed

_LOG = logging.getLogger(__name__)


class ServerProcess:
    """Server in a process of its own while the context is entered.

    The child ends after :meth:`stop`, when this object's process ends in any way, and on SIGTERM. It has its own
    process session, so Ctrl-C reaches only the launch, which then ends the child.
    """

    def __init__(
        self,
        handler: str,
        arguments: Mapping[str, object] | None = None,
        address: str = "127.0.0.1:0",
        security: Security | None = None,
    ) -> None:
        """Check and store the arguments.

        Args:
            handler: ``package.module:name`` of a callable that makes the handler in the child.
            arguments: Keyword arguments of this callable, as JSON values.
            address: Address to listen at. Port 0 takes any free port, which restarts keep.
            security: Certificates and token. Without a token, a random token is made.

        Raises:
            SettingError: if the address is malformed, or open without certificates.
        """
        security = security or Security()
        self.security = security if security.token else replace(security, token=secrets.token_urlsafe(32))
        """Settings for channels to this server."""
        self.security.check(address)
        self.address = address
        """``host:port``, with the port of the first start."""
        self._told = {"handler": handler, "arguments": dict(arguments or {}), **search_path()}
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the child, or None if it does not run."""
        return self._child.pid if self._child is not None and self._child.poll() is None else None

    @property
    def code(self) -> int | None:
        """Exit code of the child, negative for a signal. None if it runs or was never started."""
        return self._child.poll() if self._child is not None else None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the child, unless it runs, and return when it serves.

        Raises:
            SettingError: if the address or the certificates cannot be used.
            RuntimeError: if the child ends (another thread may have stopped it), or does not serve within two minutes.
        """
        if self.pid is not None:
            return
        self.stop()  # remains of a dead child
        child = self._child = start_child(__name__, "hetpipe-server", stdout=subprocess.PIPE)
        try:
            answer = self._ask(child)
        except BaseException:
            self.stop()
            raise
        if "refused" in answer:
            self.stop()
            raise SettingError(answer["refused"])
        self.address = answer["address"]

    def stop(self) -> None:
        """End the child, by force if necessary. May be called again, and by any thread."""
        child, self._child = self._child, None
        if child is None:
            return
        assert child.stdin is not None
        try:
            with suppress(BrokenPipeError):
                child.stdin.close()
            child.terminate()
            try:
                child.wait(_STOP)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        finally:
            if child.stdout is not None:
                child.stdout.close()

    def _ask(self, child: subprocess.Popen[bytes]) -> dict[str, str]:
        """Send the child its settings on standard input. Return its answer."""
        assert child.stdin is not None
        assert child.stdout is not None
        close_in_forks(child.stdin)
        told = {**self._told, "address": self.address, "security": asdict(self.security)}
        try:
            child.stdin.write(json.dumps(told).encode() + b"\n")
            child.stdin.flush()
        except BrokenPipeError:
            raise RuntimeError(f"the server's process ended at its start, with status {child.wait(_STOP)}") from None
        with child.stdout as answers:
            if not wait([answers.fileno()], _START):
                child.kill()
                raise RuntimeError(f"the server's process does not serve {self.address} within {_START:g} s")
            said = answers.readline()
        if not said:
            raise RuntimeError(
                f"the server's process ended before it served {self.address}, with status {child.wait(_STOP)}; its"
                " output above says why"
            )
        return cast(dict[str, str], json.loads(said))


STARTS = 5
"""Restarts within `WINDOW` seconds after which a server is given up."""

WINDOW = 300.0
"""Seconds after which an end does not count any more."""


class ServerLost(RuntimeError):
    """Error that the server has ended and restarts have failed. The message says how it ended."""


def pause(ends: Sequence[float], now: float) -> float | None:
    """Return the seconds to wait before a restart, or None to give up. The wait is 0 at first, and grows.

    ``ends`` are the times of all ends and failed starts, on the clock of ``now``.
    """
    recent = sum(now - end < WINDOW for end in ends)
    if recent > STARTS:
        return None
    return 0.0 if recent < 2 else 0.5 * 2.0 ** (recent - 2)


class Supervisor:
    """Thread that keeps ``server`` running while the context is entered.

    ``server`` is not started yet, and keeps its address. Each restart is printed. ``failure`` says why the server was
    given up, or is None.
    """

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.failure: ServerLost | None = None
        self._ends: list[float] = []
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hetpipe-supervisor", daemon=True)

    def __enter__(self) -> Self:
        """Start the server and return when it serves. Raises as `ServerProcess.start` does."""
        self.server.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End the server, even during a restart."""
        self._ending.set()
        self.server.stop()  # this also ends a running start
        self._thread.join()
        self.server.stop()

    def _watch(self) -> None:
        while not self._ending.wait(_LOOK):
            if (code := self.server.code) is not None and not self._start_again(how(code)):
                return

    def _start_again(self, what: str) -> bool:
        """Restart the server after its end, described by ``what``. Return True if it serves again."""
        first = what
        while True:
            now = time.monotonic()
            self._ends.append(now)
            rest = pause(self._ends, now)
            if rest is None:
                times = f"{len(self._ends)} times" if len(self._ends) > 1 else "once"
                self.failure = ServerLost(
                    f"the parameter server at {self.server.address} has failed {times}: it {what}"
                )
                return False
            if self._ending.wait(rest):
                return False
            try:
                self.server.start()
            except Exception as error:
                if self._ending.is_set():
                    return False
                what = f"could not be started again ({str(error).rstrip('.')})"
                continue
            if self._ending.is_set():
                return False
            say(
                f"the parameter server {first} and was started again; training goes on from what the virtual workers"
                " hold"
            )
            return True


def child(handler: str, arguments: dict[str, Any], address: str, security: dict[str, Any]) -> None:
    """Run the child. It answers on standard output with one line of JSON: the address, or an error."""
    answers = os.dup(1)
    os.dup2(2, 1)  # output goes to the parent's standard error

    def answer(**what: str) -> None:
        os.write(answers, json.dumps(what).encode() + b"\n")
        os.close(answers)

    def ready(at: str) -> None:
        forget()  # from here on the parent is watched; the thread that started this process may end
        answer(address=at)

    try:
        serving = resolve_name(handler)(**arguments)
        serve(serving, address, Security(**security), ready, sys.stdin.fileno())
    except SettingError as error:
        answer(refused=str(error))
    end(0)


def serve(
    handler: Handler, address: str, security: Security, ready: Callable[[str], None], parent: int | None = None
) -> int:
    """Serve as `until_signal` does. Raise SettingError if the address or the certificates cannot be used.

    If ``handler`` has a method ``close``, this is called at the end to wake calls that wait in its ``serve``.
    """
    from lightning_hetpipe.server.transport.grpc_server import GrpcServer  # only the process that serves needs gRPC

    @contextmanager
    def serving() -> Iterator[GrpcServer]:
        try:
            with GrpcServer(handler, address, security) as server:
                yield server
        finally:
            getattr(handler, "close", lambda: None)()

    return until_signal(serving(), ready, parent)


def end(code: int) -> NoReturn:
    """End the process, even if a handler still waits, without finalising the interpreter. With torch, that would delay
    the end of a launch by most of a second."""
    deadline = time.monotonic() + _HELD
    ours = threading.current_thread()
    for thread in threading.enumerate():
        if thread is not ours and not thread.daemon:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                _LOG.warning("hetpipe server: %s did not end in %g s; ending without it", thread.name, _HELD)
                break
    exit_now(code)
