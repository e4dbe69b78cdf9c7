"""One ``fit``: a run of Lightning's training loop.

Its first minibatch runs on the live weights in Lightning's own thread, as in any other strategy. It shows which modules
are pieces and what goes through their layers. Before the optimizer steps on its gradients, the layers are measured and
divided into stages, and the version that it used is stashed. From the next minibatch on, ``training_step`` runs in the
pipeline's runners. In a spread run, all minibatches run as the first one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor

from lightning_hetpipe.capture.observation import refuse_leaves
from lightning_hetpipe.capture.prepared_modules import look_through
from lightning_hetpipe.capture.watch import TrainingWatch
from lightning_hetpipe.emulation import Emulation
from lightning_hetpipe.errors import PipelineRefusal, SettingError
from lightning_hetpipe.hosts.remote_stage import HostLost
from lightning_hetpipe.hosts.stages_apart import StagesApart
from lightning_hetpipe.lightning_private import (
    BEFORE_TRANSFER,
    DataFetcher,
    DataLoaderIterFetcher,
    begun_minibatches,
    step_arguments,
)
from lightning_hetpipe.pipeline.compilation import compiled_calls_apart
from lightning_hetpipe.pipeline.engine import Engine
from lightning_hetpipe.pipeline.memory import keep_freed_memory
from lightning_hetpipe.pipeline.operands import OperandsTogether
from lightning_hetpipe.pipeline.stage import StageSettings
from lightning_hetpipe.pipeline.user.minibatch import Minibatch, Step
from lightning_hetpipe.pipeline.weight_stash import Moves
from lightning_hetpipe.placement.decision import Decision
from lightning_hetpipe.placement.layout import Layout, move_to_devices
from lightning_hetpipe.redirect import Redirect
from lightning_hetpipe.reporting.report import RunReport
from lightning_hetpipe.rules.versions import Versions, WeightPolicy
from lightning_hetpipe.run import first_minibatch, spread_run
from lightning_hetpipe.run.around_step import AroundStep, RateCorrection, around_step, deliver
from lightning_hetpipe.run.driver import Driver, default_dtype_in
from lightning_hetpipe.run.evaluation import Evaluation
from lightning_hetpipe.run.extensions.minibatch_state import (
    LossScale,
    ModulesApart,
    RandomStates,
    TrainerCounters,
    user_parts,
)
from lightning_hetpipe.run.extensions.module_attributes import Attributes
from lightning_hetpipe.run.extensions.outside_parameters import OutsideParameters, States
from lightning_hetpipe.run.extensions.replay import Replay
from lightning_hetpipe.run.extensions.shared_values import SHARED, SharedValues
from lightning_hetpipe.run.extensions.telemetry import Pace, Recording, Telemetry, profiled_sections, shown_to_profiler
from lightning_hetpipe.run.extensions.waves_and_cuts import WavesAndCuts
from lightning_hetpipe.run.first_minibatch import FirstMinibatch
from lightning_hetpipe.run.lifecycle import Extension, opened
from lightning_hetpipe.run.look_ahead import before_transfer
from lightning_hetpipe.run.piece_calls import PieceCalls
from lightning_hetpipe.run.prediction import Prediction, prediction_of
from lightning_hetpipe.run.preemption import Preemption
from lightning_hetpipe.run.run_settings import RunSettings, loss_of
from lightning_hetpipe.run.spread_run import SpreadRun
from lightning_hetpipe.run.stage_steps import StageSteps
from lightning_hetpipe.workers.synchroniser import NoSynchroniser, Synchroniser


class Fit(Driver):
    """One ``fit`` with its validation. At the end of training it passes its report to ``reported``."""

    def __init__(
        self,
        trainer: L.Trainer,
        precision: Precision,
        settings: RunSettings,
        run_seed: int,
        synchroniser: Synchroniser | NoSynchroniser,
        reported: Callable[[RunReport], None],
    ) -> None:
        super().__init__(trainer, precision)
        self._module: L.LightningModule = trainer.lightning_module
        window, before_pass = settings.timeline, settings.before_pass
        self._emulation = before_pass if isinstance(before_pass, Emulation) else None
        self._recording = None if window is None else Recording(trainer, window, settings.virtual_worker)
        if self._recording is not None:
            before_pass = self._recording.passes(before_pass)
        self._settings = settings = replace(settings, before_pass=shown_to_profiler(before_pass, trainer))
        self._synchroniser = synchroniser
        self._reported = reported
        self._loss_scale = LossScale(precision, self.unlocked)
        self._evaluation = Evaluation(trainer, trainer.fit_loop.epoch_loop.val_loop, precision, settings, run_seed)
        self._generators = self._evaluation.generators
        self._prediction: Prediction | None = None
        self._correction: AroundStep = AroundStep()
        self._around: list[AroundStep] = []
        self._inline: FirstMinibatch | SpreadRun  # runs minibatches while there is no pipeline
        self._last = -1  # the minibatch of the last step, which an optimizer must not begin again
        self._finished: Minibatch
        self._moved = False  # the look-ahead may move batches to another device than the engine's root device
        self._apart = False  # modules were taken apart, whose own code may make leaves that want no gradient
        self._compiled = ExitStack()  # while it is open, compiled modules run uncompiled
        self._lacking: Callable[[], str] = lambda: first_minibatch.LACKING
        self._report: Callable[[], RunReport] = RunReport
        self._is_reported = False
        self._operands = OperandsTogether(settings.devices)
        self._plain_threads = torch.get_num_threads()
        self._undo = ExitStack()

    def open(self) -> None:
        """Put the run between Lightning's loops and the module, until :meth:`close`."""
        self._undo.callback(torch.set_num_threads, self._plain_threads)
        self._undo.enter_context(self._operands)
        epoch_loop = self._trainer.fit_loop.epoch_loop
        self._undo.callback(Redirect(epoch_loop, "run", self._run_epoch).remove)
        self._undo.callback(Redirect(epoch_loop.val_loop, "run", self._validate).remove)
        self._undo.callback(Redirect(self._precision, "backward", self._backward).remove)
        if not self._settings.is_spread:
            torch.set_num_threads(self._settings.torch_threads)
            keep_freed_memory()
            self._undo.callback(Redirect(self._module, BEFORE_TRANSFER, before_transfer).remove)
        preemption = Preemption(self._trainer, self._synchroniser, self._settings.grace)
        self._undo.callback(preemption.close)
        self.extensions.add(*filter(None, [self._recording]), *profiled_sections(self._trainer))
        if isinstance(self._synchroniser, Synchroniser):
            shares = self._synchroniser.shares
            pace = Pace(self._minibatches) if shares is not None and shares.adapts else None
            cuts = WavesAndCuts(self._trainer, self._synchroniser, preemption, self, pace)
            self.extensions.add(*filter(None, [pace]), cuts)
        if self._settings.is_spread:
            self._stay_inline(self._settings)
        else:
            self._inline = self._first_minibatch()

    def close(self) -> None:
        with self._undo:
            self._undo.callback(super().close)
            self._undo.callback(self._let_go)
            if not self._is_reported:
                self.finish_report()

    def finish_report(self) -> None:
        workers = self._settings.virtual_worker, self._settings.virtual_workers
        report = replace(self._report(), virtual_worker=workers[0], virtual_workers=workers[1])
        self._is_reported = bool(report.stages)
        if report.stages and self._recording is not None:
            timeline = self._recording.timeline([stage.device for stage in report.stages], report.in_flight)
            report = replace(report, timeline=timeline)
            self._recording.show(timeline)
        self._reported(report)

    def lacking(self) -> str:
        return self._evaluation.lacking() if self._trainer.evaluating else self._lacking()

    def last_changes(self) -> Sequence[Tensor | None]:
        return () if self._prediction is None else self._prediction.saved()

    def restore_changes(self, changes: Sequence[Tensor | None]) -> None:
        if self._prediction is not None:
            self._prediction.restore(changes)

    def trained_in_flight(self, before: int) -> int:
        return 1 if self.pipeline is None else self.pipeline.in_flight

    # Lightning's step.

    def training_step(self, native: Callable[..., Any], *args: Any) -> Any:
        number, engine = self.begun(), self.pipeline
        if engine is None:
            return self._inline.step(number, native, args)
        if number == self._last:
            raise PipelineRefusal(
                f"{type(self._trainer.optimizers[0]).__name__} evaluates the loss several times in one step, and a"
                " pipeline runs each minibatch once; use another optimizer"
            )
        self._last = number
        if number not in engine.minibatches:  # nothing runs ahead
            self.publish(number - 1)
            self._launch(engine, number, args)
        self._finished = self.finish(number, args)
        output = self._finished.output  # the loss is detached, because the gradients exist already
        return output.detach() if isinstance(output, Tensor) else {**output, "loss": output["loss"].detach()}

    def _backward(self, redirect: Redirect, *args: Any, **kwargs: Any) -> None:
        """Hand the minibatch's gradients, which are there already, to Lightning."""
        number, engine = self.begun(), self.pipeline
        if engine is None:
            self._inline.backward(number, partial(redirect.original, *args, **kwargs))
            return
        found = self._finished.gradients
        deliver(found, self._loss_scale.factor(self._finished.number))
        found.clear()  # so that no holder of the minibatch keeps gradients beyond the next step
        del self._finished
        engine.delivered(number)
        self.offer()

    def optimizer_step(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        for each in self._around:
            if isinstance(each, StageSteps):
                each.optimizer = optimizer  # a callback may have replaced it
        return around_step(optimizer, self._around) if self._around else nullcontext()

    def evaluation_step(self, hook: str, native: Callable[..., Any], *args: Any) -> Any:
        return self._evaluation.evaluation_step(hook, native, *args)

    def _run_epoch(self, redirect: Redirect, fetcher: DataFetcher) -> None:
        looks_ahead = False
        if not isinstance(self._inline, SpreadRun):
            torch.set_num_threads(self._settings.torch_threads)
            if self._settings.in_flight != 1 or isinstance(self._synchroniser, Synchroniser):
                looks_ahead = not isinstance(fetcher, DataLoaderIterFetcher)
        self._last = -1  # a search for a learning rate begins with the same number again
        try:
            self.epoch(redirect.original, fetcher, looks_ahead)
        except PipelineRefusal as refusal:
            refusal.way_out = self._settings.way_out
            raise

    def _validate(self, redirect: Redirect) -> Any:
        """Run Lightning's validation loop while minibatches in flight wait."""
        number = self.begun()
        if self.pipeline is not None:
            with self.doing("drain", number):
                self.pipeline.drain()
        elif isinstance(self._inline, FirstMinibatch):  # a check before that
            return redirect.original()
        with self.extensions.around(Extension.evaluating, number), self.doing("evaluation", number):
            return self._evaluation.run(redirect.original)

    # What the driver asks of the loop.

    def begun(self) -> int:
        return begun_minibatches(self._trainer)[0]

    def runs_ahead(self) -> bool:
        engine = self.pipeline
        return engine is not None and self._versions(engine.versions.policy, engine.in_flight, 0).runs_ahead

    def ahead_limit(self) -> int:
        if self._trainer.should_stop or self.pipeline is None:
            return 1
        in_flight = self.pipeline.versions.ahead(self.begun())
        max_steps, accumulate = self._trainer.fit_loop.epoch_loop.max_steps, self._trainer.accumulate_grad_batches
        if max_steps == -1:
            return in_flight
        begun = begun_minibatches(self._trainer)[1] % accumulate
        return min(in_flight, (max_steps - self._trainer.global_step) * accumulate - begun)

    def submit(self, number: int, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        assert self.pipeline is not None
        if batch is None:
            raise SettingError(
                "train_dataloader yielded None, for which no minibatch can be in flight; leave such batches out, or set"
                " in_flight=1"
            )
        begun, in_epoch = begun_minibatches(self._trainer)
        self._launch(self.pipeline, number, step_arguments(self._trainer, batch, in_epoch + number - begun - 1))

    def _launch(self, engine: Engine, number: int, args: tuple[Any, ...]) -> None:
        """Put minibatch ``number`` in flight. ``training_step`` gets ``args``."""
        if self._moved:
            args = move_data_to_device(args, engine.root_device)
        context, section = self.around_user(number)
        self._loss_scale.take(number)

        def run() -> tuple[Any, Tensor]:
            with self._precision.train_step_context():
                output = self._module.training_step(*args)
            return output, self._loss_scale.scaled(number, loss_of(output, self._trainer))

        step = Step(
            run=run,
            check=lambda total, ours: refuse_leaves(self._module, ours, total, made_inside=self._apart),
            # User code may meet live tensors, such as gradients, on the stages' devices.
            context=lambda: opened([OperandsTogether(stage.device for stage in engine.stages), context()]),
            section=section,
        )
        engine.submit(number, step)
        if self._recording is not None:
            self._recording.submitted(number, engine.minibatches[number].weights.version)

    # The pipeline.

    def _first_minibatch(self) -> FirstMinibatch:
        """Prepare for a pipeline, and make the watch over the minibatch before it."""
        settings, optimizer = self._settings, self._trainer.optimizers[0]
        steps = partial(getattr, self._trainer, "global_step")
        self._undo.enter_context(compiled_calls_apart())
        if (preferred := settings.weights[0]).predicts:
            self._prediction = prediction_of(preferred.name, optimizer, steps)
            self._around.append(self._prediction)
        if settings.lr_correction is not None:
            self._correction = RateCorrection(optimizer, settings.lr_correction, self._most_steps, steps)
            self._around.append(self._correction)
        looked_through = look_through(self._module, stages_compile=settings.compile is not None)
        self._compiled = self._undo.enter_context(looked_through)
        return FirstMinibatch(
            self._trainer,
            self._precision,
            settings,
            generators=self._generators,
            synchroniser=self._synchroniser,
            operands=self._operands,
            begin=self._begin,
            stay=self._stay,
        )

    def _stay_inline(self, settings: RunSettings) -> None:
        """Run the minibatches from the next one on in Lightning's own thread."""
        noted = (lambda *_: None) if self._recording is None else self._recording.computed
        self._inline = run = SpreadRun(self._module, settings, noted, self._operands)
        self.extensions.add(run)
        self._report = run.report
        self._lacking = lambda: spread_run.LACKING

    def _stay(self) -> None:
        """Train on with the devices that ran the first minibatch, because a pipeline is not worth it. From the next
        minibatch on, the run is a plain one, random numbers included."""
        root: torch.device = self._trainer.strategy.root_device
        self._evaluation.take_over([], Layout([], Decision((0,), [root], 1, [0.0])), 1)
        self._around.clear()
        self._compiled.close()
        torch.set_num_threads(self._plain_threads)
        self._stay_inline(replace(self._settings, stages=1))

    def _begin(self, watch: TrainingWatch, decision: Decision, in_flight: int, before: States) -> None:
        """Start the pipeline after the first minibatch. Its first version is the live weights."""
        settings, number, trainer = self._settings, self.begun(), self._trainer
        pieces, apart = watch.pieces, watch.apart
        add, context = self.extensions.add, self._precision.train_step_context
        layout = Layout.of(pieces, decision)
        self._lacking = partial(layout.lacking, in_flight, settings.recompute)
        versions = partial(self._versions, decision.weights, in_flight)
        if in_flight == 1 or not decision.weights.predicts:
            self._prediction = None
        self._around[:] = [
            each for each in self._around if in_flight > 1 and each in (self._prediction, self._correction)
        ]
        self._moved = layout.devices[-1] != trainer.strategy.root_device  # before the move
        move_to_devices(layout, self._module, trainer.optimizers[0])
        self._synchroniser.follow()
        worker = settings.virtual_worker if settings.virtual_workers > 1 else None
        stages = StagesApart(settings.elsewhere, settings.security, self._emulation, worker)
        self._undo.callback(stages.close)
        engine = Engine(
            [(piece.name, piece.layers) for piece in pieces],
            layout.split_points,
            layout.devices,
            StageSettings(
                generators=self._generators,
                in_flight=in_flight,
                torch_threads=settings.torch_threads,
                default_dtype=default_dtype_in(context),
                before_pass=settings.before_pass,
                recompute=settings.recompute,
                compile=settings.compile,
                buffers=decision.weights.buffers(versions(number - 1)),
            ),
            settings.timeout,
            root=self._module,
            changing=watch.changed_buffers(),
            called=watch.called,
            planned=decision.planned,
            versions=versions,
            make_stage=stages.make,
            groups=decision.groups,
        )
        stages.check(engine.stages)
        stages.tell()
        stages.adopt(trainer.optimizers)
        stages.join(engine)
        self._synchroniser.hold(stages.holder, stages.machine)
        stages.tell_unreached()
        if self._prediction is not None:
            engine.moves = self._moves
        modules = [piece.module for piece in pieces]
        way_out = "set in_flight=1" + (", or weights='sync'" if trainer.accumulate_grad_batches == 1 else "")
        parts = user_parts(apart.modules.values(), modules)
        add(ModulesApart(apart.modules, modules, self._generators))
        if in_flight > 1:
            outside = OutsideParameters(
                self._module, modules, engine.versioned, lambda: bool(engine.minibatches), way_out
            )
            if versions(number - 1).runs_ahead:
                outside.check_step(before)
                if apart.shared is not None:
                    raise apart.shared
            add(outside, TrainerCounters(trainer), RandomStates(self._generators), Replay(self._module, context))
            add(SharedValues(self._module, modules, lambda: engine.versions, way_out))
            for part in (self._module, *parts):
                add(Attributes(part, lambda: engine.versions, way_out, engine.versioned_tensors))
        calls = PieceCalls(
            pieces, layout, self._generators, driver=self, context=context, evaluates=self._evaluation.is_worth_it
        )
        for piece in pieces:
            piece.inputs.clear()  # the watched step's activations
            if piece.captured is not None:
                piece.captured.beside = [other.name for other in pieces if other is not piece]
        self._evaluation.take_over(pieces, layout, in_flight)
        self._evaluation.parts = parts
        self._evaluation.shared = SHARED if apart.shared else None
        telemetry = Telemetry(trainer, engine, layout, self._synchroniser.metrics)
        self._report = lambda: replace(telemetry.report(), taken_apart=apart.reasons)
        self._last, self._apart = number, bool(apart)
        if in_flight > 1:
            self._around.append(StageSteps(engine, trainer.optimizers[0], self._around))
        add(calls, telemetry)
        self._lacking = engine.lacking
        self.devices = layout.devices
        self.start(engine)
        engine.begin(number - 1, forwards=number)
        stages.await_hosts()
        telemetry.meter.start()  # what comes before is no time of training

    def _minibatches(self) -> Iterable[Minibatch]:
        return () if self.pipeline is None else self.pipeline.minibatches.values()

    def _let_go(self) -> None:
        with suppress(HostLost):  # the fit fails with it already
            self._synchroniser.let_go()

    def _most_steps(self) -> int:
        return 0 if self.pipeline is None else self.pipeline.versions.most_steps

    def _moves(self) -> Moves:
        """Return the expected changes of parameters by the next step, computed with that step's own rate."""
        assert self._prediction is not None
        with self._correction.stepping():
            return self._prediction.moves()

    def _versions(self, policy: WeightPolicy, in_flight: int, version: int) -> Versions:
        """Return the versions from ``version`` on, at which the pipeline starts empty."""
        begun, in_epoch = begun_minibatches(self._trainer)
        every = self._trainer.accumulate_grad_batches
        versions = Versions(policy, in_flight, every, version, begun - in_epoch)
        versions.check(self._synchroniser.wave)
        return versions
