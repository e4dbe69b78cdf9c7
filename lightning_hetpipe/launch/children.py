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
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path

from lightning_hetpipe.errors import NOTICE_AFTER, say
from lightning_hetpipe.launch import parent_watch, supervision
from lightning_hetpipe.launch.command import Command
from lightning_hetpipe.launch.ends import ToldToEnd, lost_workers, went_on_without
from lightning_hetpipe.launch.ranks import Rank
from lightning_hetpipe.server.process.signals import how

LONGEST = 30
"""Number of grace periods after which a child that still works is killed."""

OnEnd = Callable[[int, int], None]
"""Function of the virtual worker's number among all and its process's return code, negative for a signal."""

# Errors that follow from another process's error, or from a request to end, explain nothing.
_TOLD = f"{ToldToEnd.__name__}:"
_CONSEQUENCES = ("PeerFailed:", "SIGTERMException:", _TOLD)

_LOOK = 0.05  # seconds between looks at the messages of children that are to end


@dataclass(eq=False)
class Child:
    """Process of virtual worker ``local`` of this node, our end of the link to it, and its messages.

    Attributes:
        worker: Its number among all virtual workers.
        restarts: Largest number of restarts if it ends in the middle of a run.
        arrived: True once it has reached `Launcher.launch`. Before, an interrupt would print a traceback.
        error, text: Exception that ends it, as text that is equal in every process, and the text to print for it.
        lost: How it was lost, if its end concerns no other virtual worker.
        leaving: True once its program is over.
        signalled: True once it was told to end.
        code: Return code of its process, which has ended. ``is_over`` is True once that was reported.
    """

    local: int
    worker: int
    process: subprocess.Popen[bytes]
    link: socket.socket
    restarts: int
    arrived: bool = False
    error: str | None = None
    text: str = ""
    lost: str = ""
    leaving: bool = False
    signalled: bool = False
    code: int | None = None
    is_over: bool = False
    unread: bytes = b""

    def __str__(self) -> str:
        return f"{self.name} (process {self.process.pid})"

    @property
    def name(self) -> str:
        return f"virtual worker {self.worker}"

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
    virtual workers go on. :meth:`watch` sets the listener for its end.

    Attributes:
        failures: Return codes of failed children, by their numbers on this node.
        failed: True once the launch has failed.
        ended: True once all children have come to their end.
        end_timeout: Seconds to wait for children at the program's end, or None.
    """

    def __init__(
        self, program: Command, rank: Rank, restarts: int = 0, closed: Callable[[], None] | None = None
    ) -> None:
        """Start the children by ``program``. ``rank`` is this process's.

        Args:
            restarts: Largest number of restarts of each child that ends in the middle of a run.
            closed: Called once in :meth:`finish`, after the ends of all programs.
        """
        self.job, self.processes = program.job, rank.started
        self.pid = os.getpid()
        self.failures: dict[int, int] = {}
        self.failed = self.ended = False
        self.end_timeout: float | None = None
        self._program, self._rank, self._closed = program, rank, closed
        self._on_end: OnEnd | None = None
        self._shown: set[str] = set()
        self._changed = threading.Condition()
        self._all: list[Child] = []
        self._may_restart = True
        self._variables: Mapping[str, str] = {}
        try:
            for local in range(1, rank.started):
                begun: Future[None] = Future()
                name = f"hetpipe-launcher-{local}"
                threading.Thread(target=self._run, args=(local, restarts, begun), name=name, daemon=True).start()
                try:
                    begun.result()
                finally:
                    wait([begun])  # even after Ctrl-C: a started child must be ended
        except BaseException:
            self.end(signal.SIGTERM, grace=0.0)
            raise

    def _run(self, local: int, restarts: int, begun: Future[None]) -> None:
        """Start a child, and stay until it ends: the kernel ends a child with the *thread* that forked it."""
        child: Child | None = None
        try:
            child = self._start(local, restarts)
        except BaseException as error:
            begun.set_exception(error)
        else:
            begun.set_result(None)
        while child is not None:
            child = self._watch(child)

    def _start(self, local: int, restarts: int) -> Child:
        ours, childs = parent_watch.pair()
        with childs:
            # With LOCAL_RANK, what a program does before it makes a Trainer is known not to be rank 0's.
            place = f"{local}/{self._rank.per_node}@{childs.fileno()}"
            variables = {"LOCAL_RANK": str(local), parent_watch.VARIABLE: place}
            descriptors = [childs.fileno()]
            if (pipe := supervision.supervised()) is not None:
                variables[supervision.VARIABLE] = str(pipe)
                descriptors.append(pipe)
            # In its own session, so that Ctrl-C reaches it only through this process, which chooses the signal.
            process = self._program.start(variables, descriptors, in_session=True)
        child = Child(local, self._rank.index + local, process, ours, restarts)
        with self._changed:
            self._all.append(child)
        return child

    def give(self, variables: Mapping[str, str]) -> None:
        """Send the variables for which the children wait. Call this once."""
        self._variables = variables
        for child in self._all:
            self._tell(child, variables)

    def _tell(self, child: Child, what: Mapping[str, str]) -> None:
        with contextlib.suppress(OSError):  # it has ended, which `_watch` sees as well
            child.link.sendall(json.dumps(dict(what)).encode() + b"\n")

    def _watch(self, child: Child) -> Child | None:
        """Wait until ``child`` ends, and report its end. If it is started again, return its next process without a
        report."""
        code = child.process.wait()
        with self._changed:
            child.listen()
            failed = code != 0 and not child.signalled
            again = self._started_again(child) if failed else None
            if failed and again is None:
                self.failures[child.local] = code
        if again is not None:
            left = again.restarts
            say(f"{child} {how(code)}, and is started again ({left or 'no'} more restart{'s' * (left != 1)})")
            return again
        try:
            # If it was told to end, it has left the other virtual workers, who hear of it through servers.
            if failed and not (child.error or "").startswith(_TOLD):
                ended, sentence = how(code), f"{child} {how(code)}" if child.error is None else ""
                if child.error is not None and child.lost:
                    ended, sentence = f"was {child.lost}", went_on_without(str(child), child.lost)
                    self._shown.add(child.error)
                lost_workers.note(child.worker, child.name, ended, sentence)
            with self._changed:
                child.code = code
                child.link.close()
                on_end = None if child.signalled else self._on_end
            if on_end is not None:
                on_end(child.worker, code)
            elif failed:
                self.show_errors()  # during a run, this process may be about to raise the same error
        finally:
            with self._changed:
                child.is_over = True
                self._changed.notify_all()
        return None

    def _started_again(self, child: Child) -> Child | None:
        """Start the next process of ``child``, if it has a restart left. It replaces the child at once, so that
        :meth:`end` also ends it."""
        if not (child.arrived and child.error is None and child.restarts and self._may_restart):
            return None
        try:
            again = self._start(child.local, child.restarts - 1)
        except OSError as error:
            say(f"{child} cannot be started again: {error}")
            return None
        self._all.remove(child)
        child.link.close()
        self._tell(again, {**self._variables, parent_watch.AGAIN: "1"})
        return again

    def watch(self, on_end: OnEnd | None) -> None:
        """Call ``on_end`` for all children that have ended or will end. None ends these calls."""
        with self._changed:
            self._on_end = on_end
            over = [(child.worker, child.code) for child in self._all if child.code is not None]
        if on_end is not None:
            for worker, code in over:
                on_end(worker, code)

    def show_errors(self, own: BaseException | None = None) -> None:
        """Print the exceptions that end children: each once, and none that equals ``own``."""
        with self._changed:
            if own is not None:
                self._shown.add(parent_watch.named(own))
            for child in self._all:
                if child.code is None:
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

    def fail(self, error: BaseException) -> None:
        """End the children, because ``error`` ends the launch. Their servers stay until :meth:`finish`, because this
        process may use them."""
        self.failed = True
        if isinstance(error, ToldToEnd):  # the children were told through servers, and end by themselves
            with self._changed:
                for child in self._all:
                    child.signalled = True
        self._end_by(lambda: self.end(signal.SIGINT, parent_watch.GRACE))
        self.show_errors(error)

    def finish(self, failed: bool, signum: int = signal.SIGINT) -> None:
        """Wait for the children, and name lost virtual workers again. If this process has failed, end the children
        instead, by ``signum`` as in :meth:`end`."""
        was_ended = self.ended
        failed = failed or lost_workers.uncaught is not None
        try:
            if not was_ended:
                self._end_by(lambda: self.end(signum, parent_watch.GRACE) if failed else self._wait())
            if not was_ended and not failed:
                self.show_errors()
        finally:
            closed, self._closed = self._closed, None
            try:
                if closed is not None:
                    closed()  # while the children's interpreters shut down
            finally:
                self._reap()
        if not was_ended and not failed:
            lost_workers.name()

    def _end_by(self, end: Callable[[], None]) -> None:
        """Call ``end``. If it is interrupted, as by Ctrl-C, end the children quickly."""
        try:
            end()
        except BaseException:
            self.end(signal.SIGTERM, min(1.0, parent_watch.GRACE))
            raise

    def _wait(self) -> None:
        """Wait until all children have ended by themselves, however long their own code takes. Log the wait once. After
        ``end_timeout`` seconds, if not None, end them as in :meth:`end`, and let the program fail."""
        with self._changed:
            self._may_restart = False
        for child in self._still():  # a restarted child may be about to come back to a run that is over
            self._tell(child, {})
            if child.worker in lost_workers.lost:  # a stopped child ends once it goes on
                child.send(signal.SIGCONT)
        # Not by `notice_if_long`: from Python 3.12 on, no thread can start at the program's exit.
        soon = NOTICE_AFTER if self.end_timeout is None else min(self.end_timeout, NOTICE_AFTER)
        if not self._gone(soon) and soon != self.end_timeout:
            who = ", ".join(map(str, self._still()))
            say(f"this process has ended, and waits for {who} to end; WSPCallback(end_timeout=...) bounds that")
        if not self._gone(None if self.end_timeout is None else self.end_timeout - soon):
            for child in self._still():
                say(
                    f"{child} had not ended {self.end_timeout:g} seconds after this process, and is told to end; raise"
                    " WSPCallback(end_timeout=...) if it may take longer"
                )
            lost_workers.exit_with_one()
            self.end(signal.SIGTERM, parent_watch.GRACE)
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
            self._may_restart = False
            before = [child for child in self._all if child.signalled]
        self._ask(signum, [child for child in self._all if child not in before])
        if before and not self._gone(grace / 3):
            self._ask(signum, before)
        if not self._gone(grace):
            self.kill(signal.SIGTERM)
        if not self._gone(grace):
            for child in self._still():
                say(f"{child} did not end when told to, and is killed")
            self.kill(signal.SIGKILL)
            self._gone(None)
        self.ended = True

    def _reap(self) -> None:
        """Wait until the processes of children that have come to their end are gone, and kill children that hang.
        Python needs a moment to free a program's memory, and much longer on a busy machine. So a child hangs only if
        all its processes slept for the grace period, or if it still exists after `LONGEST` times as long."""
        grace, worked = parent_watch.GRACE, self._worked()
        until = time.monotonic() + LONGEST * grace
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

    def _ask(self, signum: int, whom: Iterable[Child]) -> None:
        for child in whom:
            with self._changed:
                leaves = self._leaves(child)
            if child.error is None and not leaves:
                self._signal(child, signum if child.arrived else signal.SIGTERM)

    def _signal(self, child: Child, signum: int) -> None:
        with self._changed:
            child.signalled = True
        child.send(signum)

    def wake(self) -> None:
        """Let stopped children go on. Other children do not notice."""
        for child in self._still():
            child.send(signal.SIGCONT)

    def _still(self) -> list[Child]:
        with self._changed:
            return [child for child in self._all if child.code is None]

    def _gone(self, seconds: float | None, wholly: bool = False) -> bool:
        """Wait for up to ``seconds`` until all children have come to their end, or ``wholly``, until their processes
        are over."""
        until = float("inf") if seconds is None else time.monotonic() + seconds
        with self._changed:
            while not all(child.is_over or (not wholly and self._leaves(child)) for child in self._all):
                if (rest := until - time.monotonic()) <= 0:
                    return False
                self._changed.wait(min(rest, _LOOK))
        return True

    @staticmethod
    def _leaves(child: Child) -> bool:
        if child.code is None:
            child.listen()
        return child.leaving or child.code is not None


_BUSY = "RD"  # runs, or waits for a processor; waits for a disk


def work_of(session: int) -> frozenset[object]:
    """Return a mark of the work that the processes of a session have done. Equal marks mean that all of them slept in
    between. ``session`` is the process id of the session's leader. Without Linux all marks are equal."""
    marks = set[object]()
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            state, *numbers = file.read_text().rpartition(")")[2].split()
            if int(numbers[2]) == session:
                ticks = int(numbers[10]) + int(numbers[11])  # in user code, and in the kernel
                marks.add(object() if state in _BUSY else (file.parent.name, ticks))
    return frozenset(marks)
