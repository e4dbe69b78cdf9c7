"""Virtual workers over several machines: each machine pushes and pulls the weights of its own stages."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hosts.elsewhere import serving
from tests.server.transports import eventually
from tests.support import forks
from tests.support.equality import assert_same
from tests.support.namespaces import Machine, Unavailable, finished, network
from tests.wsp.launch import ROOT, SECONDS

PROGRAM = """
import json
import os
import sys

import torch
from torch import nn

from lightning_hetpipe import WSPCallback
from tests.hosts.test_other_machines import plan
from tests.support.models import ADAMW, CLASSES, Task, vectors
from tests.support.strategies import stashing
from tests.support.trainers import quiet_trainer

saved, nodes, workers, wsp, settings = sys.argv[1], *map(json.loads, sys.argv[2:])
torch.manual_seed(0)
narrow = [6, *[8] * (len(nodes) - 1), CLASSES]
pairs = [(nn.Linear(before, 8192), nn.Linear(8192, after)) for before, after in zip(narrow, narrow[1:])]
num_nodes = settings.pop("num_nodes", 1)
learner = Task(nn.Sequential(*(each for pair in pairs for each in pair)), ADAMW)
wsp = WSPCallback(placement="local", security={"insecure": True}, aggregate="mean", **wsp)
strategy = stashing(plan=plan(*nodes, workers=workers), wsp=wsp, **settings)
trainer = quiet_trainer(strategy, num_nodes=num_nodes)
trainer.fit(learner, vectors(4 * 30 * workers, 4))
if trainer.is_global_zero:
    torch.save(learner.state_dict(), saved)
"""

STAGE = 4 * (6 * 8192 + 8192 + 8192 * 8 + 8)
"""Bytes of the first stage's weights; others have more."""

WAVES = 10
"""Number of waves, each of three minibatches."""


def program(saved: Path, nodes: list[str], workers: int, wsp: dict[str, Any], **settings: Any) -> list[Any]:
    return [sys.executable, "-c", PROGRAM, saved, *map(json.dumps, (nodes, workers, wsp, settings))]


def environment() -> dict[str, Any]:
    return {"PYTHONPATH": ROOT, "HETPIPE_TOKEN": "one", "OMP_NUM_THREADS": 1}


def done(processes: list[subprocess.Popen[str]]) -> str:
    """Standard error of the first one, once all have ended well."""
    said = finished(processes, SECONDS)
    assert [code for code, _, _ in said] == [0] * len(said), said
    return said[0][2]


@cache
def at_home(nodes: int) -> dict[str, Any]:
    """Weights that as many virtual workers of as many stages have in the end, all on one machine."""
    with tempfile.TemporaryDirectory() as folder:
        command = program(saved := Path(folder, "here.pt"), ["desk"] * nodes, nodes, {})
        own = {**os.environ, **{name: str(value) for name, value in environment().items()}}
        said = forks.run(*map(str, command[1:]), environment=own, starting=forks.LAUNCHES)
        assert said.returncode == 0, said.stderr
        return dict(torch.load(saved))


def ed_local(machines: list[Machine], folder: Path) -> None:
    """Each virtual worker has a stage on each machine, whose server has the weights of these."""
    desk, *others = machines
    names = [f"node{number}" for number in range(len(machines))]
    before, there = others[0].transferred(), folder / "there.pt"
    command = program(there, names, len(names), {}, num_nodes=len(names))
    told = {**environment(), "MASTER_ADDR": desk.address, "MASTER_PORT": 29500}
    said = done([each.start(command, folder, {**told, "NODE_RANK": rank}) for rank, each in enumerate(machines)])
    assert "by way of this process" not in said
    assert_same(at_home(len(names)), torch.load(there))
    # Weights go there at the start, and come home at the end with the states of Adam; each wave would carry two more.
    assert STAGE < (others[0].transferred() - before) / len(machines) < 14 * STAGE < 2 * WAVES * STAGE


@pytest.mark.parametrize("nodes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_weights_of_ed_local_cross_no_network(nodes: int, tmp_path: Path) -> None:
    try:
        with network(nodes) as machines:
            ed_local(machines, tmp_path)
    except Unavailable as why:
        pytest.skip(str(why))


PAUSES = """
import sys
from dataclasses import replace

import lightning as L
import torch

from lightning_hetpipe import WSPCallback
from tests.hosts.test_other_machines import plan, task
from tests.support.models import vectors
from tests.support.strategies import stashing
from tests.support.trainers import quiet_trainer

saved, pauses, *addresses = sys.argv[1:]
hosts, servers = dict(zip(("attic", "cellar"), addresses)), addresses[2:]
made = plan("attic" if hosts else "desk", "desk", "desk", workers=2)
if hosts:
    one, two = made.virtual_workers
    first = replace(two.stages[0], node="cellar")
    made = replace(made, virtual_workers=(one, replace(two, stages=(first, *two.stages[1:]))))


class Pause(L.Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_rank == int(pauses) and trainer.global_step == 6:
            print("paused", flush=True)
            sys.stdin.readline()


wsp = WSPCallback(aggregate="mean", lease=3, servers=servers or None)
strategy = stashing(plan=made, stage_hosts=hosts or None, wsp=wsp)
learner = task()
trainer = quiet_trainer(strategy, callbacks=[Pause()])
trainer.fit(learner, vectors(80, 4))
print("trained", trainer.global_rank, trainer.global_step, flush=True)
if trainer.is_global_zero:
    torch.save(learner.state_dict(), saved)
"""


def paused(saved: Path, pauses: int, *addresses: str) -> subprocess.Popen[str]:
    """Two virtual workers, of which one waits after six steps for a line.

    They have stages at hosts of their own, if there are addresses of these, and use servers at further addresses.
    """
    process = forks.Popen(
        [sys.executable, "-c", PAUSES, saved, str(pauses), *addresses],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HETPIPE_TOKEN": "one"},
        starting=forks.LAUNCHES,
    )
    assert process.stdout is not None
    if process.stdout.readline() != "paused\n":
        process.kill()
        pytest.fail(process.communicate()[1])
    return process


def test_a_host_that_is_killed_takes_its_virtual_worker_alone(tmp_path: Path) -> None:
    """The others go on at once, and one line says why."""
    known = {"HETPIPE_TOKEN": "one"}
    with serving(known) as attic, serving(known) as cellar:
        process = paused(tmp_path / "saved.pt", 1, attic.address, cellar.address)
        (child,) = cellar.children()
        os.kill(child, signal.SIGKILL)
        out, err = process.communicate("go on", timeout=SECONDS)
        assert (process.returncode, out) == (1, "trained 0 10\n"), err
        why = f"unable to go on, as the process of stage 0 (host {cellar.address} on cellar) has closed the connection"
        assert re.search(rf"virtual worker 1 .*is lost.*: it was {re.escape(why)}.*; the others go on without it", err)
        assert f"this run went on without virtual worker 1, which was {why}" in err
        assert "Traceback" not in err
        eventually(lambda: not attic.children() and not cellar.children(), "a host has not ended")


@contextmanager
def server(address: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A running hetpipe-server, and its address."""
    process = forks.Popen(
        [sys.executable, "-m", "lightning_hetpipe.cli.hetpipe_server", f"address={address}", "service.lease=3"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HETPIPE_TOKEN": "one"},
        loaded="host",
    )
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().split()[2].rstrip(";")
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("lost", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_server_that_is_lost_is_rebuilt_from_what_hosts_hold(lost: int, tmp_path: Path) -> None:
    """The coordinator, or another one; each has parameters of stages here and there."""
    known = {"HETPIPE_TOKEN": "one"}
    here, there = tmp_path / "here.pt", tmp_path / "there.pt"
    with serving(known) as attic, serving(known) as cellar, ExitStack() as undo:
        process = paused(here, 0)  # all on one machine
        _, err = process.communicate("go on", timeout=SECONDS)
        assert process.returncode == 0, err
        servers = [undo.enter_context(server("127.0.0.1:0")) for _ in range(2)]
        addresses = [address for _, address in servers]
        process = paused(there, 0, attic.address, cellar.address, *addresses)
        servers[lost][0].kill()
        servers[lost][0].wait()
        undo.enter_context(server(addresses[lost]))
        _, err = process.communicate("go on", timeout=SECONDS)
        assert process.returncode == 0, err
    assert_same(torch.load(here), torch.load(there))


@pytest.mark.parametrize("token", ["one", None])
def test_a_host_calls_servers_that_let_it_in(token: str | None, tmp_path: Path) -> None:
    """Else its weights go by way of the process of Lightning's loop; the bits are the same."""
    known = {"HETPIPE_TOKEN": token} if token else {}
    own = {name: value for name, value in os.environ.items() if not name.startswith("HETPIPE")}
    with serving(known) as hosts:
        command = program(
            saved := tmp_path / "saved.pt", ["attic", "desk"], 2, {}, stage_hosts={"attic": hosts.address}
        )
        own |= {"PYTHONPATH": str(ROOT), **known}
        said = forks.run(*map(str, command[1:]), environment=own, starting=forks.LAUNCHES)
    assert said.returncode == 0, said.stderr
    by_way = re.search(
        r"updates of stage 0 go to the servers by way of this process, as its host cannot call them"
        r" itself: the server at 127.0.0.1:\d+ refused the call: the token is",
        said.stderr,
    )
    assert (by_way is None) is (token is not None), said.stderr
    assert_same(at_home(2), torch.load(saved))
