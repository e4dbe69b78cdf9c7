"""Lightning's steps of a fit: in its own thread, or through a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
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


class Steps:
    """Steps that run as in any other strategy, in Lightning's own thread, while ``driver`` has no pipeline.

    Args:
        driver: Raises the events.
        around: What is opened around an optimizer's steps.
    """

    def __init__(self, driver: Driver[Minibatch], around: Sequence[AroundStep] = ()) -> None:
        self._driver = driver
        self._around = around

    def submit(self, number: int, args: tuple[Any, ...]) -> None:
        """Put minibatch ``number`` in flight, which ``training_step`` gets with ``args``."""
        raise NotImplementedError

    def step(self, number: int, native: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run ``native``, Lightning's own step, as minibatch ``number``."""
        return self._driver.step_inline(number, native, args)

    def backward(self, number: int, native: Callable[[], None]) -> None:
        """Run ``native``, Lightning's own backward of minibatch ``number``."""
        self._driver.backward_inline(number, native)

    def optimizer_step(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        """Open around ``optimizer``'s step."""
        return around_step(optimizer, self._around) if self._around else nullcontext()

    def validate(self, native: Callable[[], Any]) -> Any:
        """Run ``native``, Lightning's own validation loop."""
        return native()


class SpreadSteps(Steps):
    """Steps of a spread run, whose minibatches are all Lightning's own."""

    def validate(self, native: Callable[[], Any]) -> Any:
        with self._driver.evaluating(drains=False):
            return native()


class _Unlocked(AroundStep):
    """Lets other user code run while the optimizer computes, unless something ``around`` that is secret."""

    def __init__(self, engine: Engine, around: Sequence[AroundStep]) -> None:
        self._engine = engine
        self._around = around

    def stepping(self) -> AbstractContextManager[None]:
        return nullcontext() if any(each.is_secret for each in self._around) else self._engine.computing()


class PipelinedSteps(Steps, Extension):
    """Steps of minibatches that ``engine`` computes ahead of Lightning's loop.

    Args:
        trainer: Lightning's.
        driver: Has started ``engine``.
        engine: The pipeline.
        user_step: What runners run.
        loss_scale: That of each minibatch.
        evaluation: Runs validations.
        first: The minibatch that has run in Lightning's own thread. An optimizer that begins it again is refused.
        moved: Whether the look-ahead may have moved batches to another device than the engine's root device.
        apart: Whether modules were taken apart, whose own code may make leaves that want no gradient.
        around: What is opened around an optimizer's steps.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        driver: Driver[Minibatch],
        engine: Engine,
        user_step: UserStep,
        loss_scale: LossScale,
        evaluation: Evaluation,
        first: int,
        moved: bool,
        apart: bool,
        around: Sequence[AroundStep] = (),
    ) -> None:
        super().__init__(driver, [*around, *([_Unlocked(engine, around)] if engine.in_flight > 1 else [])])
        self._trainer = trainer
        self._engine = engine
        self._user_step = user_step
        self._loss_scale = loss_scale
        self._evaluation = evaluation
        self._last = first
        self._moved = moved
        self._apart = apart
        self._finished: Minibatch

    def epoch_begins(self, first: int) -> None:
        self._last = -1  # a search for a learning rate begins with the same number again

    def user_step(self, minibatch: int) -> AbstractContextManager[None]:
        """Let user code meet live tensors, such as gradients, on the stages' devices."""
        return OperandsTogether(stage.device for stage in self._engine.stages)

    def submit(self, number: int, args: tuple[Any, ...]) -> None:
        if self._moved:
            args = move_data_to_device(args, self._engine.root_device)

        def start(context: Opened, section: UserSection) -> int:
            module: L.LightningModule = self._trainer.lightning_module
            step = Step(
                run=partial(self._user_step.run, number, args),
                check=lambda total, ours: refuse_leaves(module, ours, total, made_inside=self._apart),
                context=context,
                section=section,
            )
            self._engine.submit(number, step)
            return self._engine.minibatches[number].weights.version

        self._driver.launch(number, start)

    def step(self, number: int, native: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Wait for minibatch ``number``."""
        if number == self._last:
            raise PipelineRefusal(
                f"{type(self._trainer.optimizers[0]).__name__} evaluates the loss several times in one step, and a"
                " pipeline runs each minibatch once; use another optimizer"
            )
        self._last = number
        if number not in self._engine.minibatches:
            self._driver.publish(number - 1)
            self.submit(number, args)
        self._finished = self._driver.finish(number, args)
        return without_graph(self._finished.output)

    def backward(self, number: int, native: Callable[[], None]) -> None:
        """Hand the minibatch's gradients, which are there, to Lightning."""
        found = self._finished.gradients
        deliver(found, self._loss_scale.factor(self._finished.number))
        found.clear()  # whoever still has the minibatch must not keep them beyond the next step
        del self._finished
        self._engine.delivered(number)
        self._driver.offer()

    def validate(self, native: Callable[[], Any]) -> Any:
        with self._driver.evaluating():
            return self._evaluation.run(native)
