"""Machines that are network namespaces of this one, joined by a switch: what runs on one sees others as a cluster does.

Needs root, and a kernel that has network namespaces, virtual Ethernet and bridges.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support import forks

TIMEOUT = 30.0
NOBODY = "02:00:00:00:00:01"
"""A hardware address that no machine has."""

_count = itertools.count(1)


class Unavailable(Exception):
    """This machine makes no namespaces; the message says why."""


class Machine:
    """One of them. ``address`` is its own in the network; it has a loopback interface of its own, too."""

    def __init__(self, name: str, address: str, switch: str, port: str) -> None:
        self.name = name
        self.address = address
        self._switch = switch
        self._port = port
        self._processes: list[subprocess.Popen[str]] = []

    def inside(self, *command: object) -> list[str]:
        """``command``, as it is to be run on this machine."""
        return ["ip", "netns", "exec", self.name, *map(str, command)]

    def apart(self, *command: object) -> list[str]:
        """As ``inside``, with process numbers of its own: else large bodies go through memory that machines share."""
        return self.inside("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *command)

    def run(self, *command: object) -> str:
        """Runs a short command on this machine; gives its output."""
        return _run(*self.inside(*command))

    def start(
        self, command: Sequence[object], folder: Path, environment: Mapping[str, Any], stdin: int | None = None
    ) -> subprocess.Popen[str]:
        """Starts a program, in a session of its own, that ends with the network at the latest."""
        process = forks.Popen(
            [*map(str, command)],
            network=self.name,
            starting=forks.LAUNCHES,
            cwd=folder,
            env={**os.environ, **{name: str(value) for name, value in environment.items()}},
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._processes.append(process)
        return process

    def cut(self) -> None:
        """Pulls this machine's cable out of the switch."""
        _ip("-n", self._switch, "link", "set", self._port, "down")

    def mend(self) -> None:
        """Puts it back."""
        _ip("-n", self._switch, "link", "set", self._port, "up")

    def lose(self, other: Machine) -> None:
        """Have all that this machine sends to ``other`` be lost, silently; what comes from there still arrives."""
        _ip("-n", self.name, "neigh", "replace", other.address, "lladdr", NOBODY, "dev", "eth0", "nud", "permanent")

    def find(self, other: Machine) -> None:
        """Undo ``lose``."""
        _ip("-n", self.name, "neigh", "del", other.address, "dev", "eth0")

    def delay(self, *netem: object) -> bool:
        """Have what this machine sends be late, as tc-netem writes it; False where the kernel has no netem."""
        command = ["tc", "-n", self.name, "qdisc", "add", "dev", "eth0", "root", "netem", "delay", *map(str, netem)]
        return subprocess.run(command, capture_output=True, timeout=TIMEOUT).returncode == 0

    def transferred(self) -> int:
        """Bytes that have come to and gone from this machine, headers included."""
        folder = "/sys/class/net/eth0/statistics"
        return sum(int(self.run("cat", f"{folder}/{way}_bytes")) for way in ("rx", "tx"))

    def listening(self) -> set[str]:
        """The addresses, with ports, on which programs of this machine take connections."""
        found = (line.split()[3] for line in self.run("ss", "-Hltn").splitlines())
        return {address.replace("[::ffff:", "").replace("]", "") for address in found}

    def programs(self) -> list[int]:
        """The processes that run on this machine."""
        found = map(int, _run("ip", "netns", "pids", self.name).split())
        return [pid for pid in found if not forks.is_server(pid)]  # which ends with its program

    def end(self) -> None:
        """Ends what still runs on this machine."""
        for pid in self.programs():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for process in self._processes:
            process.kill()

    def close(self) -> None:
        """Waits until what was started here has ended; programs on other machines may hold its output open."""
        for process in self._processes:
            process.communicate(timeout=TIMEOUT)


@contextmanager
def network(
    machines: int, rate: str | None = None, burst: str = "512kb", latency: str = "50ms"
) -> Iterator[list[Machine]]:
    """Machines 10.0.0.1, 10.0.0.2, ... Leaves nothing behind.

    Args:
        rate: What each cable carries each way, as tc writes it, such as "200mbit"; None: as much as it can.
        burst: What may pass at once after a pause; few milliseconds at ``rate`` are exact.
        latency: How long a packet waits in a queue, at most, before it is dropped.

    Raises:
        Unavailable: if this machine makes no namespaces.
    """
    if os.geteuid() or any(shutil.which(program) is None for program in ("ip", "tc", "ss")):
        raise Unavailable("network namespaces need root, and the programs ip, tc and ss (iproute2)")
    _clear_away()
    names = [f"hetpipe-{os.getpid()}-{next(_count)}" for _ in range(machines + 1)]
    made: list[Machine] = []
    try:
        try:
            _build(names, None if rate is None else ["rate", str(rate), "burst", burst, "latency", latency])
        except subprocess.CalledProcessError as error:
            raise Unavailable(f"this machine makes no network namespaces: {error.stderr.strip()}") from None
        made = [Machine(name, f"10.0.0.{i}", names[0], f"port{i}") for i, name in enumerate(names[1:], start=1)]
        yield made
    finally:
        for step in (Machine.end, Machine.close):
            for machine in made:
                step(machine)
        present = {line.split()[0] for line in _ip("netns", "list").splitlines()}
        for name in present & set(names):
            _ip("netns", "delete", name)


def _clear_away() -> None:
    """Removes what was left by processes that were killed."""
    for line in _ip("netns", "list").splitlines():
        name = line.split()[0]
        found = re.fullmatch(r"hetpipe-(\d+)-\d+", name)
        if found is not None and not Path("/proc", found[1]).exists():
            Machine(name, "", "", "").end()
            _ip("netns", "delete", name)


def _build(names: Sequence[str], limit: Sequence[str] | None) -> None:
    switch = names[0]
    for name in names:
        _ip("netns", "add", name)
        _ip("-n", name, "link", "set", "lo", "up")
    _ip("-n", switch, "link", "add", "switch", "type", "bridge")
    _ip("-n", switch, "link", "set", "switch", "up")
    for i, name in enumerate(names[1:], start=1):
        _ip("-n", switch, "link", "add", f"port{i}", "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("-n", switch, "link", "set", f"port{i}", "master", "switch")
        _ip("-n", switch, "link", "set", f"port{i}", "up")
        _ip("-n", name, "address", "add", f"10.0.0.{i}/24", "dev", "eth0")
        _ip("-n", name, "link", "set", "eth0", "up")
        for where, device in ((switch, f"port{i}"), (name, "eth0")):
            if limit is None:
                continue
            _run("tc", "-n", where, "qdisc", "add", "dev", device, "root", "tbf", *limit)


def finished(processes: Sequence[subprocess.Popen[str]], seconds: float) -> list[tuple[int, str, str]]:
    """Waits for all of them to end: each one's exit code, standard output and error.

    Raises:
        AssertionError: if one has not ended after ``seconds``; with what all have said, once they are killed.
    """
    deadline, late = time.monotonic() + seconds, False
    said = []
    for process in processes:
        try:
            out, err = process.communicate(timeout=0 if late else max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            late = True
            process.kill()
            out, err = process.communicate()
        said.append((process.returncode, out, err))
    assert not late, f"not ended after {seconds:g} s: {said}"
    return said


def _ip(*words: str) -> str:
    return _run("ip", *words)


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=TIMEOUT).stdout
