"""Faults by address, inside a virtual worker: what happens before, after or amid its n-th message of a kind.

An address: {"vw": 1, "room": "fit-1", "message": "StageUpdate", "nth": 2, "when": "middle", "what": "server"};
without "nth" it is every one. With "once": "pushed" it happens when the other virtual workers have pushed their updates
of the wave, with "wait", when they wait at a cut, with "held", when the first one is held. With "mark": a path, it
happens where no such file is, and makes it: in the first of several processes of a virtual worker. With "follows": the
mark of another fault, messages count from when that has happened. The middle of a
message is half-way through its body, which then goes by gRPC; with "shared" it is when the other side has been told
where in shared memory the body lies.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.environments import LightningEnvironment

from lightning_hetpipe.launch import parent_watch
from lightning_hetpipe.launch import servers as servers_of_launch
from lightning_hetpipe.launch.launcher import LEFT_OUT
from lightning_hetpipe.launch.local_rendezvous import ask
from lightning_hetpipe.launch.servers import COORDINATOR, TOKEN
from lightning_hetpipe.server.protocol.messages import decode
from lightning_hetpipe.server.transport import grpc_channel
from lightning_hetpipe.server.transport.frames import Answer
from lightning_hetpipe.server.transport.grpc_channel import GrpcChannel
from lightning_hetpipe.server.transport.interface import TIMEOUT, Room
from lightning_hetpipe.server.transport.security import Security
from lightning_hetpipe.workers import join_handshake
from tests.server.strangers import annoy
from tests.support import forks
from tests.support.forks import command_of
from tests.wsp.launch import MARK

PATIENCE = 60.0


def until(condition: Callable[[], bool], what: str) -> None:
    """Returns when ``condition`` holds, which only other processes can bring about."""
    deadline, pause = time.monotonic() + PATIENCE, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, what
        pause.wait(0.02)


def processes(parent: int | None = None) -> Iterator[tuple[int, str]]:
    """The processes that run, with their command lines; those of ``parent`` alone, if it is given."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, ppid = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if parent in (None, int(ppid)) and state != "Z":
                yield int(folder.name), command_of(int(folder.name))
        except OSError:
            continue


def server() -> int | None:
    """The process of the launch's server."""
    launcher = os.getpid() if os.environ.get("LOCAL_RANK", "0") == "0" else os.getppid()
    return next((pid for pid, command in processes(launcher) if "hetpipe-server" in command), None)


def tell_all() -> None:
    """Sends SIGTERM to every process of the launch, as SLURM does: virtual workers, servers, and this one last."""
    here = {pid for pid, _ in processes(os.getpid())}
    for pid in [*here, *(grandchild for child in here for grandchild, _ in processes(child)), os.getpid()]:
        if not forks.is_server(pid):  # which is no part of the launch
            os.kill(pid, signal.SIGTERM)


def kill_server() -> None:
    """Returns when it is gone; it may be so already."""
    if (pid := server()) is not None:
        os.kill(pid, signal.SIGKILL)
        until(lambda: server() != pid, "the server does not die")


def servers() -> list[int]:
    """The processes of all servers of the launch, whoever has started them."""
    mark, found = f"{MARK}={os.environ[MARK]}\0".encode(), []
    for pid, command in processes():
        with suppress(OSError):  # one of another test has just ended
            if "hetpipe-server" in command and mark in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(pid)
    return found


def others() -> list[int]:
    """The processes of the other virtual workers, as the first one sees them."""
    return [pid for pid, command in processes(os.getpid()) if "tests.wsp.worker" in command]


def held() -> Path:
    """The file that says that the first virtual worker is held."""
    return Path(os.environ[MARK], "held")


def do(what: str) -> None:
    """Lets it happen.

    server: the server is killed. servers: all servers of the launch are. kill, stop: this virtual worker is. servers
    and kill: both. hold: the first one waits until it is alone. kill others: those of the first one are. continue:
    those of the first one that were stopped go on; continue others: and to their end. garbage: the server gets all that
    makes no sense. join 2: somebody starts virtual worker 2 by hand, who sees to it from then on.
    """
    match what:
        case "server":
            kill_server()
        case "servers" | "servers and kill":
            for pid in (killed := servers()):
                os.kill(pid, signal.SIGKILL)
            if what == "servers and kill":
                os.kill(os.getpid(), signal.SIGKILL)
            until(lambda: not {*killed} & {*servers()}, "the servers do not die")
        case "kill" | "stop":
            os.kill(os.getpid(), signal.SIGKILL if what == "kill" else signal.SIGSTOP)
        case "hold":
            held().touch()
            until(lambda: not others(), "the others do not end")
        case "kill others" | "continue others":
            for pid in others():
                os.kill(pid, signal.SIGKILL if what == "kill others" else signal.SIGCONT)
            until(lambda: not others(), "the others do not end")
        case "continue":
            for pid in others():
                os.kill(pid, signal.SIGCONT)
        case "garbage":
            told = parent_watch.launcher_variables()
            if not told:
                told = ask(servers_of_launch._launch_of(LightningEnvironment()), PATIENCE).variables
            assert annoy(told[COORDINATOR], Security(token=told[TOKEN]), "fit-1") > 100
        case _ if what.startswith("join "):
            joined.append(Joined(int(what.removeprefix("join "))))
        case _:
            raise ValueError(what)


class Joined:
    """Virtual worker ``vw``, which the first one's process starts as somebody by hand would, in a seat that is free.

    It is started again where it was killed, or has ended with :data:`LEFT_OUT`, for as long as the first one trains.
    """

    def __init__(self, vw: int) -> None:
        self.vw = vw
        self._over = False
        self._starting = threading.Lock()
        self._process = self._start()
        self._thread = threading.Thread(target=self._see_to_it, name=f"test-joined-{vw}", daemon=True)
        self._thread.start()

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.wsp.worker", *sys.argv[1:]]
        return subprocess.Popen(command, env={**os.environ, "LOCAL_RANK": str(self.vw)}, start_new_session=True)

    def _see_to_it(self) -> None:
        again = True
        while again:
            code = self._process.wait()
            with self._starting:
                again = not self._over and code in (-signal.SIGKILL, LEFT_OUT)
                if again:
                    self._process = self._start()

    @property
    def lives(self) -> bool:
        """True while it may take part, now or later."""
        return self._thread.is_alive()

    def end(self) -> int:
        """Wait for its end, when training is over; gives its exit code."""
        with self._starting:
            self._over = True
        self._process.send_signal(signal.SIGCONT)
        self._thread.join()
        return self._process.wait()


joined: list[Joined] = []
"""Those that have come to this process, the first one of its launch."""


def strike(fault: Mapping[str, Any]) -> None:
    """Lets ``fault`` happen; where it has a mark, that says when."""
    if "mark" in fault:
        Path(fault["mark"]).write_text(repr(time.time()))
    do(fault["what"])


class Injector:
    """Faults that are to befall messages of this virtual worker."""

    def __init__(self, vw: int, faults: Sequence[dict[str, Any]]) -> None:
        self._faults = [fault for fault in faults if fault["vw"] == vw]
        self._counts: dict[tuple[str, str], int] = {}
        self._before: dict[int, int] = {}  # messages that do not count yet, by fault
        self._lock = threading.Lock()

    def of(self, method: str, header: bytes) -> dict[str, Any] | None:
        """Fault of the message that goes out now."""
        room, _, _ = method.partition("/")
        message = type(decode(header)).__name__
        with self._lock:
            nth = self._counts[room, message] = self._counts.get((room, message), 0) + 1
        for index, fault in enumerate(self._faults):
            if (fault["room"], fault["message"]) != (room, message):
                continue
            if "follows" in fault and not Path(fault["follows"]).exists():
                self._before[index] = nth
                continue
            if fault.get("nth", nth) == nth - self._before.get(index, 0):
                if "mark" in fault and Path(fault["mark"]).exists():
                    continue
                if "mark" in fault:
                    Path(fault["mark"]).touch()
                return fault
        return None


def install(vw: int, faults: Sequence[dict[str, Any]]) -> None:
    """Lets ``faults`` happen to the messages that this process sends from now on."""
    injector = Injector(vw, faults)
    now = threading.local()  # what befalls the call that this thread makes

    class Channel(GrpcChannel):
        def __init__(self, address: str, security: Security | None = None) -> None:
            in_messages = any(fault["when"] == "middle" and not fault.get("shared") for fault in faults)
            super().__init__(address, security, shared_memory=not in_messages)

        def call(
            self,
            method: str,
            header: bytes,
            body: Sequence[memoryview] = (),
            into: Room = (),
            timeout: float = TIMEOUT,
        ) -> bytes:
            fault = injector.of(method, header) if "/" in method else None
            when = None if fault is None else fault["when"]
            if fault is not None and "once" in fault:
                self.await_others(method.partition("/")[0], fault["once"])
            now.fault = fault if when == "middle" else None
            if fault is not None and when == "before":
                strike(fault)
            answer = super().call(method, header, body, into, timeout)
            if fault is not None and when == "after":
                strike(fault)
            return answer

        def await_others(self, room: str, what: str) -> None:
            """Until the others have pushed what this virtual worker has still to push, or wait at a cut."""

            def there() -> bool:
                if what == "held":
                    return held().exists()
                members = json.loads(super(Channel, self).call("status", b""))[room]["members"]
                mine = next(member["clock"] for member in members if member["vw"] == vw)
                others = [member for member in members if member["vw"] != vw]
                return all(other["clock"] > mine if what == "pushed" else other["waits_at_cut"] for other in others)

            until(there, f"the others are not yet {what}")

        def _took(self, answer: Answer, said: bytes, into: Room) -> bool:
            if answer.place is not None:
                befall()  # before the reply's body is read where it lies
            return super()._took(answer, said, into)

    def befall() -> None:
        fault, now.fault = getattr(now, "fault", None), None
        if fault is not None:
            strike(fault)

    sent, read = grpc_channel.requests, grpc_channel.received

    def requests(opening: bytes, body: Sequence[memoryview]) -> Iterator[bytes]:
        """The fault comes when half of the request's body has been sent."""
        fault = getattr(now, "fault", None)
        if not body or fault is None:
            return sent(opening, body)
        now.fault = None  # the messages are sent by another thread

        def befallen() -> Iterator[bytes]:
            for number, message in enumerate(sent(opening, body)):
                half = len(message) // 2 if number == 1 else 0
                if half:
                    yield message[:half]
                    strike(fault)
                yield message[half:]

        return befallen()

    def received(replies: Iterator[bytes], into: Room) -> tuple[Answer, bytes]:
        """The fault comes when none of the reply's body has been read."""

        def befallen() -> Iterator[bytes]:
            for message in replies:
                befall()
                yield message

        return read(befallen(), into)

    vars(join_handshake)["GrpcChannel"] = Channel
    vars(grpc_channel).update(requests=requests, received=received)


def record_decisions(path: str) -> None:
    """Lets the server that this process starts write its coordinators' decisions to the file ``path``."""
    make = vars(servers_of_launch)["ServerProcess"]

    def recording(handler: str, arguments: dict[str, object], *rest: Any) -> Any:
        return make(handler, {**arguments, "log": path}, *rest)

    vars(servers_of_launch)["ServerProcess"] = recording
