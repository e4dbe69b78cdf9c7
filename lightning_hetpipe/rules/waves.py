"""Waves, clocks and the distance between them: Wave Synchronous Parallel (laws L3 and L6; HetPipe, section 5).

A VW that waits at a cut has pushed zero for every wave to come, so its clock counts as infinite: ``None`` here. With
three VWs, D = 0, and a VW 1 that comes to the cut early (``|``: it waits there; ``+``: all have arrived, and every
clock becomes the largest):

    wave      0   1   2   3
    VW 0      u   u   u   u   +
    VW 1      u   |           +
    VW 2      u   u   u       +

Unequal virtual workers have *shares*, from which follow the lengths of their waves, the bound of staleness and the
division of an epoch. With equal waves, N virtual workers run at N times the rate of the slowest. A wave of W_v
minibatches on virtual worker v, in proportion to its rate X_v, takes equally long everywhere, and the epoch is divided
in the same proportion. With W = (1, 2), which is the share (1/3, 2/3), eight minibatches are dealt like this (``|``: a
wave's end):

    VW 0   0     | 3     | 6
    VW 1   1 2   | 4 5   | 7
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence


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


ENOUGH = 0.97
"""Fraction of the sum of rates with which integers are good enough."""

GAIN = 1.1
"""Ratio of throughputs for which shares change: measured rates are off by a few percent from epoch to epoch."""


def wave_lengths(rates: Sequence[float], in_flight: int) -> tuple[int, ...]:
    """W_v: the smallest integers of at least Nm with which waves in lock-step reach 97 % of the sum of rates.

    Smallest by their sum. Of equal sums these are the ones with the shortest wave; where even that is equal, the time
    of the second longest is the shortest, and so on; where times are equal, the lower number gets the minibatch. For
    whole optimizer steps of M minibatches, count both ``in_flight`` and the result in steps.

    Args:
        rates: X_v, minibatches per second of each virtual worker, in any unit; all positive.
        in_flight: Nm.
    """
    enough = ENOUGH * sum(rates)
    for total, (lengths, seconds) in enumerate(_one_by_one([in_flight] * len(rates), rates), in_flight * len(rates)):
        if total >= enough * seconds:
            return tuple(lengths)
    raise AssertionError("enough minibatches make any ratio")


def next_lengths(lengths: Sequence[int], rates: Sequence[float], in_flight: int) -> tuple[int, ...]:
    """W_v for the next epoch: those for ``rates``, or still ``lengths`` where the gain would be within the noise.

    Args:
        lengths: W_v so far.
        rates: X_v, as measured since.
        in_flight: As :func:`wave_lengths` has it.
    """
    found = wave_lengths(rates, in_flight)
    return found if throughput(found, rates) > GAIN * throughput(lengths, rates) else tuple(lengths)


def whole_steps(lengths: Sequence[int], every: int) -> tuple[int, ...]:
    """``lengths`` as multiples of the ``every`` minibatches of an optimizer step, each at least as long as before."""
    return tuple(-(-length // every) * every for length in lengths)


def throughput(lengths: Sequence[int], rates: Sequence[float]) -> float:
    """Rate of all virtual workers together, in the unit of ``rates``: sum(W) / max(W_v / X_v), waves in lock-step."""
    return sum(lengths) / max(length / rate for length, rate in zip(lengths, rates, strict=True))


def staleness_bound(lengths: Sequence[int], vw: int, of: int, in_flight: int, distance: int) -> int:
    """Minibatches of virtual worker ``of`` that a minibatch of ``vw`` misses at most, where waves take equally long.

    The first Nm - 1 minibatches of a wave use versions from before the last synchronisation. So minibatch q <= Nm - 2
    of wave c (both from 0) has the first c - 1 - D waves of the others, and those have gone on until then by q / W_vw
    of a wave: (D + 1) W_of + q W_of / W_vw (HetPipe, section 5.2, where all W are Nm).

    Args:
        lengths: W_v.
        vw: Number of the virtual worker that computes.
        of: Number of the one whose minibatches count; for its own, ``vw``.
        in_flight: Nm.
        distance: D.
    """
    return -(-((distance + 1) * lengths[vw] + in_flight - 2) * lengths[of] // lengths[vw])


def dealt(minibatches: int, lengths: Sequence[int], vw: int) -> Iterator[range]:
    """The minibatches of an epoch that virtual worker ``vw`` gets, wave by wave: numbers in the epoch's order, from 0.

    Each belongs to one virtual worker, and all have the same number of waves. Waves are full, but for the last: what is
    left for it is divided so that it takes the shortest time, and may leave nothing for some; but where it is the only
    one, all get a minibatch first, if there are enough.

    Args:
        minibatches: How many the epoch has, of all virtual workers together.
        lengths: W_v.
        vw: The virtual worker's number.
    """
    full, rest = divmod(minibatches, sum(lengths))
    waves = [lengths] * full
    if rest:
        least = int(not full and rest >= len(lengths))
        more = rest - least * len(lengths)
        last, _ = next(itertools.islice(_one_by_one([least] * len(lengths), lengths), more, None))
        waves.append(last)
    done = 0
    for wave in waves:
        first = done + sum(wave[:vw])
        yield range(first, first + wave[vw])
        done += sum(wave)


def dealt_samples(
    samples: int, batch_size: int, lengths: Sequence[int], vw: int, drop_last: bool = False
) -> Iterator[range]:
    """The samples of an epoch that virtual worker ``vw`` gets, wave by wave: places in the epoch's order, from 0.

    They are those of its minibatches (:func:`dealt`), each sample with one virtual worker. A last minibatch that is not
    full is the last of the virtual worker that has it. Where there are fewer minibatches than virtual workers, smaller
    ones are dealt, so that all get one; not with ``drop_last``.

    Args:
        samples: How many the epoch has.
        batch_size: Samples of a minibatch, the same everywhere.
        lengths: W_v.
        vw: The virtual worker's number.
        drop_last: Leave samples out that fill no minibatch.
    """
    if not drop_last and samples <= batch_size * (len(lengths) - 1):
        batch_size = max(1, samples // len(lengths))
    minibatches = samples // batch_size if drop_last else -(-samples // batch_size)
    for wave in dealt(minibatches, lengths, vw):
        yield range(wave.start * batch_size, min(wave.stop * batch_size, samples))


def common_waves(lengths: Sequence[int], spans: Sequence[tuple[int, int]]) -> int:
    """Waves after which no virtual worker has come to its last minibatch: after these all can cut within the epoch.

    Args:
        lengths: W_v.
        spans: Of each virtual worker, the minibatch with which its waves begin, and how many the epoch has.
    """
    return min(max(0, last - first - 1) // length for length, (first, last) in zip(lengths, spans, strict=True))


def covered(wave: int | None, common: int, length: int, first: int, last: int) -> range:
    """The minibatches of an epoch, counted from 0, in wave number ``wave`` of a virtual worker; None: in the rest.

    The rest is what comes after the waves of :func:`common_waves`; no wave covers it.

    Args:
        wave: Number of the wave, from 1.
        common: Waves after which all can cut.
        length: Minibatches of its waves.
        first: The minibatch with which waves begin.
        last: How many minibatches the epoch has.
    """
    if wave is None:
        return range(first + common * length, last)
    if wave > common:
        return range(last, last)
    return range(first + (wave - 1) * length, first + wave * length)


def _one_by_one(lengths: list[int], rates: Sequence[float]) -> Iterator[tuple[list[int], float]]:
    """``lengths``, and then with one minibatch more each time, which lengthens the wave least; with the wave's time.

    So each sum is reached with the shortest wave that is possible from the start given. The list is the same one.
    """
    seconds = max(length / rate for length, rate in zip(lengths, rates, strict=True))
    heap = [((length + 1) / rate, vw) for vw, (length, rate) in enumerate(zip(lengths, rates, strict=True))]
    heapq.heapify(heap)
    while True:
        yield lengths, seconds
        more, vw = heap[0]
        lengths[vw] += 1
        seconds = max(seconds, more)
        heapq.heapreplace(heap, ((lengths[vw] + 1) / rates[vw], vw))
