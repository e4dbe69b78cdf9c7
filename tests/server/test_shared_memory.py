"""Shared memory: nothing is left of it, no other memory is taken for it, and without it gRPC carries the bodies."""

from __future__ import annotations

import errno
import gc
import logging
import os
import socket
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_hetpipe.server.transport import shared_memory
from lightning_hetpipe.server.transport.grpc_channel import GrpcChannel
from lightning_hetpipe.server.transport.grpc_server import GrpcServer
from lightning_hetpipe.server.transport.shared_memory import LEAST, NoBlock, Place, Views, memory, place_of, shared
from tests.server.transports import Desk, Shelf, eventually

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="shared memory is used on Linux only")

SIZE = 8 * LEAST + 5


def blocks() -> int:
    """Number of blocks that this process has open."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the descriptor of the listing itself
            if "memfd:hetpipe" in os.readlink(link):
                found.add(link.stat().st_ino)
    return len(found)


def maps() -> list[str]:
    """The mappings of blocks, their owners' and their readers'."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:hetpipe" in line]


def place(block: memoryview) -> Place:
    found = place_of([block])
    assert found is not None
    return found


def test_others_see_a_block_and_do_not_change_it() -> None:
    block = shared(SIZE)
    with closing(Views()) as views:
        seen = views.look(place(block[7:]))
        assert len(seen) == SIZE - 7
        block[7:10] = b"abc"
        assert bytes(seen[:3]) == b"abc"
        seen[:3] = b"xyz"
        assert bytes(block[7:10]) == b"abc"
        assert len(maps()) == 2
        del block, seen
    assert (blocks(), maps()) == (0, [])


def test_a_block_that_its_owner_gives_up_goes_when_nothing_refers_to_it() -> None:
    block, views = shared(SIZE), Views()
    block[0] = 7
    seen = views.look(place(block))
    del block
    views.drop()
    assert seen[0] == 7  # what a dead client has sent is still there
    del seen
    assert (blocks(), maps()) == (0, [])


def test_only_one_piece_of_one_block_has_a_place() -> None:
    one, other, small = memory(LEAST), memory(LEAST), memory(LEAST - 1)
    assert place_of([one[1:3], one[3:9]]) == replace(place(one), start=1, size=8)
    assert place_of([one[1:3], one[4:9]]) is None
    assert place_of([one, other]) is None
    assert place_of([small]) is None
    assert place_of([memoryview(bytearray(LEAST))]) is None
    assert place_of([]) is None


def test_the_garbage_collector_may_free_blocks_while_one_is_looked_for() -> None:
    """A call failed, as the dictionary of blocks changed its size while it was read."""
    held = [(number, number) for number in range(5000)]  # else tuples are used again, and nothing is collected
    mine = [shared(1) for _ in range(40)]
    before = gc.get_threshold()
    gc.collect()
    circle: list[object] = [shared(1)]
    circle.append(circle)
    del circle
    gc.set_threshold(gc.get_count()[0] + len(mine) // 2)
    try:
        assert place_of(mine[-1:]) is not None
    finally:
        gc.set_threshold(*before)
    assert held
    gc.collect()
    del mine
    assert blocks() == 0


def test_a_block_cannot_be_cut_off_under_its_reader() -> None:
    """A reader beyond the end would be killed by SIGBUS."""
    block = shared(SIZE)
    for size in (0, 1 << 30):
        with pytest.raises(PermissionError):
            os.ftruncate(place(block).descriptor, size)


def test_what_is_no_block_is_not_taken_for_one(tmp_path: Path) -> None:
    block = shared(SIZE)
    right = place(block)
    with (tmp_path / "file").open("wb+") as file, socket.socket() as open_socket, closing(Views()) as views:
        other = os.memfd_create("hetpipe", os.MFD_ALLOW_SEALING)
        wrong = {
            "is in another network namespace": [replace(right, network=right.network + 1)],
            "is not where it is said to be": [
                replace(right, descriptor=file.fileno(), inode=os.fstat(file.fileno()).st_ino),
                replace(right, descriptor=open_socket.fileno()),
            ],
            "cannot be seen": [replace(right, descriptor=999_999), replace(right, pid=2**32 - 1)],
            "is not a sealed block": [
                replace(right, inode=right.inode + 1),
                replace(right, descriptor=other, inode=os.fstat(other).st_ino),
            ],
            "does not hold the secret": [replace(right, secret="0" * 32), replace(right, secret="")],
            "is malformed": [replace(right, start=-1), replace(right, size=-1)],
            "is smaller than": [replace(right, size=SIZE + 1), replace(right, start=1), replace(right, start=2**63)],
        }
        for says, places in wrong.items():
            for each in places:
                with pytest.raises(NoBlock, match=says):
                    views.look(each)
        os.close(other)
        assert views.look(right) == block
        with pytest.raises(NoBlock, match="does not hold"):  # also once the right one is known
            views.look(replace(right, secret="0" * 32))


def test_blocks_of_clients_that_are_gone_are_let_go_of_at_anybodys_next_call() -> None:
    desk = Desk()
    with GrpcServer(desk) as server, closing(GrpcChannel(server.address)) as other:
        with closing(GrpcChannel(server.address)) as channel:
            channel.call("lend", b"", [shared(SIZE)])
        desk.kept.clear()

        def gone() -> bool:
            other.call("echo", b"")
            return maps() == []

        eventually(gone, "the server holds the memory of a client that is gone")


@pytest.mark.parametrize("where", ["allocation", "server", "client"])
def test_without_shared_memory_grpc_carries_and_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    shared_memory._say_once.cache_clear()
    if where == "allocation":
        monkeypatch.setattr(os, "posix_fallocate", full)
    shelf = Shelf(SIZE)
    with (
        caplog.at_level(logging.WARNING),
        GrpcServer(shelf) as server,
        closing(GrpcChannel(server.address)) as channel,
    ):
        look = Views.look

        def unseen(views: Views, at: Place) -> memoryview:
            if (views is channel._views) == (where == "client"):
                raise NoBlock("it cannot be seen from the other process (Permission denied)")
            return look(views, at)

        if where != "allocation":
            monkeypatch.setattr(Views, "look", unseen)
        for fill in range(3):
            body, back = memory(SIZE), bytearray(SIZE)
            body[:] = bytes([fill]) * SIZE
            channel.call("write", b"", [body])
            channel.call("read", b"", (), [memoryview(back)])
            assert back == body
            del body
    shelf.weights = memoryview(b"")
    (said,) = [record.getMessage() for record in caplog.records]
    assert "by gRPC, which is slower" in said
    assert ("No space left" if where == "allocation" else "Permission denied") in said
    assert blocks() == 0
