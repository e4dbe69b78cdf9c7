"""One ``fit``: the first minibatch is watched, then the pipeline takes over.

The first minibatch runs as in any other strategy, alone, on the live weights, in Lightning's own thread. It shows which
modules are pieces and what goes through their layers. When its gradients are there, and before the optimizer steps, the
layers are measured and cut into stages, and the version that it used is stashed. From the next minibatch on,
``training_step`` runs in the pipeline's runners.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.plugins.precision import Precision

from lightning_hetpipe.capture.compiled import look_through
from lightning_hetpipe.capture.leaves import refuse_leaves
from lightning_hetpipe.capture.pieces import named_pieces
from lightning_hetpipe.capture.redirect import Redirect
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.pipeline.chance import Chance
from lightning_hetpipe.pipeline.engine import Engine
from lightning_hetpipe.pipeline.flight import current
from lightning_hetpipe.pipeline.minibatch import Minibatch, Step
from lightning_hetpipe.pipeline.stage import StageSettings
from lightning_hetpipe.reporting.report import RunReport
from lightning_hetpipe.strategy.cuts import Cuts
from lightning_hetpipe.strategy.evaluation import Evaluation, before_transfer
from lightning_hetpipe.strategy.gradients import deliver
from lightning_hetpipe.strategy.layout import Layout, move_to_devices
from lightning_hetpipe.strategy.lookahead import LookAhead
from lightning_hetpipe.strategy.loss_scale import LossScale
from lightning_hetpipe.strategy.outside import Outside
from lightning_hetpipe.strategy.outsiders import TrainingOutsiders
from lightning_hetpipe.strategy.piece_calls import PieceCalls
from lightning_hetpipe.strategy.private import (
    BEFORE_TRANSFER,
    DataFetcher,
    DataLoaderIterFetcher,
    begun_minibatches,
    move_before_transfer,
    step_arguments,
    with_workers,
)
from lightning_hetpipe.strategy.recording import Recording
from lightning_hetpipe.strategy.release import released_step
from lightning_hetpipe.strategy.settings import FitSettings
from lightning_hetpipe.strategy.synchroniser import Synchroniser
from lightning_hetpipe.strategy.telemetry import Telemetry
from lightning_hetpipe.strategy.user_step import UserStep, without_graph
from lightning_hetpipe.strategy.watched import WatchedStep, noting_where


class Fit:
    """The pipeline of one ``fit``; :meth:`close` leaves no thread and no change in the module behind."""

    def __init__(
        self,
        trainer: L.Trainer,
        precision: Precision,
        settings: FitSettings,
        run_seed: int,
        synchroniser: Synchroniser | None = None,
    ) -> None:
        self.engine: Engine | None = None
        self.report: RunReport | None = None
        self._recording = Recording(trainer, settings.timeline, settings.virtual_worker)
        self._sections = self._recording.sections
        settings = replace(settings, before_pass=self._recording.observed(settings.before_pass))
        self._trainer = trainer
        self._module: L.LightningModule = trainer.lightning_module
        self._precision = precision
        self._loss_scale = LossScale(precision, self._unlocked)
        self._user_step = UserStep(trainer, precision, self._loss_scale)
        self._settings = settings
        self._run_seed = run_seed
        self._synchroniser = synchroniser
        self._cuts: Cuts | None = None
        self._chance = Chance(
            run_seed, settings.virtual_worker, deterministic=torch.are_deterministic_algorithms_enabled()
        )
        self._names = named_pieces(self._module, settings.module)
        self.evaluation = Evaluation(trainer, trainer.fit_loop.epoch_loop.val_loop, precision, settings, run_seed)
        self._watched: WatchedStep | None = None
        self._layout: Layout | None = None
        self._telemetry: Telemetry | None = None
        self._outside: Outside | None = None
        self._outsiders: TrainingOutsiders | None = None
        self._finished: Minibatch | None = None
        self._epoch_begins = False
        self._threads_before = torch.get_num_threads()
        self._redirects: list[Redirect] = []
        self._calls: PieceCalls | None = None
        self._last = -1
        self._moved = False  # to another root device

    def open(self) -> None:
        """Puts the pipeline between Lightning's loops and the module, until :meth:`close`."""
        epoch_loop = self._trainer.fit_loop.epoch_loop
        self._redirects = [
            Redirect(epoch_loop, "run", self._run_epoch),
            Redirect(epoch_loop.val_loop, "run", self._run_validation),
            Redirect(self._module, BEFORE_TRANSFER, before_transfer),
            *look_through(self._module, stages_compile=self._settings.compile is not None),
        ]
        if self._synchroniser is not None:
            self._cuts = Cuts(self._trainer, self._synchroniser, self._synchronising, self._computing)
            self._synchroniser.group.waiting = self._waiting

    def close(self) -> None:
        try:
            if self.engine is not None:
                if self.report is None:
                    self.finish_report()
                self.engine.close()
        finally:
            if self._outsiders is not None:
                self._outsiders.close()
            if self._cuts is not None:
                self._cuts.close()
            if self._synchroniser is not None:
                self._synchroniser.group.waiting = nullcontext
                self._synchroniser.let_go()
            if self._calls is not None:
                self._calls.close()
            for redirect in self._redirects:
                redirect.remove()
            self._redirects, self._calls = [], None
            torch.set_num_threads(self._threads_before)

    def finish_report(self) -> None:
        """Takes the numbers of the run so far."""
        if self._telemetry is not None:
            assert self._layout is not None
            assert self.engine is not None
            timeline = self._recording.timeline(len(self._layout.devices), self.engine.in_flight)
            self.report = replace(self._telemetry.report(), timeline=timeline)
            self._recording.show(timeline)

    # Lightning's step.

    def training_step(self, native: Callable[..., Any], *args: Any) -> Any:
        """Lightning's step: the first is watched, any other waits for its minibatch."""
        number = begun_minibatches(self._trainer)[0]
        if number == self._last:
            raise SettingError(
                f"{type(self._trainer.optimizers[0]).__name__} evaluates the loss several times in one step, and a"
                " pipeline runs each minibatch once; use another optimizer"
            )
        self._last = number
        if self.engine is None or self._telemetry is None:
            return self._watched_step(native, number, args)
        if number not in self.engine.minibatches:
            self._publish(number - 1)
            self._submit(number, args)
        try:
            with self._sections.wait_for_minibatch(number):
                self._finished = minibatch = self.engine.finish(number)
        finally:  # what it has set before it failed is there, as in a plain run
            if self._outsiders is not None:
                self._outsiders.assign(number)
        self.engine.show(number)
        if self._outsiders is not None:
            with self._precision.train_step_context():
                self._outsiders.replay(number)
        self._telemetry.count(minibatch, args[0] if args else None)
        return without_graph(minibatch.output)

    def backward(self, native: Callable[[], None]) -> None:
        """Lightning's backward: hands over the gradients; for the watched step computes them, and then sets up."""
        if self._finished is None:
            with noting_where():
                native()
                self._set_up()
            return
        deliver(self._finished.gradients, self._loss_scale.factor(self._finished.number))
        self._finished = None
        self.offer()

    def optimizer_step(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        """Within it, other user code runs while the optimizer computes, after its closure has returned."""
        if self.engine is None or self.engine.in_flight == 1:
            return nullcontext()
        return released_step(self.engine, optimizer)

    def offer(self) -> None:
        """Between Lightning's hooks: lets user code that stages wait for go first."""
        if self.engine is not None:
            self.engine.offer()

    def _watched_step(self, native: Callable[..., Any], number: int, args: tuple[Any, ...]) -> Any:
        self._watched = WatchedStep(
            self._trainer, self._precision, self._settings, self._chance, self._names, self._user_step, number
        )
        return self._watched.run(native, args, self._run_seed)

    def _set_up(self) -> None:
        assert self._watched is not None
        watched, number = self._watched, begun_minibatches(self._trainer)[0]
        self._outside = watched.outside
        pieces, (decision, in_flight) = watched.pieces, watched.decide(self._synchroniser)
        layers = [layer for piece in pieces for layer in piece.layers]
        devices = list(decision.devices)
        self._layout = Layout(layers, decision.cuts, devices, decision.times, decision.names, decision.emulated)
        self._move()
        engine = Engine(
            [(piece.name, piece.layers) for piece in pieces],
            decision.cuts,
            self._layout.devices,
            StageSettings(
                self._chance,
                in_flight,
                self._settings.torch_threads,
                self._user_step.default_dtype(),
                self._settings.before_pass,
                self._settings.recompute,
                self._settings.compile,
            ),
            self._settings.timeout,
            self._module,
            watched.changed_buffers(),
        )
        self._outside.leave_out([piece.module for piece in pieces], engine.versioned())
        if in_flight > 1:
            self._outsiders = TrainingOutsiders(self._trainer, self._outside, in_flight, self._run_seed, number - 1)
            self._outsiders.virtual_worker = self._settings.virtual_worker
        self._calls = PieceCalls(pieces, self._layout, self._chance)
        for piece in pieces:
            piece.inputs.clear()  # the watched step's activations
            if piece.captured is not None:
                piece.captured.alone = engine.quiet.alone
        self.evaluation.take_over(pieces, self._layout, in_flight)
        self._watched = None
        self._telemetry = Telemetry(self._trainer, engine, self._layout, self._synchroniser)
        self._telemetry.start()
        self.engine = engine
        engine.start()
        engine.begin(number - 1, forwards=number)

    def _move(self) -> None:
        """To the stages' devices; what else the module has, to the last stage's, where the loss is."""
        assert self._layout is not None
        root = self._layout.devices[-1]
        self._moved = root != self._trainer.strategy.root_device
        if self._moved:
            self._module.to(root)
        move_to_devices(self._layout, self._trainer.optimizers[0], self._moved)
        if self._synchroniser is not None:
            self._synchroniser.follow()

    # The epoch.

    def _run_epoch(self, redirect: Redirect, fetcher: DataFetcher) -> None:
        self._epoch_begins = self.engine is not None
        if self._calls is not None:
            self._calls.epoch_begins(begun_minibatches(self._trainer)[0] + 1)
        self._last = -1
        torch.set_num_threads(self._settings.torch_threads)
        if self._cuts is not None:
            self._cuts.epoch_begins()
        if self._telemetry is not None:
            self._telemetry.start()
        if isinstance(fetcher, DataLoaderIterFetcher) or self._settings.in_flight == 1:
            redirect.original(fetcher)
        else:
            ahead = LookAhead(fetcher, self)
            try:
                redirect.original(ahead)
            finally:
                ahead.close()
        if self._cuts is not None:
            self._cuts.epoch_ends()
        if self._telemetry is not None and self.engine is not None:
            self._telemetry.stop()
            self._telemetry.log(begun_minibatches(self._trainer)[0])
            self.engine.discard()
            self._recording.discard()
            self._loss_scale.discard()
        if self._outsiders is not None:
            self._outsiders.discard()

    def _run_validation(self, redirect: Redirect) -> Any:
        if self.engine is None or self._telemetry is None or self._calls is None:
            return redirect.original()
        number = begun_minibatches(self._trainer)[0]
        with self._sections.drain(number):
            self.engine.drain()
        self._telemetry.stop()
        try:
            with ExitStack() as stack:
                if self._cuts is not None:
                    stack.callback(self._cuts.validation())
                if self.evaluation.is_worth_it():
                    stack.enter_context(self._calls.aside())
                stack.enter_context(self._sections.evaluation(number))
                return self.evaluation.run(redirect.original)
        finally:
            self._telemetry.start()

    # What the look-ahead asks.

    def publish_last(self) -> None:
        if self.engine is not None and self.engine.in_flight > 1:
            self._publish(begun_minibatches(self._trainer)[0])

    def ahead_limit(self) -> int:
        if self.engine is None or self._trainer.should_stop:
            return 1
        limit = self.engine.in_flight
        epoch_loop = self._trainer.fit_loop.epoch_loop
        if (max_steps := epoch_loop.max_steps) != -1:
            accumulate = self._trainer.accumulate_grad_batches
            begun = begun_minibatches(self._trainer)[1] % accumulate
            limit = min(limit, (max_steps - self._trainer.global_step) * accumulate - begun)
        return max(1, limit)

    def fetching(self, ahead: int) -> AbstractContextManager[None]:
        return self._sections.fetch(begun_minibatches(self._trainer)[0] + 1 + ahead)

    def prepare(self, batch: Any, ahead: int, dataloader_idx: int) -> Any:
        number = begun_minibatches(self._trainer)[0] + 1 + ahead
        with (
            self._sections.look_ahead(number),
            nullcontext() if self._outsiders is None else self._outsiders.transfer(number),
        ):
            batch = self._precision.convert_input(batch)
            batch = move_before_transfer(self._module, batch)
            return self._trainer.strategy.batch_to_device(batch, dataloader_idx=0)

    def submit(self, batch: Any, ahead: int, batch_idx: int, dataloader_idx: int) -> None:
        if self.engine is None or self.engine.in_flight == 1:
            return
        if batch is None:
            raise SettingError(
                "train_dataloader yielded None, for which no minibatch can be in flight; leave such batches out, or set"
                " in_flight=1"
            )
        total, in_epoch = begun_minibatches(self._trainer)
        self._submit(total + 1 + ahead, step_arguments(self._trainer, batch, in_epoch + ahead))

    def on_iterators(self, fetcher: DataFetcher) -> list[Redirect]:
        return with_workers(fetcher, self._unlocked, self._drain)

    # The pipeline.

    def _unlocked(self) -> AbstractContextManager[None]:
        return nullcontext() if self.engine is None else self.engine.unlocked()

    @contextmanager
    def _synchronising(self) -> Iterator[None]:
        with self._sections.synchronise(begun_minibatches(self._trainer)[0]), self._unlocked():
            yield

    def _waiting(self) -> AbstractContextManager[None]:
        """Around a wait for other virtual workers. In a minibatch's thread nobody else may run user code meanwhile."""
        return nullcontext() if current() is not None else self._unlocked()

    def _computing(self) -> AbstractContextManager[None]:
        return nullcontext() if self.engine is None else self.engine.quiet.computing()

    def _drain(self) -> None:
        if self.engine is not None:
            self.engine.drain()

    def _publish(self, version: int) -> None:
        assert self.engine is not None
        assert self._calls is not None
        assert self._telemetry is not None
        if self._cuts is not None:
            self._cuts.published(version)
        changed = self._calls.changed()
        if changed is not None:
            self._adopt(changed, version)
        if self._epoch_begins:
            self._epoch_begins = False
            with self._sections.publish(version):
                self.engine.begin(version)
            if self._outsiders is not None:
                self._outsiders.begin(version, self.engine.versioned())
            return
        with self._sections.publish(version):
            if self._outsiders is not None:
                self._outsiders.publish(version)
            self.engine.publish(version)
        self._telemetry.log(version)

    def _adopt(self, changed: str, version: int) -> None:
        """Lets the stages follow a change of the live layers other than of weights and buffers."""
        assert self.engine is not None
        assert self._calls is not None
        if not self._epoch_begins and self.engine.in_flight > 1:
            raise SettingError(
                f"'{changed}' of the pipelined layers was changed after minibatch {version}, while later minibatches"
                " were in flight; change it at the start or end of an epoch, or set in_flight=1"
            )
        with self._precision.train_step_context():
            self._calls.follow()
        self._epoch_begins = True  # a pipeline of new copies starts empty
        self.engine.copy_layers()
        self._calls.take()

    def _submit(self, number: int, args: tuple[Any, ...]) -> None:
        assert self.engine is not None
        assert self._calls is not None
        if self._moved:  # and perhaps fetched before
            args = move_data_to_device(args, self.engine.root_device)
        self._loss_scale.take(number)
        step = Step(
            run=partial(self._user_step.run, number, args),
            check=lambda total, ours: refuse_leaves(self._module, ours, total),
            context=nullcontext if self._outsiders is None else partial(self._outsiders.recording, number),
            stretch=self._recording.stretch(
                number, None if self._outsiders is None else self._outsiders.stretch(number)
            ),
            entered=self._calls.take_modes,
        )
        self.engine.submit(number, step)
        self._recording.began(number, self.engine.minibatches[number].version)
