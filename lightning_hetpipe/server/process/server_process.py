"""A server as a child process: it lives as long as its parent wants it to, and never longer than its parent."""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from importlib import import_module
from types import TracebackType
from typing import Any, Self, cast

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.server.process.parent_death import ASK, forget
from lightning_hetpipe.server.transport.security import Security

_START = 120.0  # seconds in which a child must serve: on a busy machine torch alone takes many to import
_STOP = 10.0  # seconds in which a child must end by itself
_LOOK = 0.2  # seconds between looks at whether a start is still wanted

# The search path comes from the parent, as with multiprocessing, so that the child finds what the parent finds.
# Who the parent is must be asked before anything else: later it may be dead already, and another one's child this.
CHILD = f"""
import os
parent = os.getppid()
{ASK}
if os.getppid() != parent:
    sys.exit()
import json
told = json.loads(sys.stdin.readline())
sys.path[:] = told.pop("path")
from lightning_hetpipe.server.process.server_process import child
child(parent, **told)
"""


class ServerProcess:
    """A server in a process of its own. Serves between entering and leaving the context.

    The child ends when it is told to, when this object's process ends however it does, and on SIGTERM. It is in a
    session of its own, so that Ctrl-C reaches the launch first, which then ends it.
    """

    def __init__(
        self,
        handler: str,
        arguments: Mapping[str, object] | None = None,
        address: str = "127.0.0.1:0",
        security: Security | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        """Only stores and checks.

        Args:
            handler: ``package.module:name`` of what, called with ``arguments`` in the child, gives the handler.
            arguments: by name; what JSON can say.
            address: where to listen; port 0 takes any free one, which then stays the same over restarts.
            security: as for `GrpcServer`; without a token, a random one is made.
            prefix: a command to start the child under, such as ``ip netns exec NAME``.

        Raises:
            SettingError: if the address is malformed, or open without certificates.
        """
        security = security or Security()
        self.security = security if security.token else replace(security, token=secrets.token_urlsafe(32))
        """What channels to this server need."""
        self.security.check(address)
        self._address = address
        # Absolute, as a program may go to another folder before its server has to be started again.
        path = [os.path.abspath(each) for each in sys.path]
        self._told: dict[str, object] = {"handler": handler, "arguments": dict(arguments or {}), "path": path}
        self._prefix = tuple(prefix)
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """``host:port``, with the port that it got when it first started."""
        return self._address

    @property
    def pid(self) -> int | None:
        """The child's, or None where it does not run."""
        return self._child.pid if self._child is not None and self._child.poll() is None else None

    @property
    def code(self) -> int | None:
        """How the child ended, negative for a signal; None where it runs, or was never started."""
        return self._child.poll() if self._child is not None else None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, unwanted: threading.Event | None = None) -> None:
        """Starts the child and returns when it serves; does nothing where it runs.

        Args:
            unwanted: Once it is set, the start is given up.

        Raises:
            SettingError: if it cannot have the address, or use the certificates.
            RuntimeError: if it ends, or does not serve within two minutes, or is not wanted any more.
        """
        if self.pid is not None:
            return
        self.stop()  # what is left of one that died
        self._child = subprocess.Popen(
            [*self._prefix, sys.executable, "-c", CHILD, "hetpipe-server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            answer = self._ask(self._child, unwanted or threading.Event())
        except BaseException:
            self.stop()
            raise
        if "refused" in answer:
            self.stop()
            raise SettingError(answer["refused"])
        self._address = answer["address"]

    def stop(self) -> None:
        """Ends the child, by force if it does not end by itself. May be called again."""
        child, self._child = self._child, None
        if child is None:
            return
        assert child.stdin is not None
        try:
            with suppress(BrokenPipeError):
                child.stdin.close()  # ends it, also where `prefix` stands between
            child.terminate()
            try:
                child.wait(_STOP)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        finally:
            if child.stdout is not None:
                child.stdout.close()

    def restart(self) -> None:
        """Ends the child, if it still runs, and starts another on the same address; its memory is lost."""
        self.stop()
        self.start()

    def _ask(self, child: subprocess.Popen[bytes], unwanted: threading.Event) -> dict[str, str]:
        """Tells the child what to do, on its standard input: others can read command lines. Returns what it says."""
        assert child.stdin is not None
        assert child.stdout is not None
        told = {**self._told, "address": self._address, "security": asdict(self.security)}
        try:
            child.stdin.write(json.dumps(told).encode() + b"\n")
            child.stdin.flush()
        except BrokenPipeError:
            raise RuntimeError(f"The server's process ended at its start, with status {child.wait(_STOP)}.") from None
        said = b""
        deadline = time.monotonic() + _START
        while not said.endswith(b"\n"):
            ready, _, _ = select.select([child.stdout], [], [], _LOOK)
            if unwanted.is_set():
                raise RuntimeError("The server is not wanted any more.")
            if not ready:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"The server's process does not serve {self._address} within {_START:g} s.")
                continue
            part = os.read(child.stdout.fileno(), 4096)
            if not part:
                raise RuntimeError(
                    f"The server's process ended before it served {self._address}, with status {child.wait(_STOP)};"
                    " what it wrote above says why."
                )
            said += part
        child.stdout.close()
        return cast(dict[str, str], json.loads(said))


def how(code: int) -> str:
    """How a process ended, by its return code."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"died by {signal.Signals(-code).name}"
    except ValueError:
        return f"died by signal {-code}"


def child(parent: int, handler: str, arguments: dict[str, Any], address: str, security: dict[str, Any]) -> None:
    """What the child does. Its answer is one line of JSON on standard output: the address, or why there is none."""
    from lightning_hetpipe.server.process.running import ParentLink, end, serve  # gRPC is for the process that serves

    answers = os.dup(1)
    os.dup2(2, 1)  # whatever prints, prints where the parent's errors go

    def say(**answer: str) -> None:
        os.write(answers, json.dumps(answer).encode() + b"\n")
        os.close(answers)

    def ready(at: str) -> None:
        forget()  # the lifeline is watched from here on, and who started this may be a thread that ends now
        say(address=at)

    try:
        serving = found(handler)(**arguments)
        serve(serving, address, Security(**security), ready, ParentLink(parent))
    except SettingError as error:
        say(refused=str(error))
    end(0)


def found(name: str) -> Any:
    """What ``package.module:name`` stands for."""
    module, _, attribute = name.partition(":")
    made = getattr(import_module(module), attribute)
    assert callable(made), f"{name} cannot be called"
    return made
