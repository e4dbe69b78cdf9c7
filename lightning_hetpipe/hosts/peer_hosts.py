"""Hosts of consecutive stages, between which activations and gradients travel without passing the leader.

The leader says which segments follow each other. The output of a segment goes to the host of the next segment. The
leader gets numbers in its place (:class:`~lightning_hetpipe.hosts.orders.HandedOver`), and hands them on like tensors.
So the order and the meaning of messages stay unchanged.
"""

from __future__ import annotations

import hmac
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

from torch import Tensor

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.hosts import orders
from lightning_hetpipe.hosts.secured_socket import Door, Refused, admit, connect, listen
from lightning_hetpipe.hosts.wire import Wire
from lightning_hetpipe.pipeline.stage_messages import Backward, Forward, InputGradients, Message, Output, Result
from lightning_hetpipe.pipeline.values import Addends, Value
from lightning_hetpipe.server.transport.security import Security

REACHING = 10.0
"""Seconds in which a peer must answer."""

MOST = 64
"""Largest number of a host's connections from peers and unknown callers. Further connections are closed."""


class PeerHosts:
    """Hosts of other stages of one virtual worker, as seen by one of its hosts, which listens at ``host`` for them.

    Both sides show the certificates and the token of ``security``.
    """

    def __init__(self, host: str, security: Security) -> None:
        self._host, self._security = host, security
        self._stage = 0
        self._links: list[_Link] = []
        self._forwards: dict[int, _Link] = {}
        self._backwards: dict[int, _Link] = {}
        self._numbers = count()
        self._door: Door | None = None
        self._wires: list[Wire] = []
        self._changed = threading.Condition()
        self._arrived: dict[tuple[int, int], tuple[int, Tensor]] = {}
        self._awaited: tuple[int, int] | None = None
        self._newest: dict[int, int] = {}  # by stage, the number of what it has handed over last
        self._lost: set[int] = set()

    def listen(self, secret: str) -> int:
        """Let in peers that show ``secret``, and return the port."""
        listener = listen(self._host, 0)
        port: int = listener.getsockname()[1]
        self._door = Door(listener, lambda raw, _: self._take(raw, secret), MOST, "hetpipe-peer-hosts")
        self._door.open()
        return port

    def connect(
        self, stage: int, hosts: Sequence[tuple[str, str]], forwards: Mapping[int, int], backwards: Mapping[int, int]
    ) -> list[str | None]:
        """Hand results of segments of ``stage`` over to the next segments' hosts. Return each host's failure, or None.

        Args:
            hosts: Addresses and secrets of other stages' hosts.
            forwards: For each segment whose outputs are handed over, the index of a host.
            backwards: For each segment whose gradients of inputs are handed over, the index of a host.
        """
        self._stage = stage
        reasons: list[str | None] = []
        for place, (address, secret) in enumerate(hosts):
            try:
                link = _Link(address, self._security, secret, stage)
            except (Refused, OSError, SettingError) as error:
                reasons.append(getattr(error, "strerror", None) or str(error))
                continue
            reasons.append(None)
            self._links.append(link)
            self._forwards.update({segment: link for segment, to in forwards.items() if to == place})
            self._backwards.update({segment: link for segment, to in backwards.items() if to == place})
        return reasons

    def hand_over(self, result: Result) -> Result:
        """Send tensors of ``result`` to the host of the next segment, if it is known, and return the rest."""
        if not isinstance(result, Output | InputGradients):
            return result
        link = (self._forwards if isinstance(result, Output) else self._backwards).get(result.segment)
        return result if link is None else _changed(result, lambda t: self._handed(t, link, result.minibatch))

    def receive(self, message: Message, seconds: float) -> Message:
        """Put the tensors into ``message`` that peers have handed over.

        Raises:
            RuntimeError: if a tensor has not come within ``seconds``, or its host has ended.
        """
        is_task = isinstance(message, Forward | Backward)
        return _changed(message, lambda each: self._received(each, seconds)) if is_task else message

    def forget(self, minibatch: int) -> None:
        """Make peers forget what was handed over for ``minibatch``, because nobody needs it any more."""
        for link in self._links:
            link.send(orders.Forgotten(minibatch))

    def close(self) -> None:
        """End all connections."""
        if self._door is not None:
            self._door.close(0.0)
        for link in self._links:
            link.close()
        for wire in self._wires:
            wire.end()

    def _handed(self, tensor: Tensor, link: _Link, minibatch: int) -> Any:
        if tensor.is_sparse or tensor.is_sparse_csr:
            return tensor  # no message has a place for it, which the leader is to say
        number = next(self._numbers)
        link.send(orders.Handed(minibatch, number, tensor))
        return orders.HandedOver(self._stage, number)

    def _received(self, given: Any, seconds: float) -> Tensor:
        if not isinstance(given, orders.HandedOver):
            found: Tensor = given
            return found
        key, deadline = (given.stage, given.number), time.monotonic() + seconds
        with self._changed:
            self._awaited = key
            while key not in self._arrived:
                left = deadline - time.monotonic()
                forgotten = given.number <= self._newest.get(given.stage, -1)  # they come in order
                if forgotten or given.stage in self._lost or left <= 0:
                    what = "has ended" if given.stage in self._lost else f"has not sent it within {seconds:g} s"
                    what = "has had it forgotten" if forgotten else what
                    raise RuntimeError(f"the host of stage {given.stage} was to hand over a tensor, and {what}")
                self._changed.wait(left)
            self._awaited = None
            return self._arrived.pop(key)[1]

    def _take(self, raw: socket.socket, secret: str) -> None:
        """Take what a peer hands over, until it ends."""
        assert self._door is not None

        def refused(shown: dict[str, Any]) -> str | None:
            is_known = isinstance(shown.get("stage"), int) and hmac.compare_digest(str(shown.get("secret")), secret)
            return None if is_known else "its leader has named another secret"

        with suppress(Refused, OSError):
            connection, shown = admit(raw, self._security, REACHING, refused)
            self._door.heard(raw)
            stage, wire = shown["stage"], Wire(connection)
            self._wires.append(wire)
            try:
                while True:
                    self._note(stage, wire.receive())
            except Exception:  # it has ended, or sends what is no message for a peer
                with self._changed:
                    self._lost.add(stage)
                    self._changed.notify_all()

    def _note(self, stage: int, message: orders.Handed | orders.Forgotten) -> None:
        with self._changed:
            if isinstance(message, orders.Handed):
                self._arrived[stage, message.number] = message.minibatch, message.tensor
                self._newest[stage] = message.number
                self._changed.notify_all()
                return
            for key, (minibatch, _) in [*self._arrived.items()]:
                if key[0] == stage and minibatch == message.minibatch and key != self._awaited:
                    del self._arrived[key]


class _Link:
    """Connection to a peer, with a thread that sends, so that no stage waits for the network."""

    def __init__(self, address: str, security: Security, secret: str, stage: int) -> None:
        security.check(address)
        _, connection = connect(address, security, REACHING, secret=secret, stage=stage)
        self._wire = Wire(connection)
        self._waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send, name="hetpipe-host-hands-over", daemon=True)
        self._thread.start()

    def send(self, message: Any) -> None:
        """Send ``message`` soon. Its tensors must not change meanwhile."""
        self._waiting.put(message)

    def close(self) -> None:
        self._waiting.put(None)

    def _send(self) -> None:
        with suppress(OSError):  # nobody is there any more, which the leader finds out, too
            while (message := self._waiting.get()) is not None:
                self._wire.send(message)
        self._wire.end()


def _changed(message: Any, change: Callable[[Any], Any]) -> Any:
    """Return ``message`` after ``change`` of each tensor of its value or its gradients."""
    if isinstance(message, Forward | Output):
        value = message.value
        tensors = tuple(map(change, value.tensors))
        return message._replace(value=Value(tensors, value.requires_grad, value.others, value.spec))
    gradients = [
        Addends(map(change, each)) if isinstance(each, Addends) else None if each is None else change(each)
        for each in message.gradients
    ]
    return message._replace(gradients=gradients)
