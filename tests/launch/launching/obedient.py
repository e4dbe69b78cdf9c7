"""A program of a user's: each of its processes introduces itself to the test at a socket, and does what that says."""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from tests.launch.launching.bare import (
    Launcher,
    Rank,
    Role,
    SettingError,
    TunerExit,
    VirtualWorkerLost,
    check_processes,
    children,
    lost_workers,
    parent_watch,
)

GRACE = 0.5
"""Seconds until a process is forced to end that does not end by itself."""
PATIENCE = 180.0
"""Seconds for one that does, which may take it long on a busy machine."""
parent_watch.GRACE = PATIENCE


class Leave(Exception):
    """A failure that the user's program catches."""


class Obedient:
    """One process of the program."""

    def __init__(self, address: str, **facts: Any) -> None:
        self.environment = dict(os.environ)
        child = parent_watch.this_child()
        self.number = child.local if child else 0
        self.launcher: Launcher | None = None
        self.end_timeout: float | None = None
        self.before = 0
        self.role = Role.CHILD if self.number else Role.FIRST
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(address)
        self.orders = self.socket.makefile("r")
        self.reply(number=self.number, pid=os.getpid(), **facts)

    def reply(self, **facts: Any) -> None:
        self.socket.sendall(json.dumps(facts).encode() + b"\n")

    def obey(self) -> None:
        """Does as told, until told to return."""
        for line in self.orders:
            order, *arguments = line.split()
            if order == "return":
                self.reply(did=order)
                return
            getattr(self, order)(*arguments)
        raise AssertionError("the test has ended")

    def launch(self, processes: str) -> None:
        count = int(processes)
        rank = Rank(self.before + self.number, self.before + count, 0, self.number, count, 1, self.role)
        ends: dict[str, Any] = {"on_end": self.on_end, "closed": self.closed}
        try:
            check_processes(rank)
            assert count > 1
            self.launcher = Launcher(rank, self.extra, self.settings, int, **ends)
            self.launcher.launch(self.work, "launched")
        except Leave:
            self.reply(left=True)
        except (SettingError, TunerExit) as error:
            self.reply(refused=str(error))

    def launch_in_a_thread(self, processes: str) -> None:
        """The thread ends with the launch."""
        thread = threading.Thread(target=self.launch, args=(processes,))
        thread.start()
        thread.join()
        self.reply(did="launch_in_a_thread")

    def settings(self) -> Any:
        return SimpleNamespace(restarts=0, end_timeout=self.end_timeout)

    def extra(self) -> Mapping[str, str]:
        self.reply(extra=True)
        return {"A_SERVER": "somewhere"}

    def on_end(self, number: int, code: int) -> None:
        if code:
            self.reply(died=number, code=code)

    def closed(self) -> None:
        self.reply(closed=True)

    def work(self, did: str) -> None:
        self.reply(did=did)
        self.obey()

    def look(self) -> None:
        changed = {
            name for name in {*os.environ, *self.environment} if os.environ.get(name) != self.environment.get(name)
        }
        own = {name: os.environ.get(name) for name in ("A_SERVER", "LOCAL_RANK", parent_watch.VARIABLE)}
        told = dict(parent_watch.launcher_variables())
        flags = [sys.flags.dont_write_bytecode, sys.flags.isolated, sys.warnoptions]
        self.reply(changed=sorted(changed), own=own, told=told, argv=sys.argv, flags=flags, folder=os.getcwd())

    def move(self) -> None:
        os.chdir("/")
        self.reply(did="move")

    def fail(self, what: str = "a bug") -> None:
        raise ValueError(what)

    def leave(self) -> None:
        raise Leave

    def lack(self) -> None:
        raise VirtualWorkerLost("the process of a stage has ended; start again", "the process of a stage has ended")

    def finish_tuning(self) -> None:
        raise TunerExit

    def resist(self) -> None:
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, signal.SIG_IGN)
        parent_watch.GRACE = GRACE
        self.reply(did="resist")

    def lose_patience(self) -> None:
        """In the next launch, with children that do not end when told to."""
        parent_watch.GRACE = GRACE
        self.reply(did="lose_patience")

    def hurry(self) -> None:
        """At its end it waits for nobody any longer than this."""
        self.end_timeout = parent_watch.GRACE = GRACE
        self.reply(did="hurry")

    def end_slowly(self) -> None:
        """When its program is over, its interpreter works on until the test says something, and then waits for more."""
        child = parent_watch.this_child()
        assert child is not None
        atexit.unregister(child.leaves)
        atexit.register(self.work_on)
        atexit.register(child.leaves)
        self.reply(did="end_slowly")

    def work_on(self) -> None:
        self.reply(works_on=True)
        while not select.select([self.socket], [], [], 0)[0]:
            pass
        self.obey()

    def sleep(self) -> None:
        self.reply(did="sleep")

    def speak_soon(self) -> None:
        vars(children)["NOTICE_AFTER"] = GRACE
        self.reply(did="speak_soon")

    def be_started_elsewhere(self) -> None:
        """By torchrun, say: it starts nobody, and sees no other process."""
        self.role = Role.EXTERNAL
        self.reply(did="be_started_elsewhere")

    def stand_behind(self, workers: str) -> None:
        """So many virtual workers are on the nodes before this one."""
        self.before = int(workers)
        self.reply(did="stand_behind")

    def lose(self, worker: str) -> None:
        """The servers' coordinator says that a virtual worker is lost."""
        name = f"virtual worker {worker}"
        lost_workers.note(int(worker), name, "was silent for long", f"{name} is lost")
        self.reply(did="lose")

    def tidy_up(self) -> None:
        """From now on, told to end, it cleans up, which takes until the test says so, and then ends well."""
        try:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
            self.reply(did="tidy_up")
            self.obey()
        finally:
            self.reply(tidies=True)
            self.reply(tidied=self.orders.readline() == "tidied\n")

    def handle_sigterm(self) -> None:
        """As Lightning does in `fit`."""

        def passed_on(signum: int, frame: Any) -> None:
            assert self.launcher is not None
            self.launcher.kill(signum)
            sys.exit(1)

        signal.signal(signal.SIGTERM, passed_on)
        self.reply(did="handle_sigterm")

    def fork(self) -> None:
        """Leaves a process behind, as a DataLoader worker is one, with all that it inherits but our socket."""
        worker = os.fork()
        if worker == 0:
            self.orders.close()
            self.socket.close()
            signal.pause()  # until the test kills it
        self.reply(worker=worker)

    def fork_and_wait(self) -> None:
        """Waits for a process that waits to be interrupted, as a DataLoader's workers do; and says how that ended."""
        ready, told = os.pipe()
        worker = os.fork()
        if worker == 0:
            self.orders.close()
            self.socket.close()
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            os.write(told, b".")
            os._exit(signal.sigwait({signal.SIGINT}))
        os.read(ready, 1)
        try:
            self.reply(worker=worker)
            self.obey()
        finally:
            self.reply(worker_ended=os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]))

    def exit(self, code: str) -> None:
        sys.exit(int(code))


if __name__ == "__main__":
    Obedient(sys.argv[1]).obey()
