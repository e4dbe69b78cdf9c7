"""One ``fit``: a run of Lightning's training loop.

Its first minibatch runs as in any other strategy, alone, on the live weights, in Lightning's own thread. It shows which
modules are pieces and what goes through their layers. When its gradients are there, and before the optimizer steps, the
layers are measured and cut into stages, and the version that it used is stashed. From the next minibatch on,
``training_step`` runs in the pipeline's runners. With a single stage and one minibatch in flight there is no pipeline,
and all minibatches run as the first one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.plugins.precision import Precision

from lightning_hetpipe.capture.leaves import refuse_leaves
from lightning_hetpipe.capture.pieces import Piece
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.lightning_private import (
    BEFORE_TRANSFER,
    DataFetcher,
    DataLoaderIterFetcher,
    begun_minibatches,
    move_before_transfer,
    step_arguments,
)
from lightning_hetpipe.pipeline.engine import Engine
from lightning_hetpipe.pipeline.random.generators import RandomGenerators
from lightning_hetpipe.pipeline.stage import StageSettings
from lightning_hetpipe.pipeline.user.minibatch import Minibatch, Step
from lightning_hetpipe.pipeline.user.user_section import ProcessState
from lightning_hetpipe.placement.layout import Layout, move_to_devices
from lightning_hetpipe.placement.planner import Decision
from lightning_hetpipe.redirect import Redirect
from lightning_hetpipe.reporting.report import RunReport
from lightning_hetpipe.run.driver import Driver
from lightning_hetpipe.run.evaluation import Evaluation, before_transfer
from lightning_hetpipe.run.extensions.cuts import Cuts
from lightning_hetpipe.run.extensions.loss_scale import LossScale
from lightning_hetpipe.run.extensions.observers import Observers, TrainerObservers, UnversionedTensors
from lightning_hetpipe.run.extensions.outside_parameters import OutsideParameters
from lightning_hetpipe.run.extensions.recording import Recording
from lightning_hetpipe.run.extensions.structure import Structure
from lightning_hetpipe.run.extensions.telemetry import Telemetry
from lightning_hetpipe.run.first_minibatch import FirstMinibatch
from lightning_hetpipe.run.gradients import deliver
from lightning_hetpipe.run.lifecycle import Extension, Extensions
from lightning_hetpipe.run.piece_calls import PieceCalls
from lightning_hetpipe.run.release import released_step
from lightning_hetpipe.run.run_settings import RunSettings
from lightning_hetpipe.run.single_stage import SingleStage, is_single_stage
from lightning_hetpipe.run.user_step import UserStep, without_graph
from lightning_hetpipe.workers.synchroniser import Synchroniser


class Fit:
    """One ``fit``; :meth:`close` leaves no thread and no change in the module behind.

    Attributes:
        report: The numbers of the run, once :meth:`finish_report` was called.
        evaluation: Its validation.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        precision: Precision,
        settings: RunSettings,
        run_seed: int,
        synchroniser: Synchroniser | None = None,
    ) -> None:
        self.report: RunReport | None = None
        self._trainer = trainer
        self._module: L.LightningModule = trainer.lightning_module
        self._precision = precision
        self._recording = Recording(trainer, settings.timeline, settings.virtual_worker)
        self._settings = settings = replace(settings, before_pass=self._recording.observed(settings.before_pass))
        self._run_seed = run_seed
        self._synchroniser = synchroniser
        self._driver: Driver[Minibatch, Engine] = Driver(self, Extensions([self._recording]))
        self._loss_scale = LossScale(precision, self._driver.unlocked)
        self._user_step = UserStep(trainer, precision, self._loss_scale)
        self._generators = RandomGenerators(
            run_seed, settings.virtual_worker, deterministic=torch.are_deterministic_algorithms_enabled()
        )
        self.evaluation = Evaluation(trainer, trainer.fit_loop.epoch_loop.val_loop, precision, settings, run_seed)
        self._looks_ahead = settings.in_flight != 1
        self._reported: Callable[[], RunReport | None] = lambda: None
        self._finished: Minibatch | None = None
        self._last = -1
        self._threads_before = torch.get_num_threads()
        self._redirects: list[Redirect] = []
        self._moved = False  # to another root device

    @property
    def engine(self) -> Engine | None:
        """The pipeline, once there is one."""
        return self._driver.crew

    def open(self) -> None:
        """Puts the run between Lightning's loops and the module, until :meth:`close`."""
        torch.set_num_threads(self._settings.torch_threads)
        epoch_loop = self._trainer.fit_loop.epoch_loop
        self._redirects = [
            Redirect(epoch_loop, "run", self._run_epoch),
            Redirect(epoch_loop.val_loop, "run", self._run_validation),
            Redirect(self._module, BEFORE_TRANSFER, before_transfer),
        ]
        if self._synchroniser is not None:
            driver = self._driver
            cuts = Cuts(self._trainer, self._synchroniser, self._synchronising, driver.computing, driver.unlocked)
            driver.extensions.all.insert(1, cuts)  # what is recorded of an evaluation begins after its cut
        self._driver.extend(self._loss_scale, self._inline())

    def close(self) -> None:
        try:
            if self.report is None:
                self.finish_report()
        finally:
            try:
                self._driver.close()
            finally:
                for redirect in self._redirects:
                    redirect.remove()
                self._redirects = []
                torch.set_num_threads(self._threads_before)

    def finish_report(self) -> None:
        """Takes the numbers of the run so far."""
        report = self._reported()
        if report is not None:
            timeline = self._recording.timeline(len(report.stages), report.in_flight)
            self.report = replace(report, timeline=timeline)
            self._recording.show(timeline)

    # Lightning's step.

    def training_step(self, native: Callable[..., Any], *args: Any) -> Any:
        """Lightning's step: waits for its minibatch, if there is a pipeline."""
        number, driver = self.begun(), self._driver
        if driver.crew is None:
            self._last = number
            return driver.step_inline(number, native, args)
        if number == self._last:
            raise self._repeated()
        self._last = number
        if number not in driver.crew.minibatches:
            driver.publish(number - 1)
            self._submit(number, args)
        self._finished = minibatch = driver.finish(number, args)
        return without_graph(minibatch.output)

    def backward(self, native: Callable[[], None]) -> None:
        """Lightning's backward: hands over the gradients, if there is a pipeline."""
        if self._finished is None:
            self._driver.backward_inline(self.begun(), native)
            return
        deliver(self._finished.gradients, self._loss_scale.factor(self._finished.number))
        self._finished = None
        self.offer()

    def optimizer_step(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        """Within it, other user code runs while the optimizer computes, after its closure has returned."""
        engine = self.engine
        return nullcontext() if engine is None or engine.in_flight == 1 else released_step(engine, optimizer)

    def offer(self) -> None:
        """Between Lightning's hooks: lets user code that stages wait for go first."""
        self._driver.offer()

    def _repeated(self) -> SettingError:
        return SettingError(
            f"{type(self._trainer.optimizers[0]).__name__} evaluates the loss several times in one step, and a"
            " pipeline runs each minibatch once; use another optimizer"
        )

    # Lightning's loops.

    def _run_epoch(self, redirect: Redirect, fetcher: DataFetcher) -> None:
        self._last = -1
        torch.set_num_threads(self._settings.torch_threads)
        looks_ahead = self._looks_ahead and not isinstance(fetcher, DataLoaderIterFetcher)
        self._driver.epoch(redirect.original, fetcher, looks_ahead)

    def _run_validation(self, redirect: Redirect) -> Any:
        if self.engine is None:
            return redirect.original()
        with self._driver.evaluating():
            return self.evaluation.run(redirect.original)

    @contextmanager
    def _synchronising(self) -> Iterator[None]:
        with self._recording.sections.synchronise(self.begun()), self._driver.unlocked():
            yield

    # What the driver asks of the loop.

    def begun(self) -> int:
        return begun_minibatches(self._trainer)[0]

    def limit(self, in_flight: int) -> int:
        if self._trainer.should_stop:
            return 1
        max_steps, accumulate = self._trainer.fit_loop.epoch_loop.max_steps, self._trainer.accumulate_grad_batches
        if max_steps == -1:
            return in_flight
        begun = begun_minibatches(self._trainer)[1] % accumulate
        return min(in_flight, (max_steps - self._trainer.global_step) * accumulate - begun)

    def prepare(self, batch: Any, dataloader_idx: int) -> Any:
        batch = self._precision.convert_input(batch)
        batch = move_before_transfer(self._module, batch)
        return self._trainer.strategy.batch_to_device(batch, dataloader_idx=0)

    def submit(self, number: int, batch: Any, ahead: int, batch_idx: int, dataloader_idx: int) -> None:
        if batch is None:
            raise SettingError(
                "train_dataloader yielded None, for which no minibatch can be in flight; leave such batches out, or set"
                " in_flight=1"
            )
        in_epoch = begun_minibatches(self._trainer)[1]
        self._submit(number, step_arguments(self._trainer, batch, in_epoch + ahead))

    def _submit(self, number: int, args: tuple[Any, ...]) -> None:
        engine, extensions = self._driver.crew, self._driver.extensions
        assert engine is not None
        if self._moved:  # and perhaps fetched before
            args = move_data_to_device(args, engine.root_device)
        extensions.submitting(number)
        step = Step(
            run=partial(self._user_step.run, number, args),
            check=lambda total, ours: refuse_leaves(self._module, ours, total),
            context=partial(extensions.user_step, number),
            section=extensions.section(number),
        )
        engine.submit(number, step)
        extensions.submitted(number, engine.minibatches[number].version)

    # The pipeline.

    def _inline(self) -> Extension:
        """Extension for the minibatches that run in Lightning's own thread: all with a single stage, else the first."""
        settings, synchroniser = self._settings, self._synchroniser
        if synchroniser is None and is_single_stage(settings):
            self._looks_ahead = False
            single = SingleStage(self._module, settings, self._generators, self._recording)
            self._reported = single.report
            return single
        return FirstMinibatch(
            self._trainer,
            self._precision,
            settings,
            self._run_seed,
            self._generators,
            self._user_step,
            synchroniser,
            self._pipeline,
        )

    def _pipeline(
        self,
        pieces: Sequence[Piece],
        decision: Decision,
        in_flight: int,
        outside: OutsideParameters,
        changing: set[int],
    ) -> None:
        """The first minibatch has shown what there is: a pipeline takes over, whose first version is the live one."""
        settings, number = self._settings, self.begun()
        layers = [layer for piece in pieces for layer in piece.layers]
        devices = list(decision.devices)
        layout = Layout(layers, decision.cuts, devices, decision.times, decision.names, decision.emulated)
        self._move(layout)
        engine = Engine(
            [(piece.name, piece.layers) for piece in pieces],
            decision.cuts,
            layout.devices,
            StageSettings(
                self._generators,
                in_flight,
                settings.torch_threads,
                self._user_step.default_dtype(),
                settings.before_pass,
                settings.recompute,
                settings.compile,
            ),
            settings.timeout,
            self._module,
            changing,
        )
        outside.leave_out([piece.module for piece in pieces], engine.versioned())
        if in_flight > 1:
            state = partial(ProcessState.seeded, self._run_seed, settings.virtual_worker)
            context = self._precision.train_step_context
            self._driver.extend(
                UnversionedTensors(outside, engine.versioned),
                TrainerObservers(self._trainer),
                Observers(self._module, in_flight, number - 1, state, context),
            )
        calls = PieceCalls(pieces, layout, self._generators)
        for piece in pieces:
            piece.inputs.clear()  # the watched step's activations
            if piece.captured is not None:
                piece.captured.exclusive = engine.compute_lock.alone
        self.evaluation.take_over(pieces, layout, in_flight)
        telemetry = Telemetry(self._trainer, engine, layout, self._synchroniser)
        self._reported = telemetry.report
        structure = Structure(self._driver, calls, self._precision.train_step_context, self.evaluation.is_worth_it)
        self._driver.extend(structure, telemetry)
        self._driver.crew = engine
        engine.start()
        engine.begin(number - 1, forwards=number)

    def _move(self, layout: Layout) -> None:
        """To the stages' devices; what else the module has, to the last stage's, where the loss is."""
        root = layout.devices[-1]
        self._moved = root != self._trainer.strategy.root_device
        if self._moved:
            self._module.to(root)
        move_to_devices(layout, self._trainer.optimizers[0], self._moved)
        if self._synchroniser is not None:
            self._synchroniser.follow()
