"""The other virtual workers of this node, as processes of the process that started them."""

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
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lightning_hetpipe.errors import NOTICE_AFTER, say
from lightning_hetpipe.launch import parent_watch, supervision
from lightning_hetpipe.launch.ends import ToldToEnd, lost_workers, went_on_without
from lightning_hetpipe.server.process.server_process import how
from lightning_hetpipe.server.process.signals import guarded

LONGEST = 30
"""Number of grace periods after which a child that still works is killed."""

OnEnd = Callable[[int, int], None]
"""Function of the virtual worker's number on its node and its process's return code, negative for a signal."""

# Errors that follow from another process's error, or from a request to end, explain nothing.
_CONSEQUENCES = ("PeerFailed:", "SIGTERMException:", f"{ToldToEnd.__name__}:")

_LOOK = 0.05  # seconds between looks at the messages of children that are to end


@dataclass(eq=False)
class Child:
    """Process of virtual worker ``local`` of this node, our end of the link to it, and its messages.

    Attributes:
        worker: Its number among all virtual workers.
        arrived: True once it has reached `Launcher.launch`. Before, an interrupt would print a traceback.
        error, text: Exception that ends it, as text that is equal in every process, and the text to print for it.
        lost: How it was lost, if its end concerns no other virtual worker.
        leaving: True once its program is over.
    """

    local: int
    worker: int
    process: subprocess.Popen[bytes]
    link: socket.socket
    arrived: bool = False
    error: str | None = None
    text: str = ""
    lost: str = ""
    leaving: bool = False
    unread: bytes = b""

    def __str__(self) -> str:
        return f"{self.name} (process {self.process.pid})"

    @property
    def name(self) -> str:
        return f"virtual worker {self.worker}"

    @property
    def was_told(self) -> bool:
        """True if it was told to end and has left the other virtual workers, who hear of it through servers."""
        return self.error is not None and self.error.startswith(f"{ToldToEnd.__name__}:")

    def send(self, signum: int) -> None:
        """Send a signal to the child, and SIGINT to all processes of its session, as a terminal does. A process that is
        interrupted while it waits for a DataLoader worker does not end the worker in time, because its exception holds
        the iterator. So the worker must be interrupted itself, or it leaves temporary files behind."""
        if signum != signal.SIGINT:
            self.process.send_signal(signum)
        elif self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.killpg(self.process.pid, signum)

    def listen(self) -> None:
        """Receive the child's messages so far. One thread at a time may call this."""
        with contextlib.suppress(OSError):
            while part := self.link.recv(1 << 16, socket.MSG_DONTWAIT):
                self.unread += part
        *lines, self.unread = self.unread.split(b"\n")
        for message in map(json.loads, lines):
            if "leaving" in message:
                self.leaving = True
            elif "arrived" in message:
                self.arrived, self.error, self.text, self.lost = True, None, "", ""
            else:  # an error during the end of the process follows from the first error
                self.lost = message["lost"] if self.error is None else self.lost
                self.error, self.text = self.error or message["error"], self.text or message["text"]


class Children:
    """Further virtual workers of a node: starts, watches and finally ends them. If a virtual worker dies, the other
    virtual workers go on. :meth:`watch` sets the listener for its end."""

    def __init__(
        self,
        command: Sequence[str],
        folder: str,
        processes: int,
        first: int = 0,
        restarts: int = 0,
        seats: int | None = None,
    ) -> None:
        """Start the children, each by ``command`` in ``folder``.

        Args:
            processes: Number of virtual workers of the node that this process starts, including itself as number 0.
            first: Number of this process among the virtual workers of all nodes.
            restarts: Largest number of restarts of each child that ends in the middle of a run.
            seats: Number of virtual workers that the node may have, by default ``processes``.
        """
        self.processes = processes
        self._seats = seats or processes
        self._first = first
        self.pid = os.getpid()
        self.failures: dict[int, int] = {}
        self.over: dict[int, int] = {}
        """Return codes of all children that have ended."""
        self.ended = False
        self._on_end: OnEnd | None = None
        self._signalled: set[int] = set()
        self._shown: set[str] = set()
        self._changed = threading.Condition()
        self._all: list[Child] = []
        self._running = 0
        self._restarts = dict.fromkeys(range(1, processes), restarts)
        self._variables: Mapping[str, str] = {}
        try:
            for local in range(1, processes):
                begun: Future[None] = Future()
                arguments = (command, folder, local, begun)
                threading.Thread(
                    target=self._run, args=arguments, name=f"hetpipe-launcher-{local}", daemon=True
                ).start()
                try:
                    begun.result()
                finally:
                    wait([begun])  # even after Ctrl-C: a started child must be ended
        except BaseException:
            self.end(signal.SIGTERM, grace=0.0)
            raise

    def _run(self, command: Sequence[str], folder: str, local: int, begun: Future[None]) -> None:
        """Start a child, and stay until it ends: the kernel ends a child with the *thread* that forked it."""
        try:
            child = self._start(command, folder, local)
        except BaseException as error:
            begun.set_exception(error)
        else:
            begun.set_result(None)
            still: Child | None = child
            while still is not None:
                still = self._watch(still, partial(self._start, command, folder, local))

    def _start(self, command: Sequence[str], folder: str, local: int) -> Child:
        ours, childs = parent_watch.pair()
        with childs:
            # With LOCAL_RANK, what a program does before it makes a Trainer is known not to be rank 0's.
            pipe = supervision.supervised()
            supervised = {} if pipe is None else {supervision.VARIABLE: str(pipe)}
            env = {
                **os.environ,
                **supervised,
                "LOCAL_RANK": str(local),
                **parent_watch.describe(local, self._seats, childs),
            }
            # In its own session, so that Ctrl-C reaches it only through this process, which chooses the signal.
            process = subprocess.Popen(
                guarded(command),
                cwd=folder,
                env=env,
                pass_fds=[childs.fileno(), *([] if pipe is None else [pipe])],
                start_new_session=True,
            )
        child = Child(local, self._first + local, process, ours)
        with self._changed:
            self._all.append(child)
            self._running += 1
        return child

    def give(self, variables: Mapping[str, str]) -> None:
        """Send the variables for which the children wait. Call this once."""
        self._variables = variables
        for child in self._all:
            self._give(child)

    def _give(self, child: Child, again: bool = False) -> None:
        self._tell(child, {**self._variables, parent_watch.AGAIN: "1"} if again else dict(self._variables))

    def _tell(self, child: Child, what: Mapping[str, str]) -> None:
        with contextlib.suppress(OSError):  # it has ended, which `_watch` sees as well
            child.link.sendall(json.dumps(what).encode() + b"\n")

    def _watch(self, child: Child, start: Callable[[], Child]) -> Child | None:
        """Wait until ``child`` ends, and report its end. If ``start`` makes a next process, return that without a
        report."""
        code = child.process.wait()
        with self._changed:
            child.listen()
            failed = code != 0 and child.local not in self._signalled
            again = self._started_again(child, start) if failed else None
            left = self._restarts.get(child.local, 0)
            if failed and again is None:
                self.failures[child.local] = code
        if again is not None:
            say(f"{child} {how(code)}, and is started again ({left or 'no'} more restart{'s' * (left != 1)})")
            return again
        try:
            if failed and not child.was_told:
                ended, sentence = how(code), f"{child} {how(code)}" if child.error is None else ""
                if child.error is not None and child.lost:
                    ended, sentence = f"was {child.lost}", went_on_without(str(child), child.lost)
                    self._shown.add(child.error)
                lost_workers.note(child.worker, child.name, ended, sentence)
            with self._changed:
                self.over[child.local] = code
                child.link.close()
                on_end = self._on_end if child.local not in self._signalled else None
            if on_end is not None:
                on_end(child.local, code)
            elif failed:
                self.show_errors()  # during a run, this process may be about to raise the same error
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()
        return None

    def _started_again(self, child: Child, start: Callable[[], Child]) -> Child | None:
        """Start the next process of ``child``, if it has a restart left. It replaces the child at once, so that
        :meth:`end` also ends it."""
        if not child.arrived or child.error is not None or not self._restarts.get(child.local, 0):
            return None
        try:
            again = start()
        except OSError as error:
            say(f"{child} cannot be started again: {error}")
            return None
        self._restarts[child.local] -= 1
        self._all.remove(child)
        self._running -= 1
        child.link.close()
        self._give(again, again=True)
        return again

    def watch(self, on_end: OnEnd | None) -> None:
        """Call ``on_end`` for all children that have ended or will end. None ends these calls."""
        with self._changed:
            self._on_end = on_end
            over = dict(self.over)
        if on_end is not None:
            for local, code in over.items():
                on_end(local, code)

    def show_errors(self, own: BaseException | None = None) -> None:
        """Print the exceptions that end children: each once, and none that equals ``own``."""
        with self._changed:
            if own is not None:
                self._shown.add(parent_watch.named(own))
            for child in self._all:
                if child.local not in self.over:
                    child.listen()
                if child.error is None or child.error in self._shown or child.error.startswith(_CONSEQUENCES):
                    continue
                if child.lost and own is None:
                    continue  # logged at the end of its process
                self._shown.add(child.error)
                say(f"{child} failed")
                with contextlib.suppress(OSError):
                    print((child.text or child.error).rstrip("\n"), file=sys.stderr, flush=True)

    def kill(self, signum: int) -> None:
        """Send a signal to the running children that are not about to end."""
        for child in self._still():
            if not child.leaving:
                self._signal(child, signum)

    def let_end(self) -> None:
        """Mark all children as told to end. They were told through servers, and end by themselves."""
        with self._changed:
            self._signalled.update(child.local for child in self._all)

    def wait(self, end_timeout: float | None, grace: float) -> None:
        """Wait until all children have ended by themselves, however long their own code takes. Log the wait once. After
        ``end_timeout`` seconds, if not None, end them with ``grace`` as in :meth:`end`, and let the program fail."""
        with self._changed:
            self._restarts.clear()
        for child in self._still():  # a restarted child may be about to come back to a run that is over
            self._tell(child, {})
            if lost_workers.has_lost(child.worker):  # a stopped child ends once it goes on
                child.send(signal.SIGCONT)
        soon = NOTICE_AFTER if end_timeout is None else min(end_timeout, NOTICE_AFTER)
        if not self._gone(soon) and soon != end_timeout:
            who = ", ".join(map(str, self._still()))
            say(f"this process has ended, and waits for {who} to end; WSPCallback(end_timeout=...) bounds that")
        if not self._gone(None if end_timeout is None else end_timeout - soon):
            for child in self._still():
                say(
                    f"{child} had not ended {end_timeout:g} seconds after this process, and is told to end; raise"
                    " WSPCallback(end_timeout=...) if it may take longer"
                )
            lost_workers.exit_with_one()
            self.end(signal.SIGTERM, grace)
        self.ended = True

    def end(self, signum: int, grace: float) -> None:
        """Tell the children to end, wait for their ends, and end remaining children by force.

        Args:
            signum: Signal for children that have reached `Launcher.launch`. Earlier children get SIGTERM, and children
                that an exception ends get none. Children that were told to end before may be cleaning up, so they get
                it a third of the grace later. They need it, because Lightning only notes SIGTERM, and a wait for this
                process would go on.
            grace: Seconds until SIGTERM, and again until SIGKILL.
        """
        with self._changed:
            self._restarts.clear()
            before = set(self._signalled)
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

    def reap(self, grace: float) -> None:
        """Wait until the processes of children that have come to their end are gone, and kill children that hang.
        Python needs a moment to free a program's memory, and much longer on a busy machine. So a child hangs only if
        all its processes slept for ``grace`` seconds, or if it still exists after `LONGEST` times as long."""
        until = time.monotonic() + LONGEST * grace
        worked = self._worked()
        while not self._gone(grace, wholly=True):
            before, worked = worked, self._worked()
            late = time.monotonic() > until
            for child in self._still():
                if late or worked.get(child.local) == before.get(child.local):
                    how_long = f"{LONGEST * grace:g} seconds" if late else f"{grace:g} seconds without work"
                    say(f"{child} did not end in {how_long} after its program, and is killed")
                    lost_workers.exit_with_one()
                    self._signal(child, signal.SIGKILL)

    def _worked(self) -> dict[int, frozenset[object]]:
        return {child.local: work_of(child.process.pid) for child in self._still()}

    def _ask(self, signum: int, whom: Callable[[Child], bool]) -> None:
        for child in filter(whom, self._still()):
            with self._changed:
                child.listen()
            if child.error is None and not child.leaving:
                self._signal(child, signum if child.arrived else signal.SIGTERM)

    def _signal(self, child: Child, signum: int) -> None:
        with self._changed:
            self._signalled.add(child.local)
        child.send(signum)

    def wake(self) -> None:
        """Let stopped children go on. Other children do not notice."""
        for child in self._still():
            child.send(signal.SIGCONT)

    def _still(self) -> list[Child]:
        with self._changed:
            return [child for child in self._all if child.local not in self.over]

    def _gone(self, seconds: float | None, wholly: bool = False) -> bool:
        """Wait for up to ``seconds`` until all children have come to their end, or ``wholly``, until their processes
        are over."""
        until = float("inf") if seconds is None else time.monotonic() + seconds
        with self._changed:
            while self._running and not (not wholly and all(self._leaves(child) for child in self._all)):
                if (rest := until - time.monotonic()) <= 0:
                    return False
                self._changed.wait(min(rest, _LOOK))
        return True

    def _leaves(self, child: Child) -> bool:
        if child.local not in self.over:
            child.listen()
        return child.leaving or child.local in self.over


_BUSY = "RD"  # runs, or waits for a processor; waits for a disk


def work_of(session: int) -> frozenset[object]:
    """Return a mark of the work that the processes of a session have done. Equal marks mean that all of them slept in
    between. ``session`` is the process id of the session's leader. Without Linux all marks are equal."""
    marks = set[object]()
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            state, *numbers = file.read_text().rpartition(")")[2].split()
            if int(numbers[2]) == session:
                ticks = int(numbers[10]) + int(numbers[11])  # in user code, and in the kernel
                marks.add(object() if state in _BUSY else (file.parent.name, ticks))
    return frozenset(marks)
