"""A record of what takes place when, for pictures and traces, in bounded memory.

Threads of stages, of minibatches and Lightning's own append to lists of their step. This is atomic in Python, so no
thread waits. All times are of one clock, ``time.perf_counter``. Beside layers that fill the processor's caches each
call of Python takes some 5 us (*measured*: 68 more calls for a minibatch, 0.35 ms). So events are noted in as few calls
as possible, and made into spans when they are read.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from lightning_hetpipe.pipeline.stage import BeforePass
from lightning_hetpipe.pipeline.user.user_section import UserSection
from lightning_hetpipe.rules.schedule import EVALUATE, LIGHTNING, STEP, USER_CODE, Row, Span

KEPT = 100
"""Number of last minibatches of which everything is kept, without a window. A pipeline's pattern repeats every Nm
minibatches, so they hold several repetitions, its start or its end. With eight stages they take a fifth of a megabyte
per hundred, and a trace of a megabyte, which opens at once."""
Noted = tuple[Row, str, int, float, float]
"""Fields of a :class:`Span`."""

EVALUATED = 5_000
"""Number of last spans of evaluations that are kept, because an evaluation may have any number of batches."""


@dataclass(frozen=True)
class Window:
    """Minibatches of which everything is kept: ``first`` to ``last``, and of these the last ``most``."""

    first: int = 1
    last: int | None = None
    most: int = KEPT

    def __contains__(self, minibatch: int) -> bool:
        return self.first <= minibatch and (self.last is None or minibatch <= self.last)


class Recorder:
    """Record of one run: spans of stages and of Lightning's thread within the ``window``. ``zero`` is the start by
    ``perf_counter``, ``zero_date`` the start in seconds since 1970."""

    def __init__(self, window: Window) -> None:
        self.zero = time.perf_counter()
        self.zero_date = time.time()
        self.window = window
        self._steps: dict[int, list[Noted]] = {}
        self._versions: dict[int, int] = {}
        self._evaluated: deque[Noted] = deque(maxlen=EVALUATED)
        self._latest = 0
        self._doing: list[tuple[str, int]] = []  # by Lightning's thread, the innermost last
        self._since = 0.0

    # Lightning's thread.

    def submitted(self, minibatch: int, version: int) -> None:
        """Record that ``minibatch``, the next one, was put in flight on the weights of ``version``."""
        if minibatch <= self._latest:  # Lightning has gone back, as after a search for a learning rate
            self.forget(after=minibatch - 1)
        self._latest = minibatch
        if minibatch in self.window:
            self._steps.setdefault(minibatch, [])
            self._versions[minibatch] = version
            while len(self._versions) > self.window.most:
                oldest = next(iter(self._versions))
                del self._versions[oldest]
                self._steps.pop(oldest, None)

    def forget(self, after: int) -> None:
        """Drop the record of discarded minibatches later than ``after``, whose numbers will be used again."""
        for minibatch in [number for number in list(self._steps) if number > after]:
            self._versions.pop(minibatch, None)
            del self._steps[minibatch]
        self._latest = min(self._latest, after)

    def enter(self, work: str, minibatch: int) -> None:
        """Begin ``work`` of Lightning's thread, which interrupts its present work."""
        now, doing = time.perf_counter(), self._doing
        if doing:
            before, of = doing[-1]
            (self._steps.get(of) or self._step(of)).append((LIGHTNING, before, of, self._since, now))
            if before == STEP:
                doing.pop()
        doing.append((work, minibatch))
        self._since = now

    def leave(self, then_step: bool = False) -> None:
        """End the work. The interrupted work goes on, or with ``then_step`` Lightning's step until :meth:`enter`."""
        now = time.perf_counter()
        work, minibatch = self._doing.pop()
        (self._steps.get(minibatch) or self._step(minibatch)).append((LIGHTNING, work, minibatch, self._since, now))
        if then_step and not self._doing:
            self._doing.append((STEP, minibatch))
        self._since = now

    def pause(self) -> None:
        """Extend the open span of Lightning's thread to the present, for readers. It may go on."""
        if self._doing:
            self.add(LIGHTNING, *self._doing[-1], self._since)
            self._since = time.perf_counter()

    # Any thread.

    def add(self, row: Row, work: str, minibatch: int, start: float) -> None:
        """Record ``work`` in ``row`` from ``start`` until now."""
        now = time.perf_counter()
        if work == EVALUATE:
            if self._latest in self.window:
                self._evaluated.append((row, work, minibatch, start, now))
            return
        (self._steps.get(minibatch) or self._step(minibatch)).append((row, work, minibatch, start, now))

    def _step(self, minibatch: int) -> list[Noted]:
        """Return the list of ``minibatch``, or a list that nobody reads if nothing is kept of it."""
        if minibatch > self._latest and minibatch in self.window:  # its batch is fetched, or it has begun just now
            return self._steps.setdefault(minibatch, [])
        return self._steps.get(minibatch, [])

    def passes(self, before: BeforePass | None) -> BeforePass:
        """Make the function that stages call before they compute: it records the pass, and calls ``before``."""
        add, clock = self.add, time.perf_counter

        def begins(stage: int, work: str, minibatch: int) -> Callable[[], None]:
            start = clock()
            after = None if before is None else before(stage, work, minibatch)

            def passed() -> None:
                if after is not None:
                    after()
                add(stage, work, minibatch, start)

            return passed

        return begins

    def section(self, minibatch: int) -> UserSection:
        """Return the recorder of each section of the user code of ``minibatch``."""
        start = 0.0

        def begin() -> None:
            nonlocal start
            start = time.perf_counter()

        return UserSection(begin, lambda: self.add(USER_CODE, "training_step", minibatch, start))

    # Whoever reads.

    def spans(self) -> tuple[Span, ...]:
        """Return the kept spans, sorted by start, in seconds since :attr:`zero`."""
        noted = [each for number in list(self._versions) for each in list(self._steps.get(number, ()))]
        if noted:
            first = min(start for *_, start, _ in noted)
            noted += [each for each in list(self._evaluated) if each[3] >= first]
        noted.sort(key=lambda each: each[3])
        zero = self.zero
        return tuple(Span(row, work, minibatch, start - zero, end - zero) for row, work, minibatch, start, end in noted)

    def versions(self) -> dict[int, int]:
        """Return the version that each minibatch of :meth:`spans` used."""
        return dict(self._versions)
