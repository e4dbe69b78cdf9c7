"""Ctrl-C while this process waits for a host, or sends to it: what comes later is taken for nothing else."""

from __future__ import annotations

import socket
from typing import Any, cast

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_hetpipe.errors import PipelineStalled
from lightning_hetpipe.hosts.orders import Do
from lightning_hetpipe.hosts.remote_stage import RemoteStage
from lightning_hetpipe.hosts.remote_tensor import local
from lightning_hetpipe.hosts.wire import SMALL, Wire
from lightning_hetpipe.pipeline.threads import Watchdog
from tests.hosts.elsewhere import elsewhere
from tests.hosts.host_threads import HostThread
from tests.hosts.test_other_machines import net, task
from tests.support.models import vectors
from tests.support.trainers import quiet_trainer


def values(module: nn.Module) -> dict[str, Tensor]:
    return {name: local(each).detach().clone() for name, each in module.named_parameters()}


class WaitsInVain(L.Callback):
    """Interrupts a wait for a value; notes weights before, and as callbacks find them when the run ends for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
        self._monkeypatch = monkeypatch
        self._error = error
        self.before: dict[str, Tensor] = {}
        self.after: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_step != 4:
            return
        self.before = values(pl_module.net)

        def wait(*_: Any) -> None:
            raise self._error

        with self._monkeypatch.context() as patch:
            patch.setattr(Watchdog, "wait", wait)
            float(pl_module.net[0].bias.norm())

    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        self.after = values(pl_module.net)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ArithmeticError("of a signal's handler")])
def test_an_answer_that_nobody_waits_for_any_more_is_not_that_to_the_next_question(
    error: BaseException, host_threads: list[HostThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, learner = WaitsInVain(monkeypatch, error), task()
    with pytest.raises((SystemExit, type(error))):
        quiet_trainer(elsewhere(len(net()), 3, 3, timeout=20), callbacks=[waits]).fit(learner, vectors(40, 4))
    assert host_threads
    for found in (waits.after, dict(learner.net.named_parameters())):
        assert found.keys() == waits.before.keys()
        assert all(torch.equal(found[name], each) for name, each in waits.before.items())
    assert all(type(each) is nn.Parameter for each in learner.parameters())


class Interrupts:
    """The socket ``raw``, the second part sent to which Ctrl-C interrupts."""

    def __init__(self, raw: socket.socket) -> None:
        self._raw = raw
        self._parts = 0

    def sendall(self, data: Any) -> None:
        self._parts += 1
        if self._parts == 2:
            raise KeyboardInterrupt
        self._raw.sendall(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)


def test_nothing_follows_a_message_that_was_sent_in_part() -> None:
    """Nobody could read what follows, as it would be taken for the rest."""
    ours, its = socket.socketpair()
    its.settimeout(20.0)
    here, there = Wire(cast(Any, Interrupts(ours))), Wire(its)
    with pytest.raises(KeyboardInterrupt):
        here.send(Do("put", [0, torch.zeros(SMALL)]))
    with pytest.raises(OSError, match=r".*"):
        here.send(Do("put", [1, torch.zeros(())]))
    with pytest.raises(EOFError):
        there.receive()
    here.close()
    there.close()


def test_weights_of_other_stages_come_home_where_one_stalls(
    host_threads: list[HostThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage that cannot close in time keeps no other one from it."""
    original = RemoteStage._await
    closing: list[int] = []

    def awaits(stage: RemoteStage, result: Any) -> Any:
        found = original(stage, result)
        if stage.index == 0 and closing:
            raise PipelineStalled("the pipeline has stalled before")
        return found

    class Ends(L.Callback):
        def on_train_end(self, *_: Any) -> None:
            closing.append(1)

    monkeypatch.setattr(RemoteStage, "_await", awaits)
    learner = task()
    strategy = elsewhere(len(net()), 3, 3, timeout=20)
    quiet_trainer(strategy, callbacks=[Ends()]).fit(learner, vectors(40, 4))
    assert len(host_threads) == 2
    assert all(type(each) is nn.Parameter for each in learner.net[2:].parameters())
