"""The other virtual workers of this node, as the process that started them sees them."""

from __future__ import annotations

import contextlib
import json
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

OnEnd = Callable[[int, int], None]
"""Takes the virtual worker's number on its node and its process's return code, negative for a signal."""

# What ends a process because another one failed, or because somebody wanted it so, explains nothing.
_CONSEQUENCES = ("PeerFailed:", "SIGTERMException:")


@dataclass(eq=False)
class Child:
    """One virtual worker's process, our end of its lifeline, and what it has said there.

    Attributes:
        arrived: It has come as far as `Launcher.launch`. Before, an interrupt would show where it was instead.
        error: The exception that ends it, in words that are the same in every process.
        said: What it would have printed about that.
    """

    local: int
    process: subprocess.Popen[bytes]
    lifeline: socket.socket
    arrived: bool = False
    error: str | None = None
    said: str = ""
    unread: bytes = b""

    def __str__(self) -> str:
        return f"virtual worker {self.local} (process {self.process.pid})"

    def tell(self, signum: int) -> None:
        """Sends it a signal; SIGINT to all processes of its session, as a terminal does.

        Who is interrupted while it waits for a DataLoader worker does not end that one in good time: its exception
        holds the iterator. The worker has to be interrupted itself, or it dies with its temporary files left behind.
        """
        if signum != signal.SIGINT:
            self.process.send_signal(signum)
        elif self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.killpg(self.process.pid, signum)

    def listen(self) -> None:
        """Takes in what it has said so far; to be called by one thread at a time."""
        with contextlib.suppress(OSError):
            while part := self.lifeline.recv(1 << 16, socket.MSG_DONTWAIT):
                self.unread += part
        *lines, self.unread = self.unread.split(b"\n")
        for said in map(json.loads, lines):
            if "arrived" in said:
                self.arrived, self.error, self.said = True, None, ""
            else:  # what comes after an error, while that ends the process, follows from it
                self.error, self.said = self.error or said["error"], self.said or said["said"]


class Children:
    """Starts a node's further virtual workers, watches them, and ends with all of them ended.

    Nothing is ended because one of them died: that is said once on stderr, and told to whoever ``watch`` named.
    """

    def __init__(self, command: Sequence[str], folder: str, processes: int) -> None:
        """Starts them.

        Args:
            command: What each of them runs.
            folder: Where it starts.
            processes: All virtual workers of the node; this process is number 0.
        """
        self.processes = processes
        self.pid = os.getpid()
        self.failures: dict[int, int] = {}
        self.over: dict[int, int] = {}
        """Return codes of all that have ended."""
        self.ended = False
        self._on_end: OnEnd | None = None
        self._told: set[int] = set()
        self._shown: set[str] = set()
        self._changed = threading.Condition()
        self._all: list[Child] = []
        self._running = 0
        try:
            for local in range(1, processes):
                self._start(command, folder, local)
        except BaseException:
            self.end(signal.SIGTERM, grace=0.0)
            raise

    def _start(self, command: Sequence[str], folder: str, local: int) -> None:
        ours, childs = lifeline.pair()
        with childs:
            # With LOCAL_RANK, what a program does before it makes a Trainer is known not to be rank 0's.
            env = {**os.environ, "LOCAL_RANK": str(local), **lifeline.describe(local, self.processes, childs)}
            # In a session of its own: Ctrl-C does not reach it but through this process, which knows what to tell it.
            process = subprocess.Popen(command, cwd=folder, env=env, pass_fds=[childs.fileno()], start_new_session=True)
        child = Child(local, process, ours)
        self._all.append(child)
        self._running += 1
        threading.Thread(target=self._watch, args=(child,), name=f"hetpipe-launcher-{local}", daemon=True).start()

    def give(self, variables: Mapping[str, str]) -> None:
        """Environment variables that they wait for; to be called once."""
        for child in self._all:
            with contextlib.suppress(OSError):  # it has ended, which `_watch` sees as well
                child.lifeline.sendall(json.dumps(dict(variables)).encode() + b"\n")

    def _watch(self, child: Child) -> None:
        code = child.process.wait()
        with self._changed:
            child.listen()
            failed = code != 0 and child.local not in self._told
            if failed:
                self.failures[child.local] = code
        try:
            if failed and child.error is None:
                say(f"{child} {how(code)}")
            with self._changed:
                self.over[child.local] = code
                child.lifeline.close()
                on_end = self._on_end if child.local not in self._told else None
            if on_end is not None:
                on_end(child.local, code)
            elif failed:
                self.show_errors()  # otherwise this process may be about to run into the same one
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def watch(self, on_end: OnEnd | None) -> None:
        """Has ``on_end`` told who has ended, and whoever ends from now on; None where nobody waits for them."""
        with self._changed:
            self._on_end = on_end
            over = dict(self.over)
        if on_end is not None:
            for local, code in over.items():
                on_end(local, code)

    def show_errors(self, own: BaseException | None = None) -> None:
        """Prints what children have said about the exceptions that end them: each once, and none that ``own`` is."""
        with self._changed:
            if own is not None:
                self._shown.add(lifeline.named(own))
            for child in self._all:
                if child.local not in self.over:
                    child.listen()
                if child.error is None or child.error in self._shown or child.error.startswith(_CONSEQUENCES):
                    continue
                self._shown.add(child.error)
                say(f"{child} failed")
                with contextlib.suppress(OSError):
                    print((child.said or child.error).rstrip("\n"), file=sys.stderr, flush=True)

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
            signum: What those get that have come as far as `Launcher.launch`; others get SIGTERM, and those that an
                exception ends already nothing. Those that were told to end before, and may be cleaning up, which a
                signal would disturb, get it a third of the grace later: Lightning only notes SIGTERM, and a wait for
                this process would go on.
            grace: Seconds until SIGTERM, and as many again until SIGKILL.
        """
        with self._changed:
            before = set(self._told)
        self._ask(signum, lambda child: child.local not in before)
        if before and not self._gone(grace / 3):
            self._ask(signum, lambda child: child.local in before)
        if not self._gone(grace):
            self.kill(signal.SIGTERM)
        if not self._gone(grace):
            for child in self._still():
                say(f"{child} did not end when told to, and is killed")
            self.kill(signal.SIGKILL)
            self._gone(None)
        self.ended = True

    def _ask(self, signum: int, whom: Callable[[Child], bool]) -> None:
        for child in filter(whom, self._still()):
            with self._changed:
                child.listen()
            if child.error is None:
                self._tell(child, signum if child.arrived else signal.SIGTERM)

    def _tell(self, child: Child, signum: int) -> None:
        with self._changed:
            self._told.add(child.local)
        child.tell(signum)

    def _still(self) -> list[Child]:
        with self._changed:
            return [child for child in self._all if child.local not in self.over]

    def _gone(self, seconds: float | None) -> bool:
        """Waits until all have ended, so long at most."""
        until = None if seconds is None else time.monotonic() + seconds
        with self._changed:
            return self._changed.wait_for(
                lambda: self._running == 0, None if until is None else until - time.monotonic()
            )


def say(sentence: str) -> None:
    """A sentence for the person at the terminal."""
    with contextlib.suppress(OSError):
        print(f"hetpipe: {sentence}.", file=sys.stderr, flush=True)
