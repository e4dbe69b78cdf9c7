"""Waves, clocks and the distance between them: Wave Synchronous Parallel (laws L3 and L6; HetPipe, section 5).

A VW that waits at a cut has pushed zero for every wave to come, so its clock counts as infinite: ``None`` here. With
three VWs, D = 0, and a VW 1 that comes to the cut early (``|``: it waits there; ``+``: all have arrived, and every
clock becomes the largest):

    wave      0   1   2   3
    VW 0      u   u   u   u   +
    VW 1      u   |           +
    VW 2      u   u   u       +
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def waves(minibatches: int, wave: int) -> Iterator[range]:
    """The minibatches (counted from 0) of each wave up to the next cut: ``wave`` each, fewer in the last.

    Args:
        minibatches: how many there are before the cut.
        wave: W.
    """
    return (range(start, min(start + wave, minibatches)) for start in range(0, minibatches, wave))


def slowest(clocks: Iterable[int | None]) -> int | None:
    """c_global: the smallest clock; ``None`` (infinite) if everyone waits at a cut."""
    return min((clock for clock in clocks if clock is not None), default=None)


def may_pull(c_local: int, c_global: int | None, distance: int) -> bool:
    """Tell whether a VW that has pushed ``c_local`` waves may take weights and go on (HetPipe, section 5.1)."""
    return c_global is None or c_global >= c_local - distance


def may_commit(clock: int, c_global: int | None) -> bool:
    """Tell, with D = 0, whether the updates of wave ``clock`` may be added, as none is still to come."""
    return c_global is None or c_global > clock


def cut_after(clock: int, distance: int) -> int:
    """The clock at which all VWs can cut, if VW 0 says so with its update of ``clock``.

    A VW that has pulled after pushing wave ``clock + distance`` knows of it, since that pull had to wait until VW 0 had
    pushed ``clock``; and none can be further than that without knowing.
    """
    return clock + 1 + distance


def global_staleness(in_flight: int, distance: int, wave: int | None = None) -> int:
    """s_global = (D + 1) W + s_local - 1 minibatches (HetPipe, section 5.2, where W = Nm = s_local + 1).

    Args:
        in_flight: Nm.
        distance: D.
        wave: W; by default Nm.
    """
    return (distance + 1) * (in_flight if wave is None else wave) + (in_flight - 1) - 1
