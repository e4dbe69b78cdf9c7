"""Learning rates that stale gradients bear.

Gradient descent with momentum mu on a loss of curvature h, with gradients that are s >= 1 steps old, is stable where

    effective rate * s * h <= 1,    effective rate = lr / (1 - mu)

whatever mu is, with or without Nesterov's look-ahead; without staleness it is up to lr * h = 2 (1 + mu). So staleness
takes away what momentum adds to stability: for mu = 0.9 and s = 3 the largest stable lr * h falls from 3.8 to 0.035.
The bound holds for the sum of N virtual workers, too, with N * lr for lr and the global staleness for s.
"""

from __future__ import annotations

from dataclasses import dataclass

MOMENTUM = 0.9
"""Least momentum to warn of: the effective rate is ten times lr or more, so that recipes that train plainly fail."""

STEPS = 2
"""Least staleness to warn of: such recipes were seen to fail (docs/staleness.md); at 1 they lost little."""

CLIPPED_STEPS = 4
"""Least staleness where gradients are clipped: that was seen to be enough for three steps, and not for seven."""

LIMIT = 0.1
"""Bound of effective rate times staleness: enough for curvatures up to 10, with which plain gradient descent without
momentum bears learning rates up to 0.2."""

NORMALISED = 0.01
"""Bound for RMSprop, whose steps are about as long as the rate, whatever the gradients: clipping changes nothing."""


PREDICTED = 2.0
"""Factor of these bounds where weights are predicted: on a quadratic it is 2.4 to 1.6 for two to seven steps."""

PREDICTED_AND_EASED = 15.0
"""Factor where learning rates are lower at the beginning, or gradients are clipped, too: that was seen to be enough."""


@dataclass(frozen=True)
class Momentum:
    """A parameter group with heavy-ball momentum.

    Attributes:
        lr: Its learning rate, the largest where a schedule changes it.
        momentum: mu.
        dampening: What a new gradient's weight in the momentum lacks to 1.
        normalised: Whether gradients are divided by their size, as RMSprop does.
    """

    lr: float
    momentum: float
    dampening: float = 0.0
    normalised: bool = False

    @property
    def gain(self) -> float:
        """The effective rate over lr."""
        return (1 - self.dampening) / (1 - self.momentum) if self.momentum < 1 else float("inf")


def steps_behind(minibatches: int, accumulate: int) -> int:
    """Staleness in optimizer steps, of which each takes the gradients of ``accumulate`` minibatches."""
    return -(-minibatches // accumulate)


def bearable_rate(
    group: Momentum,
    steps: int,
    workers: int = 1,
    *,
    clipped: bool = False,
    predicted: bool = False,
    corrected: bool = False,
) -> float | None:
    """The learning rate that ``group`` should have at most, where its own is larger; None where there is no worry.

    Args:
        group: What is stepped.
        steps: How many steps old a gradient may be.
        workers: How many virtual workers' updates are added.
        clipped: Whether gradients are clipped.
        predicted: Whether weights are predicted.
        corrected: Whether learning rates are lower at the beginning.
    """
    enough = CLIPPED_STEPS if clipped and not group.normalised else STEPS
    if round(group.momentum, 6) < MOMENTUM or steps < enough:  # rounded, as it may be of single precision
        return None
    limit = NORMALISED if group.normalised else LIMIT
    if predicted:
        limit *= PREDICTED_AND_EASED if clipped or corrected else PREDICTED
    most = limit / (steps * workers * group.gain) if group.gain else float("inf")
    return most if group.lr > most * (1 + 1e-6) else None
