"""A virtual worker over machines: the same bits; weights stay where they are, and activations pass no third machine."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.server.transports import eventually
from tests.support.namespaces import Machine, Unavailable, finished, network
from tests.wsp.launch import ROOT, SECONDS

PROGRAM = """
import sys

import torch
from torch import nn

from lightning_hetpipe import WSPCallback
from tests.hosts.test_other_machines import plan
from tests.support.models import ADAMW, CLASSES, Task, vectors
from tests.support.strategies import stashing
from tests.support.trainers import quiet_trainer

torch.manual_seed(0)
wide = [nn.Linear(6, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 8), nn.Linear(8, CLASSES)]
learner, (saved, *address) = Task(nn.Sequential(*wide), ADAMW), sys.argv[1:]
wsp = WSPCallback(security={"insecure": True})
where = {"stage_hosts": {"attic": address[0]}, "wsp": wsp} if address else {}
strategy = stashing(plan=plan(*(["attic"] if address else ["desk"]) * 2, "desk"), **where)
quiet_trainer(strategy, gradient_clip_val=0.5).fit(learner, vectors(256, 4))
torch.save(learner.state_dict(), saved)
"""

WEIGHTS = 4 * (6 * 512 + 512 + 512 * 512 + 512)
"""Bytes of those that are at the host."""

MINIBATCHES = 64


def test_weights_stay_where_their_stage_is(machines: list[Machine], tmp_path: Path) -> None:
    desk, attic = machines
    environment = {"PYTHONPATH": ROOT, "HETPIPE_TOKEN": "one"}
    python = [sys.executable, "-c", PROGRAM]
    host = attic.start(
        [
            python[0],
            "-m",
            "tests.hosts.plain_host",
            f"address={attic.address}:7071",
            "security.insecure=true",
        ],
        tmp_path,
        environment,
    )
    assert host.stdout is not None
    assert host.stdout.readline() == f"hetpipe-host: serving {attic.address}:7071; Ctrl-C ends it.\n"
    before = desk.transferred()
    runs = [
        desk.start([*python, tmp_path / f"{number}.pt", *where], tmp_path, environment)
        for number, where in enumerate(([], [f"{attic.address}:7071"]))
    ]
    for code, _, err in finished(runs, SECONDS):
        assert code == 0, err
    alone, over = (torch.load(tmp_path / f"{number}.pt") for number in range(2))
    assert all(torch.equal(alone[name], over[name]) for name in alone)
    # There at the start, and home at the end with its gradient and the two moments of Adam.
    assert WEIGHTS < desk.transferred() - before < 12 * WEIGHTS < MINIBATCHES * WEIGHTS
    os.killpg(host.pid, signal.SIGINT)
    assert [code for code, _, _ in finished([host], SECONDS)] == [130]
    assert attic.programs() == []


WIDE = """
import torch
from torch import nn

from lightning_hetpipe import WSPCallback
from tests.hosts.test_other_machines import plan
from tests.support.models import ADAMW, CLASSES, Task, vectors
from tests.support.strategies import stashing
from tests.support.trainers import quiet_trainer

torch.manual_seed(0)
layers = [nn.Linear(6, 4096), nn.Tanh(), nn.Linear(4096, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, CLASSES)]
wsp = WSPCallback(security={"insecure": True})
strategy = stashing(plan=plan("attic", "cellar", "desk"), wsp=wsp)
quiet_trainer(strategy, num_nodes=3).fit(Task(nn.Sequential(*layers), ADAMW), vectors(64 * 20, 64))
"""

BETWEEN = 2 * 19 * 64 * 4096 * 4
"""Bytes of activations and gradients between the first two stages; the first minibatch is the leader's alone."""


def test_activations_go_from_host_to_host(tmp_path: Path) -> None:
    try:
        with network(3) as machines:
            told = {
                "PYTHONPATH": ROOT,
                "HETPIPE_TOKEN": "one",
                "MASTER_ADDR": machines[0].address,
                "MASTER_PORT": 29500,
            }
            runs = [
                each.start([sys.executable, "-c", WIDE], tmp_path, {**told, "NODE_RANK": rank})
                for rank, each in enumerate(machines)
            ]
            for code, _, err in finished(runs, SECONDS):
                assert code == 0, err
            desk, attic, cellar = (each.transferred() for each in machines)
    except Unavailable as why:
        pytest.skip(str(why))
    assert min(attic, cellar) > BETWEEN
    assert desk < BETWEEN / 4


CUT = """
import os
import sys

import lightning as L

from lightning_hetpipe import WSPCallback
from lightning_hetpipe.hosts import secured_socket
from tests.hosts.test_other_machines import plan, task
from tests.support.models import vectors
from tests.support.strategies import stashing
from tests.support.trainers import quiet_trainer

secured_socket.UNREACHABLE = 6.0


class Pause(L.Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 4:
            print("trains", flush=True)
            sys.stdin.readline()


wsp = WSPCallback(security={"insecure": True})
strategy = stashing(plan=plan("attic", "desk", "desk"), wsp=wsp)
quiet_trainer(strategy, num_nodes=2, callbacks=[Pause()]).fit(task(), vectors(400, 4))
"""


def test_a_machine_that_cannot_be_reached_any_more(machines: list[Machine], tmp_path: Path) -> None:
    """Both ends notice, though messages are under way, which are sent again for a quarter of an hour by default."""
    told = {"PYTHONPATH": ROOT, "HETPIPE_TOKEN": "one", "MASTER_ADDR": machines[0].address, "MASTER_PORT": 29500}
    desk, attic = (
        each.start([sys.executable, "-c", CUT], tmp_path, {**told, "NODE_RANK": rank}, stdin=subprocess.PIPE)
        for rank, each in enumerate(machines)
    )
    assert desk.stdout is not None
    assert desk.stdout.readline() == "trains\n"
    machines[1].cut()
    ((code, _, err), (its, _, others)) = finished([desk, attic], SECONDS)
    assert (code, its) == (1, 1), err + others
    assert re.search(r"has closed the connection, or \S+.* cannot be reached any more; see the output there", err), err
    assert "node 0 was lost, or has ended without a word" in others
    eventually(lambda: machines[1].programs() == [], "a host has not ended")
