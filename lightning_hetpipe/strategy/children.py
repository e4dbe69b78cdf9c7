"""The other virtual workers of this node, as the process that started them sees them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lightning_hetpipe.server.process import how
from lightning_hetpipe.strategy import lifeline

OnDeath = Callable[[int, int], None]
"""Takes the virtual worker's number on its node and its process's return code, negative for a signal."""

INTERRUPT_REACHES = 1.0
"""Seconds in which a Ctrl-C, which a terminal sends to all processes, has had its effect on the others."""


@dataclass(frozen=True)
class Child:
    """One virtual worker's process, and our end of its lifeline."""

    local: int
    process: subprocess.Popen[bytes]
    lifeline: socket.socket

    def __str__(self) -> str:
        return f"virtual worker {self.local} (process {self.process.pid})"

    def has_arrived(self) -> bool:
        """Whether it has come as far as `Launcher.launch`. Before, an interrupt would show where it was instead."""
        with contextlib.suppress(OSError):
            return self.lifeline.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK) != b""
        return False


class Children:
    """Starts a node's further virtual workers, watches them, and ends with all of them ended.

    Nothing is ended because one of them died: that is said once on stderr, and told to ``on_death``.
    """

    def __init__(self, command: Sequence[str], folder: str, processes: int, environment: Mapping[str, str]) -> None:
        """Starts them.

        Args:
            command: What each of them runs.
            folder: Where it starts.
            processes: All virtual workers of the node; this process is number 0.
            environment: Variables beside those of this process.
        """
        self.processes = processes
        self.pid = os.getpid()
        self.on_death: OnDeath | None = None
        self.failures: dict[int, int] = {}
        self.ended = False
        self._told: dict[int, int] = {}
        self._changed = threading.Condition()
        self._running: list[Child] = []
        try:
            for local in range(1, processes):
                self._start(command, folder, local, environment)
        except BaseException:
            self.end(signal.SIGTERM, grace=0.0)
            raise

    def _start(self, command: Sequence[str], folder: str, local: int, environment: Mapping[str, str]) -> None:
        ours, childs = lifeline.pair()
        with childs:
            # With LOCAL_RANK, what a program does before it makes a Trainer is known not to be rank 0's.
            env = {**os.environ, **environment, "LOCAL_RANK": str(local)}
            env |= lifeline.describe(local, self.processes, childs)
            process = subprocess.Popen(command, cwd=folder, env=env, pass_fds=[childs.fileno()])
        child = Child(local, process, ours)
        self._running.append(child)
        threading.Thread(target=self._watch, args=(child,), name=f"hetpipe-launcher-{local}", daemon=True).start()

    def _watch(self, child: Child) -> None:
        code = child.process.wait()
        with self._changed:
            failed = code != 0 and child.local not in self._told
            if failed:
                self.failures[child.local] = code
        try:
            if failed:
                say(f"{child} {how(code)}")
                if self.on_death is not None:
                    self.on_death(child.local, code)
        finally:
            with self._changed:
                self._running.remove(child)
                child.lifeline.close()
                self._changed.notify_all()

    def kill(self, signum: int) -> None:
        """Sends a signal to those that run."""
        for child in self._still():
            self._tell(child, signum)

    def wait(self, grace: float) -> None:
        """Waits until all have ended by themselves; those that have not after ``grace`` seconds are ended."""
        if not self._gone(grace):
            for child in self._still():
                say(f"{child} had not ended {grace:g} seconds after this process, and is told to end")
            self.end(signal.SIGTERM, grace)
        self.ended = True

    def end(self, signum: int, grace: float) -> None:
        """Tells them to end, waits, and ends by force those that do not.

        Args:
            signum: What those get that have come as far as `Launcher.launch`; SIGTERM goes to the others.
            grace: Seconds until SIGTERM, and as many again until SIGKILL.
        """
        for child in self._still():
            if child.local not in self._told:
                self._tell(child, signum if child.has_arrived() else signal.SIGTERM)
        if not self._gone(grace):
            self.kill(signal.SIGTERM)
        if not self._gone(grace):
            for child in self._still():
                say(f"{child} did not end when told to, and is killed")
            self.kill(signal.SIGKILL)
            self._gone(None)
        self.ended = True

    def end_with(self, error: BaseException, grace: float) -> None:
        """Ends them, because this process's part has failed with ``error``."""
        if isinstance(error, KeyboardInterrupt):
            for child in self._still():
                self._told[child.local] = signal.SIGINT  # so that nobody reports what the terminal told them
            if self._gone(min(INTERRUPT_REACHES, grace)):
                self.ended = True
                return
            self._told.clear()
        self.end(signal.SIGINT, grace)

    def _tell(self, child: Child, signum: int) -> None:
        with self._changed:
            self._told[child.local] = signum
        child.process.send_signal(signum)

    def _still(self) -> list[Child]:
        with self._changed:
            return list(self._running)

    def _gone(self, seconds: float | None) -> bool:
        """Waits until all have ended, so long at most."""
        until = None if seconds is None else time.monotonic() + seconds
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._running, None if until is None else until - time.monotonic()
            )


def say(sentence: str) -> None:
    """A sentence for the person at the terminal."""
    with contextlib.suppress(OSError):
        print(f"hetpipe: {sentence}.", file=sys.stderr, flush=True)
