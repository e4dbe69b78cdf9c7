"""Links from the times of transfers, on a clock that only they move."""

from __future__ import annotations

import pytest

from lightning_hetpipe.planning.model.cluster import Link
from lightning_hetpipe.server.process.link_probe import LARGEST, slower, timed_link


class Wire:
    """A link on which each transfer takes a round trip, and ``burst`` bytes of it no time."""

    def __init__(self, link: Link, burst: int = 0) -> None:
        self.link, self.burst = link, burst
        self.time = 0.0
        self.sent: list[int] = []

    def transfer(self, nbytes: int) -> None:
        self.sent.append(nbytes)
        self.time += self.link.latency + max(0, nbytes - self.burst) / self.link.bandwidth

    def now(self) -> float:
        return self.time


@pytest.mark.parametrize("burst", [0, 512_000])
@pytest.mark.parametrize("link", [Link("100 Mbit/s", "300 us"), Link("12 GB/s", "10 us"), Link("1 Mbit/s", "50 ms")])
def test_the_link_that_is_there(link: Link, burst: int) -> None:
    wire = Wire(link, burst)
    found = timed_link(wire.transfer, now=wire.now)
    assert found.bandwidth == pytest.approx(link.bandwidth)
    assert found.latency == pytest.approx(link.latency, rel=0.2)  # a byte travels, too


def test_slow_links_carry_small_transfers_and_fast_ones_no_more_than_may_be() -> None:
    slow, fast = Wire(Link("100 Mbit/s")), Wire(Link("100 GB/s"))
    timed_link(slow.transfer, now=slow.now)
    timed_link(fast.transfer, now=fast.now)
    assert (max(slow.sent), max(fast.sent)) == (4 << 20, LARGEST)
    timed_link(fast.transfer, 1000, now=fast.now)
    assert max(fast.sent[-30:]) == 1000


def test_times_below_the_clocks_steps_give_a_link_still() -> None:
    """No difference between two sizes says nothing of the bandwidth: the larger transfer's time does."""
    steps = iter(range(10_000))
    found = timed_link(lambda nbytes: None, 1 << 20, now=lambda: next(steps) / 1000)
    assert found.bandwidth == pytest.approx((1 << 20) * 1000)
    assert found.latency == pytest.approx(0.001)


def test_a_link_of_two_promises_no_more_than_either() -> None:
    assert slower(Link(10.0, 0.1), Link(20.0, 0.3)) == Link(10.0, 0.3)
