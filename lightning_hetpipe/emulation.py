"""Devices that are slower than the host: of clusters that are not at hand, and for tests and benchmarks.

A stage that is *padded* computes what it always does, and then sleeps until the time is up that its device would take.
It holds neither the GIL nor the lock over user code meanwhile, so any number of emulated devices run at once on a few
cores, as long as what they really compute fits into those.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Protocol

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.pipeline.stage import BeforePass
from lightning_hetpipe.settings import Bounds, CheckedRecord

OVERSLEEP = 0.001
"""Seconds, at most, that a pad is shorter because the one before it on this stage was slept too long.

Sleeping ends a little late: without this, a stage would be slower than told. What is later than that is no matter of
timers (somebody held the CPU or the GIL), and stays.
"""


_LOCK = threading.Lock()
"""Held for a moment while stages take turns on a device; no attribute, so that a strategy can be copied."""


@dataclass(frozen=True)
class Pad(CheckedRecord):
    """Seconds that an emulated stage takes.

    Attributes:
        forward: Seconds of its forward, in training and in evaluation.
        backward: Seconds of its backward. On the last stage the loss, which comes between the two, is part of them, as
            it is of T_max; what it takes to hand over to user code and back comes on top.
    """

    forward: Annotated[float, Bounds(0), "a number of seconds, 0 or more"]
    backward: Annotated[float, Bounds(0), "a number of seconds, 0 or more"]


@dataclass
class Padded:
    """Record of one emulated stage.

    Attributes:
        passes: Forwards and backwards so far.
        overruns: Those that computed for longer than they were to take: the emulated device is slower than told.
        longest: Seconds by which the worst of them did.
        computed: Seconds of computing in all passes and losses, without the sleep.
        late: Seconds by which passes have ended later than they were to, all together: they overran, or woke up late.
    """

    passes: int = 0
    overruns: int = 0
    longest: float = 0.0
    computed: float = 0.0
    late: float = 0.0


class Emulation:
    """Pads the passes of stages; the stages' threads call it, see ``StageSettings.before_pass``.

    Args:
        pads: Of each stage.
        now, sleep: The clock, in seconds.
    """

    def __init__(
        self,
        pads: Sequence[Pad],
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._now = now
        self._sleep = sleep
        self.begin(pads)

    def begin(self, pads: Sequence[Pad], devices: Sequence[Hashable] | None = None) -> None:
        """Stages are those of ``pads``, and none has computed yet.

        Args:
            pads: Of each stage.
            devices: Of each stage; by default each has its own. Stages on one device take turns there, in the order in
                which their passes begin.
        """
        self._devices = [*range(len(pads))] if devices is None else [*devices]
        self._until: dict[Hashable, float] = {}  # when a device is done with what it was given
        self.stages = [Padded() for _ in pads]
        self._pads = list(pads)
        self._late = [0.0 for _ in pads]
        self._loss = [0.0 for _ in pads]  # seconds of the one that has ended, until the backward begins

    def pad(self, stage: int) -> Pad | None:
        """Pad of ``stage``, for a stage in another process; None where it has none."""
        return self._pads[stage] if stage < len(self._pads) else None

    def mirror(self, stage: int, padded: Padded) -> None:
        """Take the record of ``stage``, which is emulated in another process."""
        self.stages[stage] = padded

    def __call__(self, stage: int, work: str, minibatch: int) -> Callable[[], None]:
        """A pass begins; what is returned sleeps until it is over.

        Raises:
            SettingError: where the stage has no pad.
        """
        if stage >= len(self._pads):
            raise SettingError(f"{len(self._pads)} stages are padded, and there is a stage {stage}; give each a Pad")
        if work == "loss":
            return partial(self._lost, stage, self._now())
        pad, began = self._pads[stage], self._now()
        seconds = pad.backward if work == "backward" else pad.forward
        if work == "backward":
            loss, self._loss[stage] = self._loss[stage], 0.0
            began -= loss
        device = self._devices[stage]
        with _LOCK:
            start = max(began, self._until.get(device, began))
            self._until[device] = start + seconds - self._late[stage]
        return partial(self._fill, stage, began, start, seconds)

    def _lost(self, stage: int, began: float) -> None:
        self._loss[stage] = self._now() - began

    def _fill(self, stage: int, began: float, start: float, seconds: float) -> None:
        now, padded = self._now(), self.stages[stage]
        padded.passes += 1
        padded.computed += now - began
        over = now - start - seconds
        if over > 0:
            padded.overruns += 1
            padded.longest = max(padded.longest, over)
        end = start + seconds - self._late[stage]
        if now < end:
            self._sleep(end - now)
            now = self._now()
        padded.late += now - start - seconds
        self._late[stage] = 0.0 if over > 0 else min(now - end, OVERSLEEP)

    def check(self, tolerated: float = 0.0) -> None:
        """Warns of stages that were slower than told in more than the ``tolerated`` share of their passes.

        Raises:
            SettingError: where a pad belongs to no stage.
        """
        if any(padded.passes for padded in self.stages) and not all(padded.passes for padded in self.stages):
            idle = next(index for index, padded in enumerate(self.stages) if not padded.passes)
            raise SettingError(f"{len(self._pads)} stages are padded, and there is no stage {idle}; leave its Pad out")
        for index, padded in enumerate(self.stages):
            if padded.overruns > tolerated * padded.passes:
                warnings.warn(
                    f"stage {index} computed for longer than it is to take in {padded.overruns} of {padded.passes}"
                    f" passes, by up to {1000 * padded.longest:.1f} ms: it is slower than what it emulates",
                    stacklevel=4,
                )


class Strategy(Protocol):
    """A strategy whose stages can be padded."""

    _before_pass: BeforePass | None


@contextmanager
def padded(strategy: Strategy, pads: Sequence[Pad]) -> Iterator[Emulation]:
    """Within it, the stages of this process's virtual worker take as long as ``pads`` say, one for each.

    The first minibatch of a fit, which is watched, runs before there are stages, and so without pads.

    Raises:
        SettingError: in ``fit`` if a stage has no pad, and at the end if a pad has no stage.
    """
    before = strategy._before_pass
    emulation = strategy._before_pass = Emulation(pads)
    try:
        yield emulation
    finally:
        strategy._before_pass = before
    emulation.check()
