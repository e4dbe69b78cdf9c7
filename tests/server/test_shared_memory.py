"""Blocks: nothing is left of them, nobody else's memory is taken for one, and without them gRPC carries the bodies."""

from __future__ import annotations

import errno
import logging
import os
import socket
import struct
from contextlib import closing, suppress
from pathlib import Path

import pytest

from lightning_hetpipe.server import shared_memory
from lightning_hetpipe.server.grpc_server import GrpcServer
from lightning_hetpipe.server.grpc_transport import GrpcChannel
from lightning_hetpipe.server.shared_memory import SLOT, SLOTS, Block, NoBlock
from tests.server.transports import Desk

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="shared memory is used on Linux only")

SIZE = SLOT * SLOTS + 5


def blocks() -> int:
    """How many blocks this process has open or mapped."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the descriptor of the listing itself
            if "memfd:hetpipe" in os.readlink(link):
                found.add(link.stat().st_ino)
    return len(found)


def test_both_sides_see_the_same_memory() -> None:
    made = Block.make()
    attached = Block.attach(made.description)
    made.slot(SLOTS + 1, SLOT)[:3] = b"abc"  # counted on and on: the second slot
    seen = bytes(attached.slot(1, 3))  # not in the assertion, which would keep the slot, and so the mapping
    assert seen == b"abc"
    made.close()
    attached.close()
    assert blocks() == 0


def test_a_block_cannot_be_cut_off_under_its_reader() -> None:
    """A reader beyond the end would be killed by SIGBUS."""
    with closing(Block.make()) as block:
        number = struct.unpack_from("<II", block.description)[1]
        for size in (0, 1 << 30):
            with pytest.raises(PermissionError):
                os.ftruncate(number, size)


def test_what_is_no_block_is_not_taken_for_one(tmp_path: Path) -> None:
    def described(pid: int, number: int, inode: int, secret: bytes) -> bytes:
        return struct.pack("<IIQ16s", pid, number, inode, secret)

    with closing(Block.make()) as block, (tmp_path / "file").open("wb+") as file, socket.socket() as open_socket:
        pid, number, inode, secret = struct.unpack("<IIQ16s", block.description)
        other = os.memfd_create("hetpipe", os.MFD_ALLOW_SEALING)
        wrong = {
            "is malformed": [b"", block.description[:-1], block.description + b"x", b"../../dev/mem"],
            "is not where it is said to be": [
                described(pid, file.fileno(), os.fstat(file.fileno()).st_ino, secret),
                described(pid, open_socket.fileno(), inode, secret),
            ],
            "cannot be seen": [described(pid, 999_999, inode, secret), described(2**32 - 1, number, inode, secret)],
            "is not a sealed block": [
                described(pid, number, inode + 1, secret),
                described(pid, other, os.fstat(other).st_ino, secret),
            ],
            "does not hold the secret": [described(pid, number, inode, bytes(16))],
        }
        for says, descriptions in wrong.items():
            for description in descriptions:
                with pytest.raises(NoBlock, match=says):
                    Block.attach(description)
        os.close(other)
    assert blocks() == 0


def test_a_block_of_another_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Block.make()) as block:
        monkeypatch.setattr(shared_memory, "_SIZE", shared_memory._SIZE + 4096)
        with pytest.raises(NoBlock, match="bytes instead of"):
            Block.attach(block.description)


def test_bodies_go_through_one_block_that_is_used_again(caplog: pytest.LogCaptureFixture) -> None:
    with GrpcServer(Desk()) as server, closing(GrpcChannel(server.address)) as channel:
        body = bytearray(SIZE)
        for _ in range(3):
            channel.call("echo", b"", [memoryview(body)], [memoryview(body)])
            assert blocks() == 1  # the client's; the server has closed its own
    assert blocks() == 0
    assert not caplog.records


@pytest.mark.parametrize("where", ["client", "server"])
def test_without_room_for_a_block_grpc_carries_and_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def unseen(_: bytes) -> Block:
        raise NoBlock("it cannot be seen from the server's process (Permission denied)")

    if where == "client":
        monkeypatch.setattr(os, "posix_fallocate", full)
    else:
        monkeypatch.setattr(Block, "attach", unseen)
    desk = Desk()
    with (
        caplog.at_level(logging.WARNING),
        GrpcServer(desk) as server,
        closing(GrpcChannel(server.address)) as channel,
    ):
        for fill in range(3):
            body, back = bytearray([fill]) * SIZE, bytearray(SIZE)
            channel.call("echo", b"", [memoryview(body)], [memoryview(back)])
            assert back == body
    assert desk.ran() == ["echo"] * 3
    (said,) = [record.getMessage() for record in caplog.records]
    assert "by gRPC, which is slower than shared memory" in said
    assert ("No space left" if where == "client" else "Permission denied") in said
    assert blocks() == 0
