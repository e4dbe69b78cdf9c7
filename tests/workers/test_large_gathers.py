"""Gathers of any size: what goes in comes out on all bit for bit, whoever dies."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from hypothesis import given
from hypothesis import strategies as st

from lightning_hetpipe.server.protocol.gathers import LIMIT
from lightning_hetpipe.workers.collectives import CHUNK, gather_in_chunks

SECONDS = 30.0


class Gathers:
    """The servers' primitive among threads.

    Args:
        dies: By virtual worker, the gather, from 0, that it does not come to.
    """

    def __init__(self, members: int, dies: Mapping[int, int]) -> None:
        self.dies = dies
        self.alive = set(range(members))
        self.given: list[dict[int, bytes]] = [{}]
        self.changed = threading.Condition()

    def gather(self, vw: int, ordinal: int, piece: bytes) -> dict[int, bytes]:
        with self.changed:
            if self.dies.get(vw) == ordinal:
                self.alive.remove(vw)
                self.changed.notify_all()
                raise ConnectionAbortedError
            self.given.extend({} for _ in range(ordinal + 1 - len(self.given)))
            self.given[ordinal][vw] = piece
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: self.alive <= self.given[ordinal].keys(), SECONDS)
            return dict(self.given[ordinal])


def whole(content: bytes, gather: Callable[[bytes], dict[int, bytes]], piece: int = CHUNK) -> dict[int, bytes]:
    """The contents of all whose content came whole."""
    taken: dict[int, bytes] = defaultdict(bytes)

    def take(vw: int, part: bytes) -> None:
        assert 0 < len(part) <= piece
        taken[vw] += part

    return {vw: taken[vw] for vw in gather_in_chunks(content, gather, take, piece)}


def gathered(contents: list[bytes], piece: int, dies: Mapping[int, int]) -> list[dict[int, bytes] | None]:
    """Result of each of them; None for who dies."""
    gathers = Gathers(len(contents), dies)

    def one(vw: int) -> dict[int, bytes] | None:
        ordinals = iter(range(1000))
        try:
            return whole(contents[vw], lambda each: gathers.gather(vw, next(ordinals), each), piece)
        except ConnectionAbortedError:
            return None

    with ThreadPoolExecutor(len(contents)) as pool:
        return list(pool.map(one, range(len(contents))))


def test_a_server_takes_a_piece() -> None:
    assert whole(bytes(CHUNK + 1), lambda part: {0: part} if len(part) <= LIMIT else {})[0] == bytes(CHUNK + 1)


@given(st.lists(st.binary(max_size=20), min_size=1, max_size=4), st.integers(1, 9))
def test_what_goes_in_comes_out_on_all(contents: list[bytes], piece: int) -> None:
    assert gathered(contents, piece, {}) == [dict(enumerate(contents))] * len(contents)


@given(
    st.lists(st.binary(max_size=20), min_size=2, max_size=4),
    st.integers(1, 9),
    st.dictionaries(st.just(0), st.integers(0, 4)),
)
def test_who_dies_meanwhile_is_left_out_by_all_alike(contents: list[bytes], piece: int, dies: dict[int, int]) -> None:
    """Unless all that it had to give was there."""
    found = gathered(contents, piece, dies)
    living = [each for each in found if each is not None]
    assert all(each == living[0] for each in living)
    everything = dict(enumerate(contents))
    assert living[0] == everything or (0 in dies and living[0] == {vw: everything[vw] for vw in everything if vw})
