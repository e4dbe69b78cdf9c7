"""Learning rates that stale gradients bear.

Gradient descent with momentum mu on a loss of curvature h, with gradients that are s >= 1 steps old, is stable if

    effective rate * s * h <= 1,    effective rate = lr / (1 - mu)

for any mu, with or without Nesterov's look-ahead. Without staleness the bound is lr * h = 2 (1 + mu). So staleness
takes away the stability that momentum adds. For mu = 0.9 and s = 3, the largest stable lr * h falls from 3.8 to 0.035.
For the sum of N virtual workers, the bound holds with N * lr and the global staleness.
"""

from __future__ import annotations

from dataclasses import dataclass

LIMIT = 0.1
"""Bound of effective rate times staleness for stashed weights, which is enough for curvatures up to 10.

Above it, nets without BatchNorm learned worse with any momentum (docs/staleness.md).
"""

NORMALISED = 0.002
"""The bound for optimizers such as Adam, whose steps are about as long as the rate. A GPT learned worse above it."""

BATCH_NORM = 5.0
"""Factor of these bounds in a model with BatchNorm, whose gradients become smaller as weights grow."""

PREDICTED = 3.0
"""Factor if weights are predicted and learning rates are lower at the beginning, which Adam does not need."""

PREDICTED_AND_CLIPPED = 6.0
"""Factor if weights are predicted and gradients are clipped, for steps in proportion to gradients."""


@dataclass(frozen=True)
class Stepped:
    """A parameter group, described by its steps.

    Attributes:
        lr: Learning rate, the largest one of a schedule.
        momentum: mu of heavy-ball momentum, or 0.
        dampening: 1 minus the weight of a new gradient in the momentum.
        normalised: Whether gradients are divided by their size, as in Adam and RMSprop.
    """

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    normalised: bool = False

    @property
    def gain(self) -> float:
        """The effective rate divided by lr."""
        if not self.momentum:
            return 1.0
        return (1 - self.dampening) / (1 - self.momentum) if self.momentum < 1 else float("inf")


def steps_behind(minibatches: int, accumulate: int) -> int:
    """Convert staleness to optimizer steps, each of which takes the gradients of ``accumulate`` minibatches."""
    return -(-minibatches // accumulate)


def bearable_rate(
    group: Stepped,
    steps: int,
    workers: int = 1,
    *,
    clipped: bool = False,
    predicted: bool = False,
    corrected: bool = False,
    batch_norm: bool = False,
) -> float | None:
    """Return the largest bearable learning rate of ``group`` if its own rate is larger, else None.

    Args:
        steps: Largest age of a gradient in steps.
        workers: Number of virtual workers whose updates are added.
        corrected: Whether ``lr_correction`` lowers learning rates at the beginning.
    """
    if not steps:
        return None
    limit = (NORMALISED if group.normalised else LIMIT) * (BATCH_NORM if batch_norm else 1)
    if predicted and clipped and not group.normalised:
        limit *= PREDICTED_AND_CLIPPED
    elif predicted and (corrected or group.normalised):
        limit *= PREDICTED
    most = limit / (steps * workers * group.gain) if group.gain else float("inf")
    return most if group.lr > most * (1 + 1e-6) else None
