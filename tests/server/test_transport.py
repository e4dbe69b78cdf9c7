"""Properties of every transport, whatever carries it."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import cache
from pathlib import Path

import pytest

from lightning_hetpipe.server.transport import grpc_server
from lightning_hetpipe.server.transport.frames import CHUNK
from lightning_hetpipe.server.transport.grpc_server import GrpcServer
from lightning_hetpipe.server.transport.interface import CallRefused, Channel, Received, Unreachable
from lightning_hetpipe.server.transport.shared_memory import LEAST, memory
from tests.server.transports import KINDS, PATIENCE, Desk, connect, eventually, serve

BIG = 24 * CHUNK + 3  # more than gRPC buffers
SOME = 4 * CHUNK + 3  # several messages of gRPC's, and worth a block


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    desk.go.set()


@pytest.fixture
def server(kind: str, desk: Desk) -> Iterator[GrpcServer]:
    with serve(kind, desk) as server:
        yield server
        desk.go.set()


@pytest.fixture
def channel(kind: str, server: GrpcServer) -> Iterator[Channel]:
    with closing(connect(kind, server.address)) as channel:
        yield channel


def pattern(size: int, seed: int = 0) -> memoryview:
    """Bytes that differ wherever a piece of a body could have been put in a wrong place; many can be seen by others."""
    found = memory(size)
    found[:] = (_row(seed) * (size // ROW + 1))[:size]
    return found


ROW = 65_521


@cache
def _row(seed: int) -> bytes:
    return bytes((seed + index * 7 + index // 251) % 256 for index in range(ROW))


def cut(data: memoryview, *sizes: int) -> list[memoryview]:
    """``data`` as buffers of these sizes and a last one for the rest."""
    views, start = [], 0
    for size in (*sizes, len(data) - sum(sizes)):
        views.append(data[start : start + size])
        start += size
    return views


@pytest.mark.parametrize(
    ("size", "sent", "received"),
    [
        (0, (), ()),
        (1, (), ()),
        (12, (0, 5), (3, 0)),
        (LEAST - 1, (), ()),
        (LEAST, (), ()),
        (2 * CHUNK, (), (CHUNK,)),
        (CHUNK + 1, (CHUNK,), ()),
        (BIG, (1, 2, 40_000, CHUNK), (CHUNK - 1, 5)),
    ],
)
def test_bodies_of_any_size_go_there_and_back(
    channel: Channel, size: int, sent: tuple[int, ...], received: tuple[int, ...]
) -> None:
    body, back = pattern(size), bytearray(size)
    for method in ("echo", "keep", "echo"):  # a channel's second call uses again what the first one made
        back[:] = bytes(size)
        assert channel.call(method, b"abc", cut(body, *sent), cut(memoryview(back), *received), PATIENCE) == b"cba"
        assert back == body


@pytest.mark.parametrize("size", [0, 5, BIG])
def test_a_caller_may_have_room_for_whatever_comes(channel: Channel, size: int) -> None:
    back = Received()
    assert channel.call("echo", b"ab", [pattern(size)], back, PATIENCE) == b"ba"
    assert back.content == pattern(size)


def test_only_part_of_a_block_and_parts_of_several_go_there_and_back(channel: Channel) -> None:
    one, other, back = pattern(SOME), pattern(SOME, seed=1), bytearray(SOME)
    bodies = [[one[5 : CHUNK + 5]], [one[:CHUNK], other[CHUNK:]], [one[:7], one[9:], other[:2]]]
    for body in bodies:
        size = sum(map(len, body))
        channel.call("echo", b"", body, [memoryview(back)[:size]], PATIENCE)
        assert back[:size] == b"".join(body)


def test_what_is_offered_is_kept_where_it_is(kind: str, channel: Channel, desk: Desk) -> None:
    """And only memory that both sides see is offered."""
    body = pattern(SOME)
    channel.call("lend", b"", [body], (), PATIENCE)
    assert len(desk.kept) == (kind == "block")
    for kept in desk.kept:
        body[3] ^= 1
        assert kept == body
        kept[4] ^= 1  # a mistake of the server's
        assert kept[4] != body[4]
        assert channel.call("echo", b"ab") == b"ba"


def test_bodies_in_one_direction_only(channel: Channel, desk: Desk) -> None:
    with pytest.raises(CallRefused, match=f"a body of {SOME} bytes, and the caller room for 0"):
        channel.call("echo", b"", [memory(SOME)])
    with pytest.raises(CallRefused, match=f"a body of 0 bytes, and the caller room for {SOME}"):
        channel.call("echo", b"", (), [memory(SOME)])
    assert channel.call("echo", b"xy") == b"yx"


def test_several_threads_call_at_once(channel: Channel, desk: Desk) -> None:
    count = 6
    barrier = threading.Barrier(count)

    def call(number: int) -> bool:
        body = pattern((1 << 19) * number + number, seed=number)
        back = bytearray(len(body))
        barrier.wait(PATIENCE)
        for _ in range(3):
            channel.call("echo", b"", [body], [memoryview(back)], PATIENCE)
        return back == body

    with ThreadPoolExecutor(count) as threads:
        assert all(threads.map(call, range(count)))
    assert len(desk.ran()) == 3 * count


@pytest.mark.parametrize("size", [0, 9, SOME])
def test_a_deadline_ends_the_wait_and_not_the_server(channel: Channel, desk: Desk, size: int) -> None:
    with pytest.raises(Unreachable):
        channel.call("hold", b"", [memory(size)], [memory(size)], timeout=0.1)
    desk.go.set()
    assert channel.call("echo", b"ab") == b"ba"


@pytest.mark.parametrize("size", [0, 9, SOME])
@pytest.mark.parametrize(
    ("method", "says"),
    [
        ("refuse", "^not today, because of the weather$"),
        ("decline", "^too late$"),
        ("fail", "^the server failed at fail: ValueError: a bug$"),
    ],
)
def test_refusals_arrive_with_their_sentence(channel: Channel, desk: Desk, method: str, says: str, size: int) -> None:
    body, back = pattern(size), bytearray(size)
    with pytest.raises(CallRefused, match=says):
        channel.call(method, b"", [body], [memoryview(back)])
    taken = [what for what, of, _ in desk.calls if of == method]
    assert taken == ([] if method == "refuse" else ["open", "run"])
    assert channel.call("echo", b"", [body], [memoryview(back)]) == b""
    assert back == body


def test_a_caller_that_goes_away_in_mid_body_leaves_nothing(
    kind: str, server: GrpcServer, channel: Channel, desk: Desk
) -> None:
    leaving = connect(kind, server.address)
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(leaving.call, "hold open", b"", [memory(BIG)])
        assert desk.held.acquire(timeout=PATIENCE)
        leaving.close()
        assert isinstance(call.exception(PATIENCE), Unreachable)
    desk.go.set()
    assert desk.abandonments.acquire(timeout=PATIENCE)
    assert desk.calls == [("open", "hold open", BIG), ("abandoned", "hold open", BIG)]
    assert channel.call("echo", b"ab") == b"ba"


@pytest.mark.parametrize("size", [0, BIG])
def test_a_server_that_stops_is_missed_at_once(server: GrpcServer, channel: Channel, desk: Desk, size: int) -> None:
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(channel.call, "hold", b"", [memory(size)], (), 10 * PATIENCE)
        assert desk.held.acquire(timeout=PATIENCE)
        stopping = threading.Thread(target=server.__exit__)
        stopping.start()
        assert isinstance(call.exception(PATIENCE), Unreachable)  # long before its deadline
        desk.go.set()
        stopping.join(PATIENCE)
    with pytest.raises(Unreachable):
        channel.call("echo", b"")


def test_a_server_that_comes_back_is_found_again(kind: str, desk: Desk) -> None:
    with serve(kind, desk) as first:
        address = first.address
        channel = connect(kind, address)
        body, back = pattern(SOME), bytearray(SOME)
        channel.call("echo", b"", [body], [memoryview(back)])
    with pytest.raises(Unreachable):
        channel.call("echo", b"")
    with serve(kind, desk, address), closing(channel):
        back[:] = bytes(SOME)

        def answers() -> bool:
            try:
                channel.call("echo", b"", [body], [memoryview(back)])
            except Unreachable:
                return False
            return True

        eventually(answers, "the server is back, and the channel does not find it")
        assert back == body


def test_nobody_there(kind: str, desk: Desk) -> None:
    with serve(kind, desk) as server:
        address = server.address
    with closing(connect(kind, address)) as channel, pytest.raises(Unreachable):
        channel.call("echo", b"")


def test_calls_beyond_the_bound_are_turned_away(kind: str, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "CALLS", 2)
    with serve(kind, desk) as server, closing(connect(kind, server.address)) as channel:
        with ThreadPoolExecutor(2) as threads:
            calls = [threads.submit(channel.call, "hold", b"ab") for _ in range(2)]
            for _ in calls:
                assert desk.held.acquire(timeout=PATIENCE)
            with pytest.raises(Unreachable):
                channel.call("echo", b"")
            desk.go.set()
            assert [call.result(PATIENCE) for call in calls] == [b"ba", b"ba"]

        def answers() -> bool:
            try:
                return channel.call("echo", b"ab") == b"ba"
            except Unreachable:  # the last thread is about to become free
                return False

        eventually(answers, "the server remains busy")


def test_a_closed_channel_says_so(kind: str, channel: Channel) -> None:
    channel.close()
    channel.close()
    for body in (b"", b"x" * SOME):
        with pytest.raises(Unreachable, match="closed"):
            channel.call("echo", b"", [memoryview(body)])


def test_nothing_is_left(kind: str) -> None:
    def cycle() -> None:
        desk = Desk()
        with serve(kind, desk) as server, closing(connect(kind, server.address)) as channel:
            back = bytearray(SOME)
            channel.call("echo", b"", [memory(SOME)], [memoryview(back)])
            with pytest.raises(CallRefused):
                channel.call("refuse", b"", [memory(SOME)])

    def left() -> tuple[int, int, int]:
        gc.collect()  # errors hold, in circles, what the frames held that they came through
        return threading.active_count(), len(os.listdir("/proc/self/fd")), len([*Path("/dev/shm").iterdir()])

    cycle()  # gRPC keeps a few descriptors of its own from its first use on
    eventually(lambda: not any(thread.name.startswith("hetpipe") for thread in threading.enumerate()), "threads")
    before = left()
    cycle()
    eventually(lambda: left() <= before and left()[1] <= before[1], f"{before} before, and more after")
