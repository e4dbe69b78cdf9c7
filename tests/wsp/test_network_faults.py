"""Faults of the network between two virtual workers and two servers: training is exact, or ends and says why (D = 0).

Machines are network namespaces. A fault lasts for `BRIEFLY` seconds, which is less than any patience of the programs,
or for ever; it begins while virtual worker 1 waits in a batch.
"""

from __future__ import annotations

import platform
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lightning_hetpipe.server.process.server_process import ServerProcess
from tests.launch.launching.meeting import stated
from tests.support.late_proxy import LateProxy
from tests.support.namespaces import Machine, Unavailable, finished, network
from tests.wsp.launch import ROOT, SECONDS, Job
from tests.wsp.launch import finished as trained_here
from tests.wsp.pause import paused, prepare
from tests.wsp.test_exact import check, expected
from tests.wsp.test_several_machines import MEETING, TRUSTED, by_hand, trained

pytestmark = pytest.mark.slow

BRIEFLY = 3.0
LEASE, TIMEOUT = 8.0, 12.0


@contextmanager
def made(number: int, rate: str | None = None) -> Iterator[list[Machine]]:
    try:
        with network(number, rate, "64kb", "400ms") as machines:  # routers' queues are long, and lose little
            yield machines
    except Unavailable as why:
        pytest.skip(str(why))


def job_of(folder: Path, **wsp: Any) -> Job:
    prepare(folder)
    more: dict[str, Any] = {"virtual_workers": 1, "trainer": {"num_nodes": 2, "max_epochs": 1}}
    more |= {"fault": (1, 2, "pause"), "timeout": TIMEOUT, "wsp": {**TRUSTED, "lease": LEASE, **wsp}}
    return Job(folder, lengths=(7, 6), more=more)


def pass_briefly(undo: Callable[[], object]) -> None:
    """Undo a fault when it has lasted for a while."""
    threading.Event().wait(BRIEFLY)
    undo()


def cut(one: Machine, other: Machine) -> Callable[[], object]:
    other.cut()
    return other.mend


def lost_from(one: Machine, other: Machine) -> Callable[[], object]:
    """All from virtual worker 1's machine is lost."""
    other.lose(one)
    return lambda: other.find(one)


def lost_to(one: Machine, other: Machine) -> Callable[[], object]:
    one.lose(other)
    return lambda: one.find(other)


def parted(one: Machine, other: Machine) -> Callable[[], object]:
    undo = [lost_from(one, other), lost_to(one, other)]
    return lambda: [each() for each in undo]


FAULTS = {"the link is cut": cut, "loss of requests": lost_from, "loss of answers": lost_to}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_that_passes_leaves_no_trace(name: str, machines: list[Machine], tmp_path: Path) -> None:
    job = job_of(tmp_path)
    processes = by_hand(machines, job)
    with paused(tmp_path, processes):
        undo = FAULTS[name](*machines)
    pass_briefly(undo)
    trained(job, processes, 3, 1)


@pytest.mark.parametrize("name", ["loss of requests", "loss of answers"])
def test_one_way_loss_for_ever_is_as_a_cut(name: str, machines: list[Machine], tmp_path: Path) -> None:
    """All weights are with virtual worker 0, which goes on; tests of a cut are in test_several_machines."""
    job = job_of(tmp_path, placement="local")
    processes = by_hand(machines, job)
    with paused(tmp_path, processes):
        FAULTS[name](*machines)
    (first, _, said), (second, _, heard) = finished(processes, SECONDS)
    assert (first, second) == (1, 1), said + heard
    assert f"for {TIMEOUT:g} s for an answer: the server at 10.0.0.1:29501 " in heard
    lost = f"virtual worker 1 (node 1, {platform.node()})"
    why = f"silent for longer than its lease of {LEASE:g} s (raise WSPCallback(lease=...) if it may be)"
    assert stated(said.splitlines()) == [
        f"hetpipe: {lost} is lost after 0 waves: it was {why}; the others go on without it.",
        f"hetpipe: this run went on without {lost}, which was {why}.",
    ]
    assert [machine.programs() for machine in machines] == [[], []]


def own_server(machine: Machine, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "lightning_hetpipe.cli.hetpipe_server", f"address={machine.address}:7070"]
    told = {"HETPIPE_TOKEN": MEETING["HETPIPE_TOKEN"], "PYTHONPATH": ROOT}
    server = machine.start([*command, "security.insecure=true", f"service.lease={LEASE}"], folder, told)
    assert server.stdout is not None
    assert "serving" in server.stdout.readline()
    return server


PARTITIONS = {
    "the servers from each other": (2, 3, None),
    "a virtual worker from the shard, briefly": (1, 3, True),
    "a virtual worker from the coordinator, briefly": (1, 2, True),
    "a virtual worker from the shard, for ever": (1, 3, False),
}
"""Two machines that cannot hear each other any more, virtual workers being on 0 and 1, the servers on 2 and 3."""


@pytest.mark.parametrize("name", PARTITIONS)
def test_a_partition(name: str, tmp_path: Path) -> None:
    """All others hear each other. Where it does not pass, all end as soon as one has waited for ``timeout``."""
    left, right, brief = PARTITIONS[name]
    with made(4) as machines:
        for machine in machines[2:]:
            own_server(machine, tmp_path)
        job = job_of(tmp_path, servers=[f"{machine.address}:7070" for machine in machines[2:]])
        processes = by_hand(machines[:2], job)
        one, other = machines[left], machines[right]
        with paused(tmp_path, processes):
            undo = parted(one, other)
        if brief:
            pass_briefly(undo)
        if brief is not False:
            trained(job, processes, 3, 1)
            return
        (first, _, said), (second, _, heard) = finished(processes, SECONDS)
        assert (first, second) == (1, 1), said + heard
        silent = f"has waited for {TIMEOUT:g} s for an answer: the server at {other.address}:7070 "
        assert silent in heard
        assert f"VW 1 failed: ServersUnheard: VW 1, in state 'stage', {silent}" in said
        assert [machine.programs() for machine in machines[:2]] == [[], []]


def test_a_slow_link_loses_nobody(tmp_path: Path) -> None:
    """A wave takes longer than a lease, and heartbeats share the link with it."""
    with made(2, "500kbit") as machines:
        more = {"virtual_workers": 1, "trainer": {"num_nodes": 2, "max_epochs": 1}, "wsp": {**TRUSTED, "lease": 6}}
        job = Job(tmp_path, "wide", (2, 2), in_flight=2, more=more)
        trained(job, by_hand(machines, job), 2, 1)


def test_a_link_too_slow_for_the_timeout_is_named(tmp_path: Path) -> None:
    with made(2, "200kbit") as machines:
        more = {"virtual_workers": 1, "trainer": {"num_nodes": 2, "max_epochs": 1}, "wsp": TRUSTED}
        job = Job(tmp_path, "wide", (4, 4), in_flight=2, more={**more, "timeout": 6})
        for code, _, said in finished(by_hand(machines, job), SECONDS):
            assert code == 1, said
            assert "raise HetPipeStrategy(timeout=...)" in said
        assert [machine.programs() for machine in machines] == [[], []]


def test_jitter(tmp_path: Path) -> None:
    """Packets are late by 5 to 45 ms; where the kernel has no netem, a proxy before the server hands on chunks late."""
    more: dict[str, Any] = {"trainer": {"max_epochs": 1}, "wsp": {"lease": LEASE}}
    job = Job(tmp_path, more=more)
    try:
        with network(2) as machines:
            if all(machine.delay("25ms", "20ms") for machine in machines):
                more |= {"virtual_workers": 1, "trainer": {"num_nodes": 2, "max_epochs": 1}}
                more["wsp"] |= TRUSTED
                trained(job, by_hand(machines, job), 3, 1)
                return
    except Unavailable:
        pass
    with (
        ServerProcess("lightning_hetpipe.server.process.sessions:Sessions", {"lease": LEASE}) as server,
        LateProxy(server.address, 0.05, seed=3) as proxy,
    ):
        more["wsp"]["servers"] = [proxy.address]
        found, _ = trained_here(job, HETPIPE_TOKEN=server.security.token or "")
        assert proxy.chunks > 100
    check(job, found, expected(job, 3, 1))
