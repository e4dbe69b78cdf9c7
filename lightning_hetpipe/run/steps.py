"""Lightning's steps of a fit: in its own thread, or through a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities import move_data_to_device

from lightning_hetpipe.capture.observation import refuse_leaves
from lightning_hetpipe.errors import PipelineRefusal
from lightning_hetpipe.pipeline.engine import Engine
from lightning_hetpipe.pipeline.operands import OperandsTogether
from lightning_hetpipe.pipeline.user.minibatch import Minibatch, Step
from lightning_hetpipe.pipeline.user.user_section import UserSection
from lightning_hetpipe.run.around_step import AroundStep, around_step
from lightning_hetpipe.run.driver import Driver, Opened
from lightning_hetpipe.run.evaluation import Evaluation
from lightning_hetpipe.run.extensions.minibatch_state import LossScale
from lightning_hetpipe.run.gradients import deliver
from lightning_hetpipe.run.lifecycle import Extension
from lightning_hetpipe.run.user_step import UserStep, without_graph


@dataclass(eq=False)
class Steps:
    """Steps that run as in any other strategy, in Lightning's own thread, while ``driver`` has no pipeline.

    Those in ``around`` are opened around an optimizer's steps.
    """

    driver: Driver[Minibatch]
    around: Sequence[AroundStep]

    def submit(self, number: int, args: tuple[Any, ...]) -> None:
        """Put minibatch ``number`` in flight, which ``training_step`` gets with ``args``."""
        raise NotImplementedError

    def step(self, number: int, native: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run ``native``, Lightning's own step, as minibatch ``number``."""
        return self.driver.step_inline(number, native, args)

    def backward(self, number: int, native: Callable[[], None]) -> None:
        """Run ``native``, Lightning's own backward of minibatch ``number``."""
        self.driver.backward_inline(number, native)

    def optimizer_step(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        """Open around ``optimizer``'s step."""
        return around_step(optimizer, self.around) if self.around else nullcontext()

    def validate(self, native: Callable[[], Any]) -> Any:
        """Run ``native``, Lightning's own validation loop."""
        return native()


class SpreadSteps(Steps):
    """Steps of a spread run, whose minibatches are all Lightning's own."""

    def validate(self, native: Callable[[], Any]) -> Any:
        with self.driver.evaluating(drains=False):
            return native()


@dataclass(eq=False)
class _Unlocked(AroundStep):
    """Lets other user code run while the optimizer computes, unless something ``around`` that is secret."""

    engine: Engine
    around: Sequence[AroundStep]

    def stepping(self) -> AbstractContextManager[None]:
        return nullcontext() if any(each.is_secret for each in self.around) else self.engine.computing()


@dataclass(eq=False)
class PipelinedSteps(Steps, Extension):
    """Steps of minibatches that ``engine`` computes ahead of Lightning's loop.

    Attributes:
        last: The minibatch of the last step, at first the one that has run in Lightning's own thread. An optimizer that
            begins it again is refused.
        moved: Whether the look-ahead may have moved batches to another device than the engine's root device.
        apart: Whether modules were taken apart, whose own code may make leaves that want no gradient.
    """

    trainer: L.Trainer
    engine: Engine
    training_step: UserStep
    loss_scale: LossScale
    evaluation: Evaluation
    last: int
    moved: bool
    apart: bool

    def __post_init__(self) -> None:
        self._finished: Minibatch
        if self.engine.in_flight > 1:
            self.around = [*self.around, _Unlocked(self.engine, self.around)]

    def epoch_begins(self, first: int) -> None:
        self.last = -1  # a search for a learning rate begins with the same number again

    def user_step(self, minibatch: int) -> AbstractContextManager[None]:
        """Let user code meet live tensors, such as gradients, on the stages' devices."""
        return OperandsTogether(stage.device for stage in self.engine.stages)

    def submit(self, number: int, args: tuple[Any, ...]) -> None:
        if self.moved:
            args = move_data_to_device(args, self.engine.root_device)

        def start(context: Opened, section: UserSection) -> int:
            module: L.LightningModule = self.trainer.lightning_module
            step = Step(
                run=partial(self.training_step.run, number, args),
                check=lambda total, ours: refuse_leaves(module, ours, total, made_inside=self.apart),
                context=context,
                section=section,
            )
            self.engine.submit(number, step)
            return self.engine.minibatches[number].weights.version

        self.driver.launch(number, start)

    def step(self, number: int, native: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Wait for minibatch ``number``."""
        if number == self.last:
            raise PipelineRefusal(
                f"{type(self.trainer.optimizers[0]).__name__} evaluates the loss several times in one step, and a"
                " pipeline runs each minibatch once; use another optimizer"
            )
        self.last = number
        if number not in self.engine.minibatches:
            self.driver.publish(number - 1)
            self.submit(number, args)
        self._finished = self.driver.finish(number, args)
        return without_graph(self._finished.output)

    def backward(self, number: int, native: Callable[[], None]) -> None:
        """Hand the minibatch's gradients, which are there, to Lightning."""
        found = self._finished.gradients
        deliver(found, self.loss_scale.factor(self._finished.number))
        found.clear()  # whoever still has the minibatch must not keep them beyond the next step
        del self._finished
        self.engine.delivered(number)
        self.driver.offer()

    def validate(self, native: Callable[[], Any]) -> Any:
        with self.driver.evaluating():
            return self.evaluation.run(native)
