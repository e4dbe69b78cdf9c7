"""Correction of learning rates while training begins, when stale gradients do most harm (PipeMare, 2021: T1)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch.optim import Optimizer

from lightning_hetpipe.run.around_step import AroundStep, check_hooks


class Correction(NamedTuple):
    """Setting of a correction.

    Attributes:
        updates: K, after how many updates the rates are the user's own.
        least: Least tau.
    """

    updates: int
    least: int = 1


class RateCorrection(AroundStep):
    """Multiplies the learning rates of ``optimizer`` by tau^(min(t / K, 1) - 1), within its steps only.

    Schedulers, loggers and checkpoints see the rates that the user has set.

    Args:
        optimizer: The optimizer.
        setting: K, and the least tau.
        steps: Gives the largest number of optimizer steps that minibatches miss; tau is one more.
        update: Gives t, the number of updates so far.

    Raises:
        SettingError: for an optimizer that takes no hooks.
    """

    def __init__(
        self, optimizer: Optimizer, setting: Correction, steps: Callable[[], int], update: Callable[[], int]
    ) -> None:
        check_hooks(optimizer, f"lr_correction={setting.updates}")
        self._optimizer = optimizer
        self._setting = setting
        self._steps = steps
        self._update = update

    @property
    def factor(self) -> float:
        """Factor of the next update's rates."""
        left, steps = 1 - min(self._update() / self._setting.updates, 1.0), self._steps()
        return float(max(1 + steps, self._setting.least) ** -left) if steps else 1.0

    @property
    def is_secret(self) -> bool:
        return self.factor != 1.0

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Open around what a step computes, or what depends on the next one's rate."""
        factor, groups = self.factor, self._optimizer.param_groups
        before = [group["lr"] for group in groups]
        if factor != 1.0:
            for group in groups:
                group["lr"] = group["lr"] * factor
        try:
            yield
        finally:
            if factor != 1.0:
                for group, rate in zip(groups, before, strict=True):
                    group["lr"] = rate
