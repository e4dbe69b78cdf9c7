"""The commands of docs/several-machines.md do what it says, on machines that are network namespaces."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.support.namespaces import Machine, finished
from tests.wsp.launch import ROOT, SECONDS

DOCUMENT = (ROOT / "docs" / "several-machines.md").read_text()

PROGRAMS = {
    "python": "",
    "torchrun": "-m torch.distributed.run",
    "hetpipe-train": "-m lightning_hetpipe.cli.hetpipe_train",
    "hetpipe-server": "-m lightning_hetpipe.cli.hetpipe_server",
    "hetpipe-host": "-m tests.hosts.plain_host",
    "hetpipe-plan": "-m lightning_hetpipe.cli.hetpipe_plan",
}
"""The commands of an environment, as this interpreter's."""

OVER = "A virtual worker over several machines"

NAMES = ("desk, 10.0.0.1", "attic, 10.0.0.2")

SRUN = """
import os, subprocess, sys
nodes = os.environ["NAMESPACES"].split()
started = []
for node, name in enumerate(nodes):
    told = {"PROCID": node, "NODEID": node, "LOCALID": 0, "STEP_TASKS_PER_NODE": f"1(x{len(nodes)})"}
    told = {f"SLURM_{key}": str(value) for key, value in told.items()}
    started.append(subprocess.Popen(["ip", "netns", "exec", name, *sys.argv[1:]], env={**os.environ, **told}))
sys.exit(max(process.wait() for process in started))
"""
"""Starts a task on each node, as SLURM's srun does with one for each."""


def blocks(heading: str) -> dict[str, str]:
    """The section's code, by the comment that each block begins with."""
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", DOCUMENT, re.MULTILINE | re.DOTALL)
    found = re.findall(r"^```bash\n#!? ?(.*?)\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert found, heading
    assert len(dict(found)) == len(found), f"two blocks of '{heading}' begin alike"
    return dict(found)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder that the machines share, with the program, the secrets, and the commands of an environment."""
    (program,) = re.findall(r"^```python\n(# train\.py\n.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)
    (tmp_path / "train.py").write_text(program)
    (tmp_path / "srun.py").write_text(SRUN)
    for name, module in {**PROGRAMS, "srun": str(tmp_path / "srun.py")}.items():
        command = tmp_path / "bin" / name
        command.parent.mkdir(exist_ok=True)
        command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {module} "$@"\n')
        command.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    made = subprocess.run(
        ["bash", "-ec", "".join(blocks("Secrets").values())],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert made.returncode == 0, made.stderr
    return tmp_path


def start(machine: Machine, script: str, folder: Path, **more: object) -> subprocess.Popen[str]:
    environment = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": ROOT, **more}
    return machine.start(["bash", "-ec", script], folder, environment)


def on_each(machines: Sequence[Machine], heading: str, folder: Path) -> list[subprocess.Popen[str]]:
    scripts = blocks(heading)
    return [start(machine, scripts[f"on {machine.address}"], folder) for machine in machines]


def printed(processes: Sequence[subprocess.Popen[str]]) -> list[str]:
    """Standard output of the programs, once they have ended well."""
    said = []
    for code, out, err in finished(processes, SECONDS):
        assert code == 0, err
        said.append(out)
    return said


def losses(said: Sequence[str]) -> list[str]:
    return [loss for each in said for loss in re.findall(r"the last loss is (\d\.\d+)", each)]


@pytest.mark.slow
def test_all_ways_to_start_it_train_the_same(machines: list[Machine], folder: Path) -> None:
    by_hand = losses(printed(on_each(machines, "By hand", folder)))
    assert len(by_hand) == 1, "only the first machine prints"
    assert losses(printed(on_each(machines, "torchrun", folder))) == by_hand
    (job,) = blocks("SLURM").values()
    asked = dict(re.findall(r"^#SBATCH --(\S+)=(\d+)$", job, re.MULTILINE))
    assert asked == {"nodes": "2", "ntasks-per-node": "1"}
    told = {"SLURM_NNODES": 2, "SLURM_NTASKS_PER_NODE": 1, "SLURM_NTASKS": 2, "SLURM_JOB_NAME": "job.sh"}
    told |= {"SLURM_JOB_ID": 4711, "SLURM_NODELIST": ",".join(machine.address for machine in machines)}
    batch = start(machines[0], job, folder, NAMESPACES=" ".join(machine.name for machine in machines), **told)
    assert losses(printed([batch])) == by_hand
    assert [machine.programs() for machine in machines] == [[], []]


@pytest.mark.slow
def test_servers_of_ones_own(machines: list[Machine], folder: Path) -> None:
    heading = "Servers of your own"
    scripts = blocks(heading)
    servers = [start(machine, scripts[f"on {machine.address}, stays"], folder) for machine in machines]
    for machine, server in zip(machines, servers, strict=True):
        assert server.stdout is not None
        assert server.stdout.readline() == f"hetpipe-server: serving {machine.address}:7070; Ctrl-C ends it.\n"
        assert machine.listening() == {f"{machine.address}:7070"}
    said = printed(on_each(machines, heading, folder))
    assert len(losses(said)) == 1
    (status,) = printed([start(machines[1], scripts["on 10.0.0.2, meanwhile"], folder)])
    assert re.search(r"^sessions +0$", status, re.MULTILINE), "all have left: " + status
    for server in servers:
        os.killpg(server.pid, signal.SIGINT)
    assert [code for code, _, _ in finished(servers, SECONDS)] == [130, 130]


@pytest.mark.slow
def test_the_command_line_has_one_run_directory(machines: list[Machine], folder: Path) -> None:
    pytest.importorskip("sklearn", reason="hetpipe-train's digits come with scikit-learn")
    first, second = printed(on_each(machines, "hetpipe-train", folder))
    assert "Trained as a pipeline of 3 stages" in first
    assert "Trained" not in second
    (run,) = (folder / "runs").iterdir()
    assert [path.name for path in (run / "checkpoints").iterdir()] != []
    assert len([*(run / "tensorboard").glob("events*")]) >= 1
    assert not (folder / "outputs").exists()


@pytest.mark.slow
def test_a_virtual_worker_over_several_machines(machines: list[Machine], folder: Path) -> None:
    """By one command on each machine, and by hosts of one's own; both train to the same weights."""
    pytest.importorskip("sklearn", reason="hetpipe-train's digits come with scikit-learn")
    scripts = blocks(OVER)
    (cluster,) = re.findall(r"^```yaml\n# mine/cluster/lab.yaml\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)
    (folder / "mine" / "cluster").mkdir(parents=True)
    (folder / "mine" / "cluster" / "lab.yaml").write_text(cluster)
    (said,) = printed([start(machines[0], scripts["first"], folder)])
    assert "NODE_RANK=0 on desk, NODE_RANK=1 on attic" in said
    both = [start(each, scripts[f"on the {name}"], folder) for each, name in zip(machines, NAMES, strict=True)]
    desk, attic = printed(both)
    assert "Trained as a pipeline of 2 stages" in desk
    assert attic == ""
    assert [machine.programs() for machine in machines] == [[], []]
    host = start(machines[1], scripts["on the attic, 10.0.0.2, stays"], folder)
    assert host.stdout is not None
    assert host.stdout.readline() == "hetpipe-host: serving 10.0.0.2:7071; Ctrl-C ends it.\n"
    printed([start(machines[0], scripts["on the desk, 10.0.0.1, alone"], folder)])
    os.killpg(host.pid, signal.SIGINT)
    assert [code for code, _, _ in finished([host], SECONDS)] == [130]
    one, other = (
        torch.load(next((folder / "runs" / run / "checkpoints").glob("*.ckpt")), weights_only=True)["state_dict"]
        for run in ("second", "third")
    )
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_every_command_is_among_them() -> None:
    """A section with commands that no test runs would promise what nobody has seen."""
    headings = re.findall(r"^## (.*?)\n(?:(?!^## ).*\n)*?^```bash", DOCUMENT, re.MULTILINE)
    assert headings == ["Secrets", "By hand", "torchrun", "SLURM", "hetpipe-train", "Servers of your own", OVER]
    assert {name for heading in headings for name in blocks(heading)} == {
        "once",
        "for the hosts",
        "/bin/bash",
        "on 10.0.0.1",
        "on 10.0.0.2",
        "on 10.0.0.1, stays",
        "on 10.0.0.2, stays",
        "on 10.0.0.2, meanwhile",
        "first",
        "on the desk, 10.0.0.1",
        "on the attic, 10.0.0.2",
        "on the attic, 10.0.0.2, stays",
        "on the desk, 10.0.0.1, alone",
    }
