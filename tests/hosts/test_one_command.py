"""One command on each node of a plan: a node without a leader serves its stages until node 0 has ended."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hosts.elsewhere import runs
from tests.server.transports import eventually
from tests.support import forks
from tests.support.namespaces import finished
from tests.wsp.launch import ROOT, SECONDS, free_port

PROGRAM = """
import json
import sys
from dataclasses import replace

import lightning as L
import torch

from lightning_hetpipe import WSPCallback
from tests.hosts.test_other_machines import plan, task
from tests.support.models import vectors
from tests.support.strategies import stashing
from tests.support.trainers import quiet_trainer

told = json.loads(sys.argv[1])
made = plan(*told["workers"][0], workers=len(told["workers"]))
workers = [
    replace(worker, stages=tuple(replace(stage, node=node) for stage, node in zip(worker.stages, nodes)))
    for worker, nodes in zip(made.virtual_workers, told["workers"])
]
made = replace(made, virtual_workers=tuple(workers), model=told.get("model", "Task"))


class Talks(L.Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 4 and trainer.is_global_zero and told.get("talks"):
            print("trains", flush=True)
            if "ends" in sys.stdin.readline():
                raise ArithmeticError("of the user's")


learner = task()
wsp = WSPCallback(aggregate="mean", lease=5, **told.get("wsp", {}))
strategy = stashing(plan=made, wsp=wsp, **told.get("strategy", {}))
trainer = quiet_trainer(strategy, num_nodes=told["num_nodes"], callbacks=[Talks()])
trainer.fit(learner, vectors(80, 4))
if told.get("again"):
    trainer.validate(learner, vectors(12, 4), verbose=False)
    again = quiet_trainer(stashing(plan=made, wsp=wsp), num_nodes=told["num_nodes"])
    again.fit(learner, vectors(40, 4))
print(f"ended {trainer.global_rank}", flush=True)
if trainer.is_global_zero:
    torch.save(learner.state_dict(), told["saved"])
"""

OVER = [["attic", "cellar", "desk"]]
"""Nodes of the stages of one virtual worker; their ranks are 1, 2 and 0."""


class Nodes:
    """Programs, one for each node of a plan, all on this machine.

    Args:
        folder: For what they save.
        workers: Nodes of the stages of each virtual worker.
        nodes: Number of programs.
        told: What is told to each program beside.
    """

    def __init__(self, folder: Path, workers: list[list[str]], nodes: int, **told: Any) -> None:
        self.saved = folder / "saved.pt"
        self._program = folder / "program.py"
        self._program.write_text(PROGRAM)  # once: a program that has started reads it
        self._told = {"workers": workers, "num_nodes": nodes, "saved": str(self.saved), **told}
        own = {name: value for name, value in os.environ.items() if not name.startswith("HETPIPE")}
        self._environment = {**own, "PYTHONPATH": str(ROOT), "HETPIPE_TOKEN": "one", "MASTER_ADDR": "127.0.0.1"}
        self._environment["MASTER_PORT"] = str(free_port())
        self.port = self._environment["MASTER_PORT"]
        self.started: list[subprocess.Popen[str]] = []

    def start(self, rank: int, environment: Mapping[str, str] | None = None, **told: Any) -> subprocess.Popen[str]:
        return self.run([sys.executable], {"NODE_RANK": str(rank), **(environment or {})}, **told)

    def run(
        self, interpreter: list[str], environment: Mapping[str, str] | None = None, **told: Any
    ) -> subprocess.Popen[str]:
        command = [*interpreter, str(self._program), json.dumps({**self._told, **told})]
        process = forks.Popen(
            [_filled(word, self._environment) for word in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**self._environment, **(environment or {})},
            start_new_session=True,
            starting=forks.LAUNCHES,
        )
        self.started.append(process)
        return process


def _filled(word: str, environment: Mapping[str, str]) -> str:
    return word.replace("MASTER_PORT", environment["MASTER_PORT"])


@contextmanager
def launched(folder: Path, workers: list[list[str]], nodes: int, **told: Any) -> Iterator[Nodes]:
    """Programs that are killed at the latest in the end."""
    made = Nodes(folder, workers, nodes, **told)
    try:
        yield made
    finally:
        for process in made.started:
            process.kill()
            process.communicate()


def results(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    return finished(processes, 120.0)


def alone(folder: Path, workers: int, **told: Any) -> dict[str, torch.Tensor]:
    """Weights of the same program on one node."""
    with launched(folder, [["desk"] * 3] * workers, 1, **told) as nodes:
        code, _, err = results([nodes.start(0)])[0]
        assert code == 0, err
        return dict(torch.load(nodes.saved))


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_nodes_without_a_leader_serve_until_it_has_ended(tmp_path: Path) -> None:
    """The last stage's node trains, twice, and validates; the others' programs stay in their first Trainer call."""
    with launched(tmp_path, OVER, 3, again=True) as nodes:
        desk, *others = results([nodes.start(rank) for rank in range(3)])
        assert (desk[0], desk[1]) == (0, "ended 0\n"), desk[2]
        for number, (name, (code, out, err)) in enumerate(zip(("attic", "cellar"), others, strict=True)):
            assert (code, out) == (0, ""), err
            assert f"this is {name} (NODE_RANK={number + 1}) of the plan, and serves stage {number} of" in err
        found = torch.load(nodes.saved)
    assert_equal(found, alone(tmp_path, 1, again=True))


ONE_LEADS = [["attic", "cellar", "desk"], ["attic", "cellar", "desk"]]
EACH_SERVES = [["attic", "attic", "desk"], ["desk", "desk", "attic"]]


@pytest.mark.parametrize(
    ("workers", "placement"),
    [
        pytest.param(ONE_LEADS, "local", id="one node leads, local", marks=pytest.mark.slow),
        pytest.param(EACH_SERVES, "size", id="each serves the other, size", marks=pytest.mark.slow),
        pytest.param(ONE_LEADS, "size", id="one node leads, size", marks=pytest.mark.slow),
        pytest.param(EACH_SERVES, "local", id="each serves the other, local"),
    ],
)
def test_virtual_workers_over_nodes(workers: list[list[str]], placement: str, tmp_path: Path) -> None:
    count = len({name for nodes in workers for name in nodes})
    with launched(tmp_path, workers, count, wsp={"placement": placement}) as nodes:
        said = results([nodes.start(rank) for rank in range(count)])
        assert [code for code, _, _ in said] == [0] * count, said
        assert "by way of this process" not in "".join(err for _, _, err in said)
        assert sorted("".join(out for _, out, _ in said).splitlines()) == ["ended 0", "ended 1"]
        found = torch.load(nodes.saved)
    assert_equal(found, alone(tmp_path, 2))


def paused(nodes: Nodes) -> tuple[subprocess.Popen[str], subprocess.Popen[str]]:
    """Node 0, which trains and waits for a line, and node 1, which serves."""
    desk, attic = nodes.start(0), nodes.start(1)
    assert desk.stdout is not None
    assert desk.stdout.readline() == "trains\n"
    return desk, attic


def sends(number: signal.Signals) -> Any:
    return lambda process: process.send_signal(number)


def fails(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("ends\n")
    process.stdin.flush()


def matched(told: str, said: str) -> str:
    """The line of what was ``said`` that begins with ``told``; empty if none does."""
    return next((line for line in said.splitlines() if line.startswith(f"hetpipe: {told}")), "")


@pytest.mark.parametrize(
    ("end", "codes", "text", "told"),
    [
        pytest.param(
            fails,
            [1, 1],
            "ArithmeticError: of the user's",
            "node 0's program has failed; see its output",
            id="an error",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            sends(signal.SIGINT),
            [1, 130],
            "",
            "node 0's program was interrupted",
            id="Ctrl-C",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            sends(signal.SIGTERM),
            [143, 143],
            "told to end after 4 steps",
            "node 0's program was told to end, by SIGTERM",
            id="SIGTERM",
        ),
        pytest.param(sends(signal.SIGKILL), [-9, 1], "", "node 0 was lost, or has ended without a word", id="SIGKILL"),
    ],
)
def test_a_node_that_serves_ends_as_node_0_does(
    end: Any, codes: list[int], text: str, told: str, tmp_path: Path
) -> None:
    """Not before, where all processes are told to end: it has weights that are still to be saved."""
    with launched(tmp_path, [["attic", "desk", "desk"]], 2, talks=True) as nodes:
        desk, attic = paused(nodes)
        for each in [attic.pid, *_hosts(attic)] if codes == [143, 143] else []:
            os.kill(each, signal.SIGTERM)
        end(desk)
        assert desk.stdin is not None
        (code, _, err), (its, _, others) = results([desk, attic])
        assert [code, its] == codes, err + others
        assert text in err
        assert "Traceback" not in others
        assert re.findall("^hetpipe: node 0.*", others, re.MULTILINE) == [matched(told, others)]


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        signal.SIGKILL,
    ],
)
def test_a_node_that_ends_takes_the_virtual_workers_that_it_serves(number: signal.Signals, tmp_path: Path) -> None:
    with launched(tmp_path, [["attic", "desk", "desk"]], 2, talks=True) as nodes:
        desk, attic = paused(nodes)
        (host,) = _hosts(attic)
        attic.send_signal(number)
        assert attic.wait(SECONDS) == {signal.SIGINT: 130}.get(number, -number)
        eventually(lambda: not runs(host), "a host has outlived its server")
        (code, _, err) = results([desk])[0]
        assert code == 1
        assert re.search(
            r"HostLost: the process of stage 0 \(host 127.0.0.1:\d+ on attic\) has closed the connection", err
        )


def _hosts(node: subprocess.Popen[str]) -> list[int]:
    """Processes that ``node`` has started."""
    return [
        int(child)
        for thread in Path(f"/proc/{node.pid}/task").iterdir()
        for child in (thread / "children").read_text().split()
        if not forks.is_server(int(child))
    ]


@pytest.mark.slow
def test_a_server_that_cannot_start_fails_all_nodes(tmp_path: Path) -> None:
    with launched(tmp_path, [["attic", "desk", "desk"]] * 2, 2) as nodes:
        with socket.create_server(("127.0.0.1", int(nodes.port) + 1)):
            (code, _, err), (its, _, _) = results([nodes.start(0), nodes.start(1)])
        assert (code, its) == (1, 1)
        assert "this node's server cannot listen on 127.0.0.1" in err or "cannot be had" in err


@pytest.mark.slow
def test_torchruns_processes_that_no_leader_needs_serve(tmp_path: Path) -> None:
    """Two processes on each node: the second of node 0 waits, as do those of node 1, of which the first one serves."""
    with launched(tmp_path, [["attic", "desk", "desk"]], 2) as nodes:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
        torchrun += ["--master-addr", "127.0.0.1", "--master-port", "MASTER_PORT", "--node-rank"]
        said = results([nodes.run([*torchrun, str(rank)]) for rank in range(2)])
        assert [(code, out) for code, out, _ in said] == [(0, "ended 0\n"), (0, "")], said
        found = torch.load(nodes.saved)
    assert_equal(found, alone(tmp_path, 1))


@pytest.mark.slow
def test_a_node_that_does_not_fit(tmp_path: Path) -> None:
    """Its program has another plan; node 0 says for whom it has waited."""
    with launched(tmp_path, [["attic", "desk", "desk"]], 2, wsp={"join_timeout": 20}) as nodes:
        (code, _, err), (its, _, others) = results([nodes.start(0), nodes.start(1, model="Other")])
        assert (code, its) == (1, 1)
        assert re.search(r"node 0 \(127.0.0.1:\d+\) does not let this process in: its plan is another one", others)
        missing = (
            r"attic \(NODE_RANK=1\) of the plan did not come within 20 s \(127.0.0.1 was refused: its plan is another"
        )
        assert re.search(missing, err)
