"""Whatever ends, a host or the process of Lightning's loop: nothing hangs, nothing is left, and one error says it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe.errors import PipelineStalled, SettingError
from lightning_hetpipe.hosts import orders
from lightning_hetpipe.hosts.host_process import HostProcess
from lightning_hetpipe.hosts.remote_stage import HostLost, RemoteStage
from lightning_hetpipe.hosts.stage_host import Host
from lightning_hetpipe.hosts.wire import Wire
from lightning_hetpipe.pipeline.message_code import RemoteFailure
from lightning_hetpipe.run.extensions.telemetry import Telemetry
from tests.exact.pipelines import even
from tests.hosts.host_threads import HostThread
from tests.server.transports import eventually
from tests.support.models import CLASSES, WORDS, Task, sentences, vectors
from tests.support.trainers import quiet_trainer

ROOT = Path(__file__).parents[2]


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES))


class Kills(L.Callback):
    """Kills the host of the first stage after some minibatches."""

    def __init__(self, sent: signal.Signals, after: int = 3) -> None:
        self.sent, self.after = sent, after
        self.pids: list[int] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        hosts = [stage for stage in strategy._run.pipeline.stages if isinstance(stage, RemoteStage)]
        self.pids = [stage._host.pid for stage in hosts if isinstance(stage._host, HostProcess)]
        if trainer.global_step == self.after:
            os.kill(self.pids[0], self.sent)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def trained(callbacks: Sequence[L.Callback], layers: int = 5, timeout: float = 60) -> None:
    trainer = quiet_trainer(even(layers, 2, 3, stage_hosts="processes", timeout=timeout), callbacks=[*callbacks])
    trainer.fit(Task(net()), vectors(40, 4))


def test_a_host_is_killed() -> None:
    kills = Kills(signal.SIGKILL)
    with pytest.raises(HostLost, match=r"the process of stage 0 \(process \d+\) was killed by SIGKILL"):
        trained([kills])
    assert kills.pids
    assert all(map(gone, kills.pids))


def test_a_host_that_is_told_to_end_does_so_with_its_leader() -> None:
    """As whoever tells all processes of a run to end tells hosts, too; their stage's weights are still to be saved."""
    tells = Kills(signal.SIGTERM)
    trained([tells])
    assert tells.pids
    assert all(map(gone, tells.pids))


@pytest.mark.parametrize(
    ("owned", "error", "text"),
    [
        (True, HostLost, r"the process of stage 0 \(process \d+\) has not answered for 8 s, and was ended"),
        (False, PipelineStalled, r"stage 0 \(process \d+\) was given the \w+ of minibatch \d+"),
    ],
)
def test_a_host_that_is_stopped(
    owned: bool, error: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning's thread asks the owner of a stage for gradients with the lock over user code, whose time the
    watchdog does not count; those of others come unasked."""
    monkeypatch.setattr("lightning_hetpipe.hosts.stages_apart.owns", lambda device: owned)
    kills = Kills(signal.SIGSTOP)
    with pytest.raises(error, match=text):
        trained([kills], timeout=8)
    assert kills.pids
    assert all(map(gone, kills.pids))


def test_a_host_that_ends_before_it_is_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_hetpipe.hosts.host_process.CHILD", "import sys; sys.exit(7)")
    with pytest.raises(HostLost, match=r"the process of stage 0 \(process \d+\) has ended with exit code 7"):
        trained([])


def test_a_layer_that_fails_at_its_host(host_threads: list[HostThread]) -> None:
    batches = [*sentences(24, 4)]
    batches[4][0].fill_(WORDS)
    loader = DataLoader(cast(Dataset[Any], batches), batch_size=None)
    words = Task(nn.Sequential(nn.Embedding(WORDS, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, WORDS)))
    trainer = quiet_trainer(even(4, 2, 2, stage_hosts="processes"))
    with pytest.raises(RemoteFailure, match="IndexError"):
        trainer.fit(words, loader)
    assert len(host_threads) == 1


SCRIPT = """
import os
import sys
import time
import lightning as L
import torch
from tests.exact.pipelines import even
from tests.hosts.test_faults import net
from tests.support.models import Task, vectors
from tests.support.trainers import quiet_trainer

class Says(L.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 2:
            host = trainer.strategy._run.pipeline.stages[0]._host
            fork = os.fork() if sys.argv[1] == "fork" else None  # it has this end of the wire, too
            if fork == 0:
                os.closerange(0, 3)
                time.sleep(120)
                os._exit(0)
            print(host.pid, fork, flush=True)
            if sys.argv[1] != "go on":
                sys.stdin.readline()

trainer = quiet_trainer(even(5, 2, 3, stage_hosts="processes"), callbacks=[Says()], max_epochs=-1)
trainer.fit(Task(net()), vectors(40, 4))
"""


@pytest.mark.parametrize(
    ("sent", "how"),
    [(signal.SIGKILL, "hang"), (signal.SIGKILL, "fork"), (signal.SIGINT, "go on"), (signal.SIGINT, "hang")],
)
def test_a_host_ends_with_the_process_of_lightnings_loop(sent: signal.Signals, how: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), how],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as leader:
        assert leader.stdout is not None
        first, fork = leader.stdout.readline().split()
        pid = int(first)
        assert not gone(pid)
        leader.send_signal(sent)
        _, errors = leader.communicate(timeout=60)
        eventually(lambda: gone(pid), "the host has not ended")
        if fork != "None":
            os.kill(int(fork), signal.SIGKILL)
    assert leader.returncode != 0
    assert "could not end" not in errors


def test_a_host_that_is_given_no_message_ends() -> None:
    process = HostProcess()
    process.wire._connection.sendall(b"\0" * 15 + b"\x02{}")
    process.join(60)
    assert process.told() == "has ended with exit code 1"
    process.wire.close()


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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"stage_hosts": "process"},
            r"stage_hosts='process' must be 'threads', 'processes', or a mapping .*; did you mean 'processes'",
        ),
        ({"stage_hosts": "processes", "compile": "eager"}, "leave compile out, or stage_hosts"),
        ({"stage_hosts": "processes", "timeline": True}, "leave timeline out, or stage_hosts"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        HetPipeStrategy(**settings)


def test_one_stage_has_no_process_and_says_so() -> None:
    trainer = quiet_trainer(even(5, 1, 2, stage_hosts="processes"))
    with pytest.warns(UserWarning, match="stage_hosts='processes' changes nothing: there is one stage"):
        trainer.fit(Task(net()), vectors(12, 4))


def test_few_stages_or_minibatches_are_what_to_raise() -> None:
    cases: list[tuple[int, Any, str]] = [
        (1, "auto", "stages"),
        (1, 1, "stages and in_flight"),
        (2, 1, "in_flight"),
    ]
    for stages, in_flight, few in cases:
        trainer = quiet_trainer(HetPipeStrategy(stages=stages, in_flight=in_flight, stage_hosts="processes"))
        with pytest.warns(UserWarning, match=rf"changes nothing: .*; set {few} to more, or leave stage_hosts out"):
            trainer.fit(Task(net()), vectors(12, 4))


def test_time_counts_once_all_hosts_are_ready(host_threads: list[HostThread], monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of some seconds was reported with a fraction of its samples per second."""
    begun, at_start, serve, start = list[object](), list[int](), Host._serve, Telemetry.start

    def served(host: Host, stage: Any, message: Any) -> None:
        serve(host, stage, message)
        begun.extend([message] if isinstance(message, orders.Begin) else [])

    def started(telemetry: Telemetry) -> None:
        at_start.append(len(begun))
        start(telemetry)

    monkeypatch.setattr(Host, "_serve", served)
    monkeypatch.setattr(Telemetry, "start", started)
    quiet_trainer(even(5, 3, 3, stage_hosts="processes")).fit(Task(net()), vectors(12, 4))
    assert len(host_threads) == 2
    assert at_start == [2]


def test_one_minibatch_in_flight_has_no_process_and_says_so() -> None:
    trainer = quiet_trainer(HetPipeStrategy(stages=2, in_flight=1, stage_hosts="processes"))
    with pytest.warns(UserWarning, match="stage_hosts='processes' changes nothing: one minibatch is in flight"):
        trainer.fit(Task(net()), vectors(12, 4))


def test_a_stage_without_a_graph_stays_and_says_why(host_threads: list[HostThread]) -> None:
    class Two(Task):
        def __init__(self) -> None:
            super().__init__(nn.Sequential(nn.Linear(8, CLASSES)))
            self.first = nn.Linear(6, 8)

        def compute(self, batch: Any) -> dict[str, torch.Tensor]:
            return super().compute((self.first(batch[0]).tanh(), batch[1]))

    trainer = quiet_trainer(even(2, 2, 2, stage_hosts="processes"))
    with pytest.warns(
        UserWarning, match=r"stage 0 stays in this process, as layer 'first' is a .*, which has no graph"
    ):
        trainer.fit(Two(), vectors(12, 4))
    assert not host_threads


def test_what_cannot_be_taken_ends_the_stage(host_threads: list[HostThread], monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a message for which this process has no memory: whoever waits is told at once."""
    original = Wire.receive

    def receive(wire: Wire) -> Any:
        found = original(wire)
        if isinstance(found, orders.Shown) and found.minibatch == 3:
            raise RuntimeError("can't allocate memory")
        return found

    monkeypatch.setattr(Wire, "receive", receive)
    with pytest.raises(HostLost, match=r"stage 0 .* has sent what could not be taken \(RuntimeError: can't allocate"):
        trained([])
    assert host_threads
