"""Work with hosts that ends half-way: nothing stays behind, and nothing comes later where it would do harm."""

from __future__ import annotations

import queue
import socket
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch import nn

from lightning_hetpipe.hosts import orders, server_calls
from lightning_hetpipe.hosts.host_memory import HostMemory
from lightning_hetpipe.hosts.remote_stage import HostLost, RemoteStage
from lightning_hetpipe.hosts.remote_tensor import RemoteTensor
from lightning_hetpipe.hosts.server_calls import HostHolder, ServerCalls
from lightning_hetpipe.hosts.stage_host import Host
from lightning_hetpipe.hosts.wire import Wire
from lightning_hetpipe.server.transport.interface import Unreachable
from lightning_hetpipe.server.transport.security import Security
from tests.hosts.elsewhere import elsewhere
from tests.hosts.host_threads import HostThread
from tests.hosts.test_other_machines import task
from tests.support.models import vectors
from tests.support.trainers import quiet_trainer


@pytest.mark.parametrize("block", [None, orders.Held(3)])
def test_a_host_that_answers_no_call_is_ended_where_it_could_still_write(
    block: orders.Held | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call was made again, into the same memory, while the first one could still come to its end."""
    monkeypatch.setattr(server_calls, "GRACE", 0.0)
    ended = list[float]()

    def end(seconds: float) -> Exception:
        ended.append(seconds)
        return HostLost("it is lost", "it is lost")

    holder = HostHolder(cast(HostMemory, SimpleNamespace(begin=lambda *_: Future())), end)
    with pytest.raises(Unreachable if block is None else HostLost):
        holder._called("10.0.0.1:7070", "shard", 0.01, into=block)
    assert ended == ([] if block is None else [0.01])


def test_a_call_that_begins_as_its_host_ends_reaches_nobody() -> None:
    calls = ServerCalls(Security())
    calls.close()
    answer = calls._made("127.0.0.1:1", "status", 1.0, "", None, None)
    assert answer.silent == "this host ends"
    assert not calls._channels


def test_what_is_forgotten_is_so_behind_all_that_was_handed_over() -> None:
    """A peer kept a tensor for ever, which came after the word that nobody wants it."""
    done = list[str]()

    class Peers:
        def hand_over(self, result: Any) -> Any:
            done.append("handed over")
            return result

        def forget(self, minibatch: int) -> None:
            done.append(f"forgot {minibatch}")

    own, its = socket.socketpair()
    with own, its:
        host = Host(Wire(own), Security(), "127.0.0.1")
        host._peers = cast(Any, Peers())
        assert isinstance(host._answers, queue.SimpleQueue)
        for message in (orders.Brought(0, None), orders.Forgotten(7), None):
            host._answers.put(message)
        host._send()
    assert done == ["handed over", "forgot 7"]


def test_weights_come_home_from_a_stage_that_could_not_be_made(
    host_threads: list[HostThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    away = list[bool]()

    def fails(stage: RemoteStage, layers: nn.ModuleList) -> None:
        away.extend(isinstance(each, RemoteTensor) for each in layers.parameters())
        raise ArithmeticError("of a test")

    monkeypatch.setattr(RemoteStage, "_new_stash", fails)
    learner, before = task(), task().state_dict()
    with pytest.raises(ArithmeticError, match="of a test"):
        quiet_trainer(elsewhere(5, 2, 2)).fit(learner, vectors(12, 4))
    assert away
    assert all(away)
    found = learner.state_dict()
    assert not any(isinstance(each, RemoteTensor) for each in learner.parameters())
    assert found.keys() == before.keys()
    assert all(each.isfinite().all() for each in found.values())
    assert len(host_threads) == 1
