"""Messages between two processes of one machine: their tensors stay in memory that both see, and come back to it."""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_hetpipe.hosts import wire as wire_module
from lightning_hetpipe.hosts.orders import Put
from lightning_hetpipe.hosts.wire import SMALL, NotPlain, Wire

LARGE = SMALL // 4 + 3
"""Elements of a tensor that does not go with the text."""


def blocks() -> set[int]:
    """Blocks of this process that are open, by their inodes."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the descriptor of the listing itself
            if "memfd:hetpipe" in os.readlink(link):
                found.add(link.stat().st_ino)
    return found


class Counted:
    """The socket ``raw``, with the bytes that it has sent."""

    def __init__(self, raw: socket.socket) -> None:
        self._raw = raw
        self.sent = 0

    def sendall(self, data: Any) -> None:
        self.sent += len(data)
        self._raw.sendall(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)


class Ends:
    """Both ends of a wire."""

    def __init__(self, *, shares: bool) -> None:
        self.sockets = [Counted(each) for each in socket.socketpair()]
        for each in self.sockets:
            each.settimeout(20.0)
        self._others = blocks()
        self.here, self.there = (Wire(each, shares=shares) for each in self.sockets)

    def pass_on(self, value: Tensor) -> Tensor:
        """``value`` as it arrives."""
        sender = threading.Thread(
            target=self.here.send, args=(Put(0, value),)
        )  # a socket takes no large tensor at once
        sender.start()
        found: Tensor = self.there.receive().value
        sender.join()
        return found

    def answer(self) -> None:
        """Send a message the other way, with which memory goes back."""
        self.there.send(Put(0, torch.zeros(())))
        self.here.receive()

    def blocks(self) -> int:
        """Number of blocks of this wire that are open."""
        return len(blocks() - self._others)


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends(shares=True)
    yield made
    for each in (made.here, made.there):
        each.close()


def layouts() -> dict[str, Tensor]:
    image = torch.randn(8, 4, 33, 35)
    return {
        "contiguous": image,
        "channels last": image.to(memory_format=torch.channels_last),
        "transposed": torch.randn(200, 200).t(),
        "sliced": torch.randn(200, 400)[:, ::2],
        "expanded": torch.randn(200, 1, 200).expand(200, 5, 200).permute(1, 2, 0),
        "complex": torch.randn(200, 200, dtype=torch.cfloat).conj().t(),
        "a dimension of one": torch.randn(1, 40000, 1).transpose(0, 1),
    }


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("layout", layouts())
def test_tensors_arrive_with_their_bits_and_strides(layout: str, shares: bool) -> None:
    made, sent = Ends(shares=shares), layouts()[layout]
    found = made.pass_on(sent)
    assert torch.equal(found, sent)
    assert found.stride() == sent.stride()


def test_large_tensors_do_not_pass_through_the_socket(ends: Ends) -> None:
    ends.pass_on(torch.randn(100 * LARGE))
    assert ends.sockets[0].sent < 1000


def test_a_tensor_stays_as_it_arrived_while_others_come(ends: Ends) -> None:
    sent = [torch.full((LARGE,), float(number)) for number in range(4)]
    found = []
    for each in sent:
        found.append(ends.pass_on(each))
        ends.answer()
    assert all(map(torch.equal, found, sent))
    assert len({each.data_ptr() for each in found}) == len(sent)


def test_a_receiver_changes_its_own_tensor_only(ends: Ends) -> None:
    sent = torch.zeros(LARGE)
    first = ends.pass_on(sent)
    first += 1.0
    assert torch.equal(sent, torch.zeros(LARGE))
    assert torch.equal(ends.pass_on(sent), torch.zeros(LARGE))
    del first
    ends.answer()
    assert torch.equal(ends.pass_on(sent), torch.zeros(LARGE))  # in the memory of the first one


def test_memory_is_lent_again_once_nothing_refers_to_its_tensors(ends: Ends) -> None:
    for _ in range(20):
        found = ends.pass_on(torch.randn(LARGE)).view(-1, 1)
        ends.answer()
    assert ends.blocks() == 2  # the next tensor arrives while the last one is still there
    del found


def test_what_is_kept_beyond_the_limit_comes_through_the_socket(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_module, "MOST_LENT", 2)
    sent = [torch.randn(LARGE) for _ in range(4)]
    found = [*map(ends.pass_on, sent)]
    assert all(map(torch.equal, found, sent))
    assert ends.blocks() == 2
    assert ends.sockets[0].sent > 2 * 4 * LARGE


def test_blocks_that_are_not_needed_any_more_go(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_module, "LATEST", 5)
    ends.pass_on(torch.randn(100 * LARGE))
    ends.answer()
    for _ in range(6):
        ends.pass_on(torch.randn(LARGE))
        ends.answer()
    assert ends.blocks() == 1


def test_tensors_outlive_the_wire() -> None:
    gc.collect()
    made, sent = Ends(shares=True), torch.randn(LARGE)
    found = made.pass_on(sent)
    made.here.close()
    made.there.close()
    del made
    gc.collect()
    assert torch.equal(found, sent)


def test_memory_of_another_machine_is_refused() -> None:
    one, other = socket.socketpair()
    lends, refuses = Wire(one, shares=True), Wire(other)
    lends.send(Put(0, torch.randn(LARGE)))
    with pytest.raises(NotPlain, match="between machines"):
        refuses.receive()
    lends.close()
    refuses.close()
