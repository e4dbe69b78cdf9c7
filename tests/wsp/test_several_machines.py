"""Virtual workers on several machines, which are network namespaces: what they train does not depend on who lies where.

However their processes are started, they find each other by Lightning's own variables, and start a server on each
machine.
"""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launch.launching.meeting import stated
from tests.support.namespaces import Machine, finished
from tests.wsp.launch import ROOT, SECONDS, Job
from tests.wsp.pause import paused, prepare
from tests.wsp.test_exact import check, expected

pytestmark = pytest.mark.slow

MEETING = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": 29500, "HETPIPE_TOKEN": "open-sesame"}
TRUSTED = {"security": {"insecure": True}}


def by_hand(machines: Sequence[Machine], job: Job) -> list[subprocess.Popen[str]]:
    return [machine.start(job.command(), ROOT, {**MEETING, "NODE_RANK": node}) for node, machine in enumerate(machines)]


def by_torchrun(machines: Sequence[Machine], job: Job, counts: Sequence[int]) -> list[subprocess.Popen[str]]:
    processes = []
    for node, (machine, count) in enumerate(zip(machines, counts, strict=True)):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", 2, "--node-rank", node]
        torchrun += ["--nproc-per-node", count, "--master-addr", "10.0.0.1", "--master-port", 29500]
        secret = {"HETPIPE_TOKEN": "open-sesame"}
        processes.append(machine.start([*torchrun, *job.command()[1:]], ROOT, secret))
    return processes


def trained(job: Job, processes: Sequence[subprocess.Popen[str]], wave: int, epochs: int = 2) -> None:
    """They end well, and what they have trained is what the laws say."""
    for code, _, err in finished(processes, SECONDS):
        assert code == 0, err
    check(job, job.written(), expected(job, wave, epochs))


def test_a_command_on_each(machines: list[Machine], tmp_path: Path) -> None:
    """Two virtual workers on each machine; the first one's number of stages differs from the second's."""
    more = {"virtual_workers": 2, "trainer": {"num_nodes": 2}, "wsp": TRUSTED}
    job = Job(tmp_path, lengths=(4, 3, 4, 5), stages=[2, 1], in_flight=2, more=more)
    trained(job, by_hand(machines, job), 2)
    assert [machine.programs() for machine in machines] == [[], []], "processes were left"


def test_torchrun_with_unequal_numbers(machines: list[Machine], tmp_path: Path) -> None:
    more = {"virtual_workers": 1, "wsp": {**TRUSTED, "placement": "round_robin"}}
    job = Job(tmp_path, lengths=(4, 5, 3), stages=[2, 3, 1], more=more)
    trained(job, by_torchrun(machines, job, (2, 1)), 3)


def test_slurm(machines: list[Machine], tmp_path: Path) -> None:
    """The variables that srun sets; MASTER_ADDR and MASTER_PORT follow from them."""
    more = {"virtual_workers": 1, "trainer": {"num_nodes": 2}, "wsp": {**TRUSTED, "placement": "local"}}
    job = Job(tmp_path, lengths=(4, 5), more=more)
    of_all: dict[str, Any] = {"SLURM_NTASKS": 2, "SLURM_NNODES": 2, "SLURM_NTASKS_PER_NODE": 1, "SLURM_JOB_NAME": "a"}
    of_all |= {"SLURM_JOB_ID": 1234, "SLURM_NODELIST": "10.0.0.1,10.0.0.2", "HETPIPE_TOKEN": "open-sesame"}
    of_all |= {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_LOCALID": 0}
    processes = [
        machine.start(job.command(), ROOT, {**of_all, "SLURM_PROCID": node, "SLURM_NODEID": node})
        for node, machine in enumerate(machines)
    ]
    trained(job, processes, 3)


def test_an_exception_on_one_ends_all(machines: list[Machine], tmp_path: Path) -> None:
    """The server that tells the others of it is the failing one's own, and outlasts it for as long as that takes."""
    more = {"virtual_workers": 1, "trainer": {"num_nodes": 2}, "wsp": {**TRUSTED, "lease": 6}, "fault": (0, 2, "raise")}
    (first, _, said), (second, _, heard) = finished(by_hand(machines, Job(tmp_path, more=more)), SECONDS)
    assert (first, second) == (1, 1)
    assert "ValueError: a bad batch" in said
    assert "VW 0 failed: ValueError: a bad batch" in heard
    assert [machine.programs() for machine in machines] == [[], []]


UNTRAINED = (
    "hetpipe: virtual worker {} was lost after 0 waves of epoch 0: {} of its {} samples of that epoch were not"
    " trained on."
)


def test_torchrun_ends_in_one_and_each_machine_says_once_who_was_lost(machines: list[Machine], tmp_path: Path) -> None:
    """The others' code after training is left its time: torchrun ends all of a machine when one ends with 1."""
    wsp = {**TRUSTED, "placement": "local", "lease": 4}
    more = {"virtual_workers": 1, "wsp": wsp, "fault": (2, 2, "SIGKILL"), "lasts": 0}
    job = Job(tmp_path, lengths=(4, 5, 3), more=more)
    first, second = finished(by_torchrun(machines, job, (2, 1)), SECONDS)
    assert (first[0], second[0]) == (1, 1)
    lost = f"virtual worker 2 (node 1, {platform.node()})"
    why = "silent for longer than its lease of 4 s (raise WSPCallback(lease=...) if it may be)"
    assert [line for line in stated(first[2].splitlines()) if "virtual worker 2" in line] == [
        f"hetpipe: {lost} is lost after 0 waves: it was {why}; the others go on without it.",
        UNTRAINED.format(2, 11, 11),
        f"hetpipe: this run went on without {lost}, which was {why}.",
    ]
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == ["0.pt", "1.pt"]
    assert (tmp_path / "lasted").exists(), "it was ended by the other one's exit code"


@pytest.mark.parametrize("placement", ["local", "size"])
def test_a_cable_is_pulled_out_in_mid_training(placement: str, machines: list[Machine], tmp_path: Path) -> None:
    """Nobody hangs. If all weights are on the machine that is left, it goes on after a lease; else both say why."""
    more = {
        "virtual_workers": 1,
        "trainer": {"num_nodes": 2},
        "wsp": {**TRUSTED, "placement": placement, "lease": 5},
        "fault": (1, 2, "pause"),
        "timeout": 40,
    }
    job = Job(tmp_path, more=more)
    prepare(tmp_path)
    processes = by_hand(machines, job)
    with paused(tmp_path, processes):
        machines[1].cut()
    (first, _, said), (second, _, heard) = finished(processes, SECONDS)
    assert second == 1
    assert "VW 1, in state" in heard
    assert "for 40 s for an answer: the server at 10.0.0.1:29501 cannot be reached" in heard
    if placement == "local":
        assert first == 1, "a script that goes by it would go on"
        assert (tmp_path / "0.pt").exists()
        lost = f"virtual worker 1 (node 1, {platform.node()})"
        why = "silent for longer than its lease of 5 s (raise WSPCallback(lease=...) if it may be)"
        assert stated(said.splitlines()) == [
            f"hetpipe: {lost} is lost after 0 waves: it was {why}; the others go on without it.",
            UNTRAINED.format(1, 19, 19),
            f"hetpipe: this run went on without {lost}, which was {why}.",
        ]
        members = [row["hetpipe/members"] for row in torch.load(tmp_path / "0.pt", weights_only=False)["logged"]]
        assert (members[0], members[-1]) == (2.0, 1.0)
    else:
        assert first == 1
        assert "VW 0, in state" in said
        assert "for 40 s for an answer: the server at 10.0.0.2:" in said
    assert [machine.programs() for machine in machines] == [[], []]
