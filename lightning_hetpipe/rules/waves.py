"""Rules of several virtual workers: waves, clocks, shares of the data, and which server holds which parameter.

Waves, clocks and the distance between them are Wave Synchronous Parallel (laws L3 and L6, HetPipe, section 5).

A VW that waits at a cut has pushed zero for every future wave, so its clock counts as infinite: ``None`` here. An
example of three VWs, D = 0, and a VW 1 that comes to the cut early (``|``: it waits there, ``+``: all have arrived, and
every clock becomes the largest):

    wave      0   1   2   3
    VW 0      u   u   u   u   +
    VW 1      u   |           +
    VW 2      u   u   u       +

Unequal virtual workers have *shares*, which define the lengths of their waves, the bound of staleness and the division
of an epoch. With equal waves, N virtual workers run at N times the rate of the slowest. A wave of W_v minibatches, in
proportion to the rate X_v, takes equally long on each virtual worker v, and the epoch is divided in this proportion.
With W = (1, 2), the shares (1/3, 2/3), eight minibatches are dealt like this (``|``: a wave's end):

    VW 0   0     | 3     | 6
    VW 1   1 2   | 4 5   | 7
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence


def slowest(clocks: Iterable[int | None]) -> int | None:
    """Return c_global: the smallest clock, or ``None`` (infinite) if everyone waits at a cut."""
    return min((clock for clock in clocks if clock is not None), default=None)


def may_pull(c_local: int, c_global: int | None, distance: int) -> bool:
    """Return True if a VW that has pushed ``c_local`` waves may take weights and go on (HetPipe, section 5.1)."""
    return c_global is None or c_global >= c_local - distance


def may_commit(clock: int, c_global: int | None) -> bool:
    """Return True, for D = 0, if the updates of wave ``clock`` may be added because all have arrived."""
    return c_global is None or c_global > clock


def cut_after(clock: int, distance: int) -> int:
    """Return the clock at which all VWs can cut, if VW 0 asks for the cut with its update of ``clock``.

    A VW that has pulled after pushing wave ``clock + distance`` knows of the cut, since that pull waited until VW 0 had
    pushed ``clock``. No VW can be further without this pull.
    """
    return clock + 1 + distance


ENOUGH = 0.97
"""Fraction of the sum of rates at which integers are good enough."""

GAIN = 1.1
"""Ratio of throughputs for which shares change. Measured rates vary by a few percent between epochs."""


def wave_lengths(rates: Sequence[float], in_flight: int) -> tuple[int, ...]:
    """Return W_v: the smallest integers of at least Nm with which waves in lock-step reach 97 % of the sum of rates.

    ``rates`` are X_v in minibatches per second or any other unit, all positive. Smallest means the smallest sum. Of
    equal sums, the one with the shortest wave wins, and of equal times, the one whose second longest wave is shortest,
    and so on. If all times are equal, the lower number gets the minibatch. For whole optimizer steps of M minibatches,
    count both ``in_flight`` and the result in steps.
    """
    enough = ENOUGH * sum(rates)
    for total, (lengths, seconds) in enumerate(_one_by_one([in_flight] * len(rates), rates), in_flight * len(rates)):
        if total >= enough * seconds:
            return tuple(lengths)
    raise AssertionError("enough minibatches make any ratio")


def next_lengths(lengths: Sequence[int], rates: Sequence[float], in_flight: int) -> tuple[int, ...]:
    """Return W_v for the next epoch: for the measured ``rates``, or ``lengths`` again if the gain is only noise."""
    found = wave_lengths(rates, in_flight)
    return found if throughput(found, rates) > GAIN * throughput(lengths, rates) else tuple(lengths)


def whole_steps(lengths: Sequence[int], every: int) -> tuple[int, ...]:
    """Round ``lengths`` up to multiples of the ``every`` minibatches of an optimizer step."""
    return tuple(-(-length // every) * every for length in lengths)


def throughput(lengths: Sequence[int], rates: Sequence[float]) -> float:
    """Return the joint rate of virtual workers with waves in lock-step: sum(W) / max(W_v / X_v)."""
    return sum(lengths) / max(length / rate for length, rate in zip(lengths, rates, strict=True))


def staleness_bound(lengths: Sequence[int], vw: int, of: int, in_flight: int, distance: int) -> int:
    """Return the most minibatches of VW ``of`` that a minibatch of VW ``vw`` misses, if waves take equally long.

    ``lengths`` are W_v, ``distance`` is D, and ``of`` may equal ``vw``. The first Nm - 1 minibatches of a wave use
    versions from before the last synchronisation. So minibatch q <= Nm - 2 of wave c (both from 0) has only the first
    c - 1 - D waves of the others. These have gone on meanwhile by q / W_vw of a wave. The bound is
    (D + 1) W_of + q W_of / W_vw (HetPipe, section 5.2, where all W are Nm).
    """
    return -(-((distance + 1) * lengths[vw] + in_flight - 2) * lengths[of] // lengths[vw])


def dealt(minibatches: int, lengths: Sequence[int], vw: int) -> Iterator[range]:
    """Yield the minibatches of an epoch that VW ``vw`` gets, wave by wave, numbered from 0 in the epoch's order.

    ``minibatches`` is the number for all virtual workers, and ``lengths`` are W_v. Each minibatch belongs to one
    virtual worker, and all virtual workers have the same number of waves. All waves but the last are full. The last
    wave divides the remaining minibatches so that it takes the shortest time, and may leave none for some. If it is the
    only wave, all virtual workers get a minibatch first, if there are enough.
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
    """Yield the samples of an epoch that VW ``vw`` gets, wave by wave, as places from 0 in the epoch's order.

    They are the samples of its minibatches (:func:`dealt`) of ``batch_size`` samples. A last minibatch that is not full
    comes last on its virtual worker. If there are fewer minibatches than virtual workers, smaller minibatches are dealt
    so that each gets one. With ``drop_last``, only full minibatches are dealt.
    """
    if not drop_last and samples <= batch_size * (len(lengths) - 1):
        batch_size = max(1, samples // len(lengths))
    minibatches = samples // batch_size if drop_last else -(-samples // batch_size)
    for wave in dealt(minibatches, lengths, vw):
        yield range(wave.start * batch_size, min(wave.stop * batch_size, samples))


def common_waves(lengths: Sequence[int], spans: Sequence[tuple[int, int]]) -> int:
    """Return the number of waves after which no virtual worker has reached its last minibatch, so all can still cut.

    ``lengths`` are W_v. ``spans`` has each VW's minibatch with which its waves begin, and its minibatches in the epoch.
    """
    return min(max(0, last - first - 1) // length for length, (first, last) in zip(lengths, spans, strict=True))


def covered(wave: int | None, common: int, length: int, first: int, last: int) -> range:
    """Return the minibatches of an epoch (from 0) in wave ``wave`` (from 1) of a VW, or for None in the rest.

    The rest comes after the ``common`` waves of :func:`common_waves`. No wave covers it. Waves have ``length``
    minibatches and begin with minibatch ``first``, and the epoch has ``last`` minibatches.
    """
    if wave is None:
        return range(first + common * length, last)
    if wave > common:
        return range(last, last)
    return range(first + (wave - 1) * length, first + wave * length)


def _one_by_one(lengths: list[int], rates: Sequence[float]) -> Iterator[tuple[list[int], float]]:
    """Yield ``lengths`` and the wave's time, then each time with one minibatch more, which lengthens the wave least.

    So each sum is reached with the shortest possible wave. The yielded list is always the same object.
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


PLACEMENTS = ("size", "round_robin", "local")
"""Rules by which servers hold parameters (:func:`place_parameters`)."""

CANDIDATES = ("size", "local")
"""Placements among which a plan chooses. "round_robin" is left out, because it is never better than "size"."""


def place_parameters(sizes: Sequence[int], servers: int, how: str, homes: Sequence[int] = ()) -> list[list[int]]:
    """Return the ascending indices of the parameters, with bytes ``sizes``, on each server.

    Server 0 is the coordinator, beside virtual worker 0. Values of ``how``:

    - "size" gives each parameter, the largest first, to the server with the fewest bytes, so that links carry equal
      loads.
    - "round_robin" deals parameters out to servers in turn.
    - "local" leaves each parameter with its server in ``homes``, beside the stage of virtual worker 0 that holds it. If
      all virtual workers hold it on one node (the paper's ED-local, HetPipe, section 7), its updates cross no network.
      If virtual worker 0 lies on one node, or ``homes`` is empty, the coordinator has all parameters. No run goes on
      without virtual worker 0. So a machine without one of its stages has no weights to lose.
    """
    found: list[list[int]] = [[] for _ in range(servers)]
    if how == "round_robin":
        for index in range(len(sizes)):
            found[index % servers].append(index)
    elif how == "local":
        for index in range(len(sizes)):
            found[homes[index] if homes else 0].append(index)
    else:
        held = [0] * servers
        for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
            server = held.index(min(held))
            found[server].append(index)
            held[server] += sizes[index]
        for indices in found:
            indices.sort()
    return found
