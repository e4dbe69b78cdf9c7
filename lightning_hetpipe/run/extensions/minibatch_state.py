"""State of each minibatch in flight: the Trainer's counters, random numbers, the loss scale."""

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
from lightning_hetpipe.pipeline.user.user_section import ProcessSection, UserSection
from lightning_hetpipe.run.lifecycle import Around, Extension


class TrainerCounters(Extension):
    """The Trainer's counters of a minibatch's own step, for its user code: ``trainer.global_step`` and the loop's
    counts. A request to stop (``trainer.should_stop``) takes effect at the minibatch's own step."""

    def __init__(self, trainer: L.Trainer) -> None:
        self._trainer = trainer
        self._stops: dict[int, Callable[[], bool]] = {}  # tell whether minibatches in flight have asked to stop

    @contextmanager
    def transferring(self, minibatch: int) -> Iterator[None]:
        """Open a context around the batch's transfer, in which its minibatch does not count as begun."""
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
        return UserSection(exchange, exchange)

    def arrived(self, minibatch: int) -> None:
        if self._stops.pop(minibatch, bool)():
            self._trainer.should_stop = True

    def discarded(self) -> None:
        self._stops.clear()


@dataclass(eq=False)
class RandomStates(Extension):
    """Process-wide state for the user code of each minibatch, with random numbers of ``generators``."""

    generators: RandomGenerators

    def section(self, minibatch: int) -> UserSection:
        return ProcessSection(self.generators.state(minibatch))


class ModulesApart(Extension):
    """Modules taken apart that draw from the minibatch's generators, as in a stage (law L7), unless they set a seed.
    ``modules`` are the outermost ones by path. ``pieces`` are pipelined modules, which may lie in them."""

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
    """Return the parts of ``modules`` outside the ``pieces`` whose own code is user code and may set attributes."""
    inside = _inside(pieces)
    found = {part: None for module in modules for part in module.modules() if part not in inside}
    return [part for part in found if not type(part).__module__.startswith("torch.nn.modules.")]


def _inside(pieces: Iterable[nn.Module]) -> set[nn.Module]:
    return {part for piece in pieces for part in piece.modules()}


class LossScale:
    """The scale of ``precision``'s GradScaler, at which losses are differentiated and gradients delivered.

    A GradScaler changes its scale after steps, so it belongs to a version as weights do. Minibatch p takes the scale
    when it is submitted, and so at its version, not when its loss is computed. The optimizer's step divides its
    gradients by a later scale, for which :meth:`factor` makes up. Gradients that are not finite stay so. Without a
    scaler, all scales are 1. ``waiting`` is opened while the scale comes from its device.
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
        """Return ``loss`` times the scale of ``minibatch``."""
        if not self._scaler.is_enabled():
            return loss
        # The factor is a tensor, as the scaler's own: with a number, a loss in half precision would overflow.
        return loss * torch.full((), self._of[minibatch], dtype=torch.float32, device=loss.device)

    def factor(self, minibatch: int) -> float:
        """Return the factor that brings the gradients of ``minibatch`` to the present scale."""
        return self._present() / self._of.pop(minibatch)

    def _present(self) -> float:
        if not self._scaler.is_enabled():
            return 1.0
        with self._waiting():
            return float(self._scaler.get_scale())
