"""Whatever ends, a host or the process of Lightning's loop: nothing hangs, nothing is left, and one error says it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_hetpipe.hosts import orders
from lightning_hetpipe.hosts.remote_stage import HostLost, RemoteStage
from lightning_hetpipe.hosts.stage_host import Host, HostedStage
from lightning_hetpipe.hosts.wire import HostConnection, Wire
from lightning_hetpipe.pipeline.plain_code import RemoteFailure
from lightning_hetpipe.pipeline.stage_messages import InputGradients
from lightning_hetpipe.reporting.report import Meter
from lightning_hetpipe.server.transport.security import Security
from tests.hosts.elsewhere import NEAR, Hosts, elsewhere
from tests.hosts.host_threads import HostThread
from tests.server.transports import eventually
from tests.support import forks
from tests.support.models import CLASSES, WORDS, Task, sentences, vectors
from tests.support.trainers import quiet_trainer

ROOT = Path(__file__).parents[2]


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES))


class Ends(L.Callback):
    """Tells the host of the first stage to end after some minibatches."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.pid = 0

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            (self.pid,) = self.hosts.children()
            os.kill(self.pid, signal.SIGTERM)


def trained(address: str = NEAR, *callbacks: L.Callback) -> None:
    trainer = quiet_trainer(elsewhere(5, 2, 3, address, timeout=60), callbacks=[*callbacks])
    trainer.fit(Task(net()), vectors(40, 4))


def test_a_host_that_is_told_to_end_does_so_with_its_leader(hosts: Hosts) -> None:
    """As whoever tells all processes of a run to end tells hosts, too; their stage's weights are still to be saved."""
    ends = Ends(hosts)
    trained(hosts.address, ends)
    assert ends.pid


def test_a_host_that_is_stopped(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's thread asks it for gradients with the lock over user code, whose time the watchdog does not count."""
    original, stopped = RemoteStage.take, list[int]()

    def take(stage: RemoteStage, minibatch: int) -> Any:
        if minibatch == 4:
            stopped.extend(hosts.children())
            os.kill(stopped[0], signal.SIGSTOP)
            stage._watchdog.seconds = 3
        return original(stage, minibatch)

    monkeypatch.setattr(RemoteStage, "take", take)
    text = rf"the process of stage 0 \(host {hosts.address}\) has not answered for 3 s, and was ended"
    try:
        with pytest.raises(HostLost, match=text):
            trained(hosts.address)
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)  # it finds its connection ended
    assert len(stopped) == 1


def test_a_stage_says_what_its_host_was_given() -> None:
    """The watchdog asks this, if it ends a run whose host does not answer."""
    asked = {(4, "forward"): time.monotonic()}
    host = SimpleNamespace(name="host desk:7071")
    stage: Any = SimpleNamespace(index=0, _host=host, _lost=None, _lock=threading.Lock(), _asked=asked)
    assert RemoteStage.describe(stage).startswith("stage 0 (host desk:7071) was given the forward of minibatch 4 ")
    asked.clear()
    assert RemoteStage.describe(stage) == "stage 0 (host desk:7071) is idle"


def test_a_host_that_ends_before_it_is_set_up(host_threads: list[HostThread], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Host, "run", lambda _: False)
    with pytest.raises(HostLost, match=r"the process of stage 0 \(process \d+\) has ended"):
        trained()
    assert host_threads


def test_a_layer_that_fails_at_its_host(host_threads: list[HostThread]) -> None:
    batches = [*sentences(24, 4)]
    batches[4][0].fill_(WORDS)
    loader = DataLoader(cast(Dataset[Any], batches), batch_size=None)
    words = Task(nn.Sequential(nn.Embedding(WORDS, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, WORDS)))
    trainer = quiet_trainer(elsewhere(4, 2, 2))
    with pytest.raises(RemoteFailure, match="IndexError"):
        trainer.fit(words, loader)
    assert len(host_threads) == 1


SCRIPT = """
import sys
import lightning as L
from tests.hosts.elsewhere import elsewhere
from tests.hosts.test_faults import net
from tests.support.models import Task, vectors
from tests.support.trainers import quiet_trainer

class Says(L.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 2:
            print("trains", flush=True)
            if how != "go on":
                sys.stdin.readline()

how, address = sys.argv[1:]
trainer = quiet_trainer(elsewhere(5, 2, 3, address), callbacks=[Says()], max_epochs=-1)
trainer.fit(Task(net()), vectors(40, 4))
"""


@pytest.mark.parametrize(("sent", "how"), [(signal.SIGKILL, "hang"), (signal.SIGINT, "go on"), (signal.SIGINT, "hang")])
def test_a_host_ends_with_the_process_of_lightnings_loop(sent: signal.Signals, how: str, hosts: Hosts) -> None:
    with forks.Popen(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), how, hosts.address],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as leader:
        assert leader.stdout is not None
        assert leader.stdout.readline() == "trains\n"
        assert len(hosts.children()) == 1
        leader.send_signal(sent)
        _, errors = leader.communicate(timeout=60)
        eventually(lambda: not hosts.children(), "the host has not ended")
    assert leader.returncode != 0
    assert "could not end" not in errors


def test_a_host_that_is_given_no_message_ends(hosts: Hosts) -> None:
    wire = HostConnection(hosts.address, Security()).wire
    wire._connection.sendall(b"\0" * 7 + b"\x02{}")
    assert isinstance(wire.receive(), orders.Broken)
    with pytest.raises(EOFError):
        wire.receive()
    wire.close()


def test_the_wire_carries_messages_of_any_size_in_order() -> None:
    one, other = map(Wire, socket.socketpair())
    small, large = torch.arange(3.0), torch.randn(3, 1 << 16).t()
    one.send([1, small])
    one.send([2, small[:1]])
    assert other.receive()[0] == 1
    assert other.receive()[0] == 2
    with ThreadPoolExecutor(1) as sender:  # it is larger than a socket's room
        sending = sender.submit(one.send, [large, small, large])
        found = other.receive()
        sending.result(60)
    assert all(map(torch.equal, found, [large, small, large]))
    assert found[0].stride() == large.stride()
    one.end()
    with pytest.raises(EOFError):
        other.receive()
    one.close()
    other.close()


def test_time_counts_once_all_hosts_are_ready(host_threads: list[HostThread], monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of some seconds was reported with a fraction of its samples per second."""
    begun, at_start, begin, start = list[object](), list[int](), HostedStage.begin, Meter.start

    def begins(stage: HostedStage, *version: Any) -> None:
        begin(stage, *version)
        begun.append(version)

    def started(meter: Meter) -> None:
        at_start.append(len(begun))
        start(meter)

    monkeypatch.setattr(HostedStage, "begin", begins)
    monkeypatch.setattr(Meter, "start", started)
    quiet_trainer(elsewhere(5, 3, 3)).fit(Task(net()), vectors(12, 4))
    assert len(host_threads) == 2
    assert {*at_start} == {2}


def test_what_cannot_be_taken_ends_the_stage(host_threads: list[HostThread], monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a message for which this process has no memory: whoever waits is told at once."""
    original = Wire.receive

    def receive(wire: Wire) -> Any:
        found = original(wire)
        if isinstance(found, InputGradients) and found.minibatch == 3:
            raise RuntimeError("can't allocate memory")
        return found

    monkeypatch.setattr(Wire, "receive", receive)
    with pytest.raises(HostLost, match=r"stage 0 .* has sent what could not be taken \(RuntimeError: can't allocate"):
        trained()
    assert host_threads
