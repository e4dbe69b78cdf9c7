"""Emulation of devices that are slower than the host: devices that are not at hand, or for tests and benchmarks.

A *padded* stage computes as always, and then sleeps until its device's time is over. Meanwhile it holds neither the GIL
nor the lock over user code. So any number of emulated devices run at once on a few cores, if their real computation
fits there.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.settings import Bounds, CheckedRecord

OVERSLEEP = 0.001
"""Most seconds by which a pad is shortened because the previous pad on this stage slept too long.

Sleeping ends a little late, so without this correction a stage would be too slow. A larger delay does not come from
timers (something held the CPU or the GIL), and stays.
"""

_LOCK = threading.Lock()
"""Held for a moment while stages take turns on a device. It is no attribute, so that a strategy can be copied."""


@dataclass(frozen=True)
class Pad(CheckedRecord):
    """Seconds that an emulated stage takes: ``forward`` in training and in evaluation, and ``backward``.

    On the last stage ``backward`` includes the loss, as in T_max, but not the hand-over to user code and back.
    """

    forward: Annotated[float, Bounds(0), "a number of seconds, 0 or more"]
    backward: Annotated[float, Bounds(0), "a number of seconds, 0 or more"]


@dataclass
class Padded:
    """Record of one emulated stage.

    Attributes:
        passes: Number of forwards and backwards so far.
        overruns: Passes that computed for too long: the emulated device is slower than declared.
        longest: Seconds by which the worst overrun was too long.
        late: Seconds by which passes ended too late, in sum, because of overruns or late wake-ups.
    """

    passes: int = 0
    overruns: int = 0
    longest: float = 0.0
    late: float = 0.0


class Emulation:
    """Padding of stages' passes. The stages' threads call it, see ``StageSettings.before_pass``.

    ``pads`` has a pad for each stage. ``now`` and ``sleep`` are a clock in seconds.
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
        """Start with new ``pads``, one for each stage, and empty records.

        ``devices`` has the device of each stage. By default each stage has its own. Stages on one device take turns in
        the order in which their passes begin.
        """
        self._devices = [*range(len(pads))] if devices is None else [*devices]
        self._until: dict[Hashable, float] = {}  # when a device is done with what it was given
        self.stages = [Padded() for _ in pads]
        self._pads = list(pads)
        self._late = [0.0 for _ in pads]
        self._loss = [0.0 for _ in pads]  # seconds of the one that has ended, until the backward begins

    def pad(self, stage: int) -> Pad | None:
        """Return the pad of ``stage`` for a stage in another process, or None."""
        return self._pads[stage] if stage < len(self._pads) else None

    def __call__(self, stage: int, work: str, minibatch: int) -> Callable[[], None]:
        """Begin a pass, and return a function that sleeps until the pass is over.

        Raises:
            SettingError: if the stage has no pad.
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
        return partial(self._fill, stage, start, seconds)

    def _lost(self, stage: int, began: float) -> None:
        self._loss[stage] = self._now() - began

    def _fill(self, stage: int, start: float, seconds: float) -> None:
        now, padded = self._now(), self.stages[stage]
        padded.passes += 1
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
        """Warn about stages that were too slow in more than the ``tolerated`` fraction of their passes.

        Raises:
            SettingError: if a pad belongs to no stage.
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
