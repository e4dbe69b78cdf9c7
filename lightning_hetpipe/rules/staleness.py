"""Learning rates that stale gradients bear.

Gradient descent with momentum mu on a loss of curvature h, with gradients that are s >= 1 steps old, is stable where

    effective rate * s * h <= 1,    effective rate = lr / (1 - mu)

whatever mu is, with or without Nesterov's look-ahead; without staleness it is up to lr * h = 2 (1 + mu). So staleness
takes away what momentum adds to stability: for mu = 0.9 and s = 3 the largest stable lr * h falls from 3.8 to 0.035.
The bound holds for the sum of N virtual workers, too, with N * lr for lr and the global staleness for s.
"""

from __future__ import annotations

from dataclasses import dataclass

LIMIT = 0.1
"""Bound of effective rate times staleness, for weights that are stashed: enough for curvatures up to 10. Above it nets
without BatchNorm were seen to learn worse, with whatever momentum (docs/staleness.md)."""

NORMALISED = 0.002
"""The same where steps are about as long as the rate, whatever the gradients, as Adam's are: a GPT was seen to learn
worse above it."""

BATCH_NORM = 5.0
"""Factor of these bounds in a model with BatchNorm, whose gradients become smaller where weights grow."""

PREDICTED = 3.0
"""Factor where weights are predicted and learning rates are lower at the beginning, which Adam does without."""

PREDICTED_AND_CLIPPED = 6.0
"""Factor where weights are predicted and gradients are clipped, as long as steps are as long as gradients are large."""


@dataclass(frozen=True)
class Stepped:
    """A parameter group, by what its steps are.

    Attributes:
        lr: Its learning rate, the largest where a schedule changes it.
        momentum: mu of heavy-ball momentum; 0 for none.
        dampening: What a new gradient's weight in the momentum lacks to 1.
        normalised: Whether gradients are divided by their size, as Adam and RMSprop do.
    """

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    normalised: bool = False

    @property
    def gain(self) -> float:
        """The effective rate over lr."""
        if not self.momentum:
            return 1.0
        return (1 - self.dampening) / (1 - self.momentum) if self.momentum < 1 else float("inf")


def steps_behind(minibatches: int, accumulate: int) -> int:
    """Staleness in optimizer steps, of which each takes the gradients of ``accumulate`` minibatches."""
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
    """The learning rate that ``group`` should have at most, where its own is larger; None where there is no worry.

    Args:
        group: What is stepped.
        steps: How many steps old a gradient may be.
        workers: How many virtual workers' updates are added.
        clipped: Whether gradients are clipped.
        predicted: Whether weights are predicted.
        corrected: Whether learning rates are lower at the beginning.
        batch_norm: Whether the model has BatchNorm.
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
