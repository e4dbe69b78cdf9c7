"""State that each minibatch in flight has of its own: the Trainer's counters, random numbers, the loss scale.

Modules that were taken apart have generators of their own (:class:`ModulesApart`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import Tensor, nn

from lightning_hetpipe.lightning_private import counters, counters_ahead, set_counters
from lightning_hetpipe.pipeline.random.generators import RandomGenerators, attached
from lightning_hetpipe.pipeline.user.user_section import ProcessSection, ProcessState, SectionBetween, UserSection
from lightning_hetpipe.run.lifecycle import Around, Extension


class TrainerCounters(Extension):
    """Shows user code of a minibatch the counters of its own step, and lets its stop request take effect there.

    These are ``trainer.global_step`` and what the loop counts, and ``trainer.should_stop``.
    """

    def __init__(self, trainer: L.Trainer) -> None:
        self._trainer = trainer
        self._stops: dict[int, Callable[[], bool]] = {}  # tell whether minibatches in flight have asked to stop

    @contextmanager
    def transferring(self, minibatch: int) -> Iterator[None]:
        """The batch's transfer comes before its minibatch counts as begun."""
        loops = counters(self._trainer)
        begun, in_epoch, steps = counters_ahead(self._trainer, minibatch)
        set_counters(self._trainer, (begun - 1, in_epoch - 1, steps))
        try:
            yield
        finally:
            set_counters(self._trainer, loops)

    def section(self, minibatch: int) -> UserSection:
        trainer, own, stop = self._trainer, counters_ahead(self._trainer, minibatch), False

        def exchange() -> None:
            nonlocal own, stop
            there = counters(trainer)
            set_counters(trainer, own)
            own, stop, trainer.should_stop = there, trainer.should_stop, stop

        self._stops[minibatch] = lambda: stop
        return SectionBetween(exchange, exchange)

    def arrived(self, minibatch: int) -> None:
        if self._stops.pop(minibatch, bool)():
            self._trainer.should_stop = True

    def discarded(self) -> None:
        self._stops.clear()


@dataclass(eq=False)
class RandomStates(Extension):
    """Swaps in what the user code of a minibatch has of the process: at its beginning ``state`` of its number."""

    state: Callable[[int], ProcessState]

    def section(self, minibatch: int) -> UserSection:
        return ProcessSection(self.state(minibatch))


class ModulesApart(Extension):
    """Has ``modules`` draw from the minibatch's generators, as they would in a stage (law L7), unless they set a seed.

    These are the outermost ones, by their paths, or none. ``pieces`` are the pipelined modules, also those in them.
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], pieces: Collection[nn.Module], generators: RandomGenerators
    ) -> None:
        self._generators = generators
        self._attached = ExitStack()
        self._attached.enter_context(attached(modules, _inside(pieces)))

    def user_step(self, minibatch: int) -> Around:
        return self._generators.minibatch(minibatch, in_user_code=True)

    def closed(self) -> None:
        self._attached.close()


def user_parts(modules: Iterable[nn.Module], pieces: Iterable[nn.Module]) -> list[nn.Module]:
    """The parts of ``modules``, outside the ``pieces``, whose own code runs as user code and may set attributes."""
    inside = _inside(pieces)
    found = {part: None for module in modules for part in module.modules() if part not in inside}
    return [part for part in found if not type(part).__module__.startswith("torch.nn.modules.")]


def _inside(pieces: Iterable[nn.Module]) -> set[nn.Module]:
    return {part for piece in pieces for part in piece.modules()}


class LossScale:
    """The scale of ``precision``'s GradScaler, at which losses are differentiated and gradients delivered.

    A GradScaler changes its scale after steps, so it belongs to a version as weights do: minibatch p takes it when it
    is submitted, which is at its version, and not when its loss happens to be there. Its gradients are then those of
    an older scale than the one by which the optimizer's step divides; :meth:`factor` makes up for that. Gradients that
    are not finite stay so, and the step is skipped.

    Args:
        precision: Without a scaler, all scales are 1.
        waiting: Opened while the scale comes from its device.
    """

    def __init__(self, precision: Precision, waiting: Callable[[], AbstractContextManager[None]]) -> None:
        scaler = precision.scaler if isinstance(precision, MixedPrecision) else None
        self._scaler: Any = scaler or torch.amp.GradScaler("cpu", enabled=False)
        self._waiting = waiting
        self._of: dict[int, float] = {}

    def take(self, minibatch: int) -> None:
        """Take the present scale for ``minibatch``, which is put in flight."""
        self._of[minibatch] = self._present()

    def scaled(self, minibatch: int, loss: Tensor) -> Tensor:
        """``loss`` of ``minibatch``, times its scale."""
        if not self._scaler.is_enabled():
            return loss
        # A tensor as the scaler's own is: a number would leave a loss in half precision there, and that overflows.
        return loss * torch.full((), self._of[minibatch], dtype=torch.float32, device=loss.device)

    def factor(self, minibatch: int) -> float:
        """Factor that makes the gradients of ``minibatch`` those of the present scale."""
        return self._present() / self._of.pop(minibatch)

    def _present(self) -> float:
        if not self._scaler.is_enabled():
            return 1.0
        with self._waiting():
            return float(self._scaler.get_scale())
