"""Hosts of stages that follow each other hand activations and gradients over to each other, to the same bits."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import torch
from torch import nn

from lightning_hetpipe.hosts import orders, peer_hosts
from lightning_hetpipe.hosts.peer_hosts import PeerHosts
from lightning_hetpipe.hosts.remote_stage import RemoteStage
from lightning_hetpipe.pipeline.dtypes import Autocast
from lightning_hetpipe.pipeline.engine import Engine
from lightning_hetpipe.pipeline.stage_messages import Backward, Forward, InputGradients, Output
from lightning_hetpipe.pipeline.values import Addends, Value
from lightning_hetpipe.rules.versions import Reading
from lightning_hetpipe.server.transport.security import Security
from tests.exact.running import assert_equal, expect, fit
from tests.hosts.elsewhere import Hosts
from tests.hosts.test_other_machines import apart, net
from tests.server.transports import certificates, eventually
from tests.support.models import ADAMW, CLASSES, Task, vectors

NODES = ("attic", "cellar", "loft", "desk")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[type]]:
    """Types that the leader gets for the tensors of each kind of result."""
    found: dict[str, set[type]] = {"forward": set(), "backward": set()}
    original = Engine._done

    def done(self: Engine, result: Any, event: Any) -> None:
        if isinstance(result, Output) and self.following[result.segment] is not None:
            found["forward"].update(map(type, result.value.tensors))
        if isinstance(result, InputGradients) and self.preceding[result.segment] is not None:
            gradients = [each for each in result.gradients if each is not None]
            found["backward"].update(type(part) for each in gradients for part in _parts(each))
        original(self, result, event)

    monkeypatch.setattr(Engine, "_done", done)
    return found


def _parts(gradient: Any) -> list[Any]:
    return [*gradient] if isinstance(gradient, Addends) else [gradient]


def deep() -> Task:
    torch.manual_seed(0)
    layers = [net()[0], nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 8)]
    return Task(nn.Sequential(*layers, nn.Tanh(), nn.Linear(8, CLASSES)), ADAMW)


def test_activations_of_hosts_do_not_come_to_the_leader(hosts: Hosts, seen: dict[str, set[type]]) -> None:
    expected = expect(deep(), vectors(40, 4), 3)
    assert_equal(expected, fit(deep(), vectors(40, 4), strategy=apart(hosts, *NODES)))
    assert seen["forward"] == {orders.HandedOver, torch.Tensor}  # the last host's are for the leader
    assert seen["backward"] == {orders.HandedOver, torch.Tensor}


def test_a_peer_that_cannot_be_reached(
    hosts: Hosts, seen: dict[str, set[type]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The leader hands tensors on to it, and says so."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    original = RemoteStage.listen
    monkeypatch.setattr(RemoteStage, "listen", lambda self, secret: port if self.index else original(self, secret))
    expected = expect(deep(), vectors(40, 4), 3)
    assert_equal(expected, fit(deep(), vectors(40, 4), strategy=apart(hosts, *NODES)))
    assert seen == {"forward": {torch.Tensor}, "backward": {orders.HandedOver, torch.Tensor}}
    said = caplog.text
    assert "what stage 0 gives to stage 1 goes by way of this process, as its host cannot reach the other one" in said
    assert "what stage 1 gives to stage 0 goes" not in said


SECRET = "secret"


def pair(security: Security, secret: str = SECRET) -> tuple[PeerHosts, PeerHosts, list[str | None]]:
    """Two peers, of which the first hands outputs of segment 0 and gradients of segment 3 over to the other."""
    giver, taker = PeerHosts("127.0.0.1", security), PeerHosts("127.0.0.1", security)
    address = f"127.0.0.1:{taker.listen(SECRET)}"
    return giver, taker, giver.connect(5, [(address, secret)], {0: 0}, {3: 0})


def output(minibatch: int, *tensors: torch.Tensor) -> Output:
    return Output(minibatch, 0, Value.of(tensors))


def forward(given: Output) -> Forward:
    return Forward(given.minibatch, 1, given.value, Reading(0), Autocast.current())


def awaiting(number: int) -> Forward:
    """A forward of what stage 5 hands over by that ``number``."""
    value = Value.of((torch.ones(1),))
    handed: Any = orders.HandedOver(5, number)
    return forward(Output(1, 0, Value((handed,), value.requires_grad, value.others, value.spec)))


def test_tensors_keep_their_looks_and_places() -> None:
    giver, taker, reasons = pair(Security())
    assert reasons == [None]
    values = torch.randn(4, 6).t(), torch.arange(3), torch.randn(2, dtype=torch.complex64)
    told = giver.hand_over(output(1, *values))
    assert isinstance(told, Output)
    assert told.value.tensors == tuple(orders.HandedOver(5, number) for number in range(3))
    found = taker.receive(forward(told), 30.0)
    assert isinstance(found, Forward)
    for one, other in zip(found.value.tensors, values, strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()
    back = InputGradients(1, 3, [values[0], None, Addends(values[1:])], {})
    handed = giver.hand_over(back)
    assert isinstance(handed, InputGradients)
    gradients = taker.receive(Backward(1, 2, 0, handed.gradients, {}, (), False), 30.0)
    assert isinstance(gradients, Backward)
    first, none, apart_ = gradients.gradients
    assert none is None
    assert isinstance(apart_, Addends)
    assert isinstance(first, torch.Tensor)
    assert all(map(torch.equal, (first, *apart_), values))
    giver.close()
    taker.close()


def test_other_segments_are_for_the_leader() -> None:
    giver, taker, _ = pair(Security())
    result = output(1, torch.ones(1))._replace(segment=2)
    assert giver.hand_over(result) is result
    assert taker.receive(forward(result), 0.0) == forward(result)
    giver.close()
    taker.close()


def test_what_nobody_wants_is_forgotten() -> None:
    giver, taker, _ = pair(Security())
    gone, kept = giver.hand_over(output(1, torch.ones(1))), giver.hand_over(output(2, torch.ones(1)))
    giver.forget(1)
    assert isinstance(gone, Output)
    assert isinstance(kept, Output)
    eventually(lambda: [*taker._arrived] == [(5, 1)], "what was handed over of minibatch 1 is still there")
    taker.receive(forward(kept), 30.0)
    with pytest.raises(RuntimeError, match="the host of stage 5 was to hand over a tensor, and has had it forgotten"):
        taker.receive(forward(gone), 30.0)  # at once, as those who dropped the minibatch wait for this
    coming = awaiting(2)
    with pytest.raises(RuntimeError, match="the host of stage 5 was to hand over a tensor, and has not sent it"):
        taker.receive(coming, 0.1)
    giver.close()
    with pytest.raises(RuntimeError, match="the host of stage 5 was to hand over a tensor, and has ended"):
        taker.receive(coming, 30.0)
    taker.close()


def test_a_peer_that_sends_nonsense_is_lost() -> None:
    giver, taker, _ = pair(Security())
    giver._links[0]._wire._connection.sendall(b"\xff" * 16)
    coming = awaiting(7)
    with pytest.raises(RuntimeError, match="the host of stage 5 was to hand over a tensor, and has ended"):
        taker.receive(coming, 30.0)
    giver.close()
    taker.close()


def test_connections_are_limited_also_before_they_show_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_hosts, "MOST", 1)
    taker = PeerHosts("127.0.0.1", Security())
    address = "127.0.0.1", taker.listen(SECRET)
    with socket.create_connection(address) as first, socket.create_connection(address):
        first.settimeout(30.0)
        assert not first.recv(1)
    door = taker._door
    assert door is not None
    eventually(lambda: not door._there, "there is no room again")
    taker.close()


def test_neighbours_show_what_they_have() -> None:
    folder = certificates()
    ca, certificate, key = (str(folder / f"{name}.pem") for name in ("ca", "certificate", "key"))
    security = Security(token="one", ca=ca, certificate=certificate, key=key)
    taker = PeerHosts("127.0.0.1", security)
    order: Any = (5, [(f"127.0.0.1:{taker.listen(SECRET)}", SECRET)], {0: 0}, {})
    giver, other = PeerHosts("127.0.0.1", security), PeerHosts("127.0.0.1", Security(token="one"))
    assert giver.connect(*order) == [None]
    told = giver.hand_over(output(1, torch.ones(1)))
    assert isinstance(told, Output)
    taker.receive(forward(told), 30.0)
    assert other.connect(*order) != [None]
    for each in (giver, taker, other):
        each.close()


def test_a_wrong_secret_is_not_let_in() -> None:
    giver, taker, (reason,) = pair(Security(), "guessed")
    assert reason == "its leader has named another secret"
    giver.close()
    taker.close()
