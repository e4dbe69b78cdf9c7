"""Evaluation in a pipeline: validate, test and predict keep all stages busy, in order and without gradients.

As in training, the user's step runs ahead of Lightning's loop, in a thread for each batch in flight. Its logs, counters
and attributes appear at the batch's own step. Stages run the live layers, because weights do not change meanwhile. The
first batch of every evaluation runs in Lightning's own thread. It shows which modules a pipeline can run to the very
same values. Any other call, such as a call with gradients, is left to the module itself.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from lightning_hetpipe.capture.evaluation_watch import EvaluationWatch
from lightning_hetpipe.capture.parity_check import compare
from lightning_hetpipe.capture.pieces import Piece, named_pieces
from lightning_hetpipe.capture.profiling import ProfilingInput
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.lightning_private import (
    BEFORE_TRANSFER,
    DataFetcher,
    DataLoaderIterFetcher,
    EvaluatingLoop,
    evaluation_arguments,
    fetcher_of,
    set_fetcher,
)
from lightning_hetpipe.pipeline.compilation import compiled_calls_apart
from lightning_hetpipe.pipeline.engine import Engine
from lightning_hetpipe.pipeline.operands import OperandsTogether
from lightning_hetpipe.pipeline.random.generators import RandomGenerators, attached
from lightning_hetpipe.pipeline.stage import StageSettings
from lightning_hetpipe.pipeline.user.minibatch import Minibatch, Step
from lightning_hetpipe.pipeline.user.user_section import has_own_seed, own_state, seeds_of_torch
from lightning_hetpipe.placement.decision import Decision
from lightning_hetpipe.placement.layout import Layout, move_to_devices, place
from lightning_hetpipe.placement.spread import Overflow
from lightning_hetpipe.planning.search.split_points import FULL, partition_within, stage_times
from lightning_hetpipe.redirect import NOT_TAKEN, ModuleCall, Redirect
from lightning_hetpipe.rules.versions import STASH, Versions
from lightning_hetpipe.run.driver import Driver, TrainerRun, default_dtype_in
from lightning_hetpipe.run.extensions.minibatch_state import RandomStates, user_parts
from lightning_hetpipe.run.extensions.module_attributes import Attributes
from lightning_hetpipe.run.extensions.replay import Replay
from lightning_hetpipe.run.extensions.shared_values import SHARED, CarriedState, SharedValues
from lightning_hetpipe.run.lifecycle import Extension
from lightning_hetpipe.run.look_ahead import LookAhead, before_transfer
from lightning_hetpipe.run.piece_calls import PieceForwards, draws
from lightning_hetpipe.run.run_settings import RunSettings
from lightning_hetpipe.torch_private.tensors import version_counter

_STAGES = {
    RunningStage.SANITY_CHECKING: "validation",
    RunningStage.VALIDATING: "validation",
    RunningStage.TESTING: "test",
    RunningStage.PREDICTING: "prediction",
}


class Evaluation(TrainerRun):
    """The runs of one of Lightning's evaluating loops, ``loop``.

    Attributes:
        pieces: Modules that a pipeline may run.
        parts: Modules around the pieces that were taken apart and run as user code.
        shared: State that a batch changes and the next one may read, or None. With such state, batches run one by one.
    """

    def __init__(
        self, trainer: L.Trainer, loop: EvaluatingLoop, precision: Precision, settings: RunSettings, run_seed: int
    ) -> None:
        super().__init__()
        self.trainer = trainer
        self.loop = loop
        self.module: L.LightningModule = trainer.lightning_module
        self.precision = precision
        self.settings = settings
        self.generators = RandomGenerators(
            run_seed, settings.virtual_worker, deterministic=torch.are_deterministic_algorithms_enabled()
        )
        self.names = named_pieces(self.module, settings.module)
        self.pieces: Sequence[Piece] = ()
        self.layout: Layout | None = None
        self.in_flight = 1
        self.parts: Sequence[nn.Module] = ()
        self.shared: str | None = None
        self._run: EvaluationRun | None = None
        self.operands = OperandsTogether(settings.devices)
        self._undo = ExitStack()
        self._warned: set[str] = set()

    def lacking(self) -> str:
        return "this was an evaluation; take smaller batches in it, or give more devices, or ones with more memory"

    def open(self) -> None:
        """Take over every run of the loop from now on. Called for an evaluation outside of training."""
        self._undo.enter_context(self.operands)
        self._undo.callback(Redirect(self.loop, "run", lambda redirect: self.run(redirect.original)).remove)
        self._undo.callback(Redirect(self.module, BEFORE_TRANSFER, before_transfer).remove)

    def close(self) -> None:
        self._undo.close()

    def take_over(self, pieces: Sequence[Piece], layout: Layout, in_flight: int) -> None:
        """Take over the pieces and stages that training has found."""
        self.pieces, self.layout, self.in_flight = pieces, layout, in_flight

    def is_worth_it(self) -> bool:
        """Return True if several batches could be in flight over several stages."""
        if self.layout is not None:
            return len(self.layout.devices) > 1 and self.in_flight > 1
        stages = len(self.settings.devices) if self.settings.stages == "auto" else self.settings.stages
        return stages > 1 and self.settings.in_flight != 1

    def run(self, original: Callable[[], Any]) -> Any:
        """Run one evaluation: ``original`` is Lightning's own loop."""
        if not self.is_worth_it():
            return original()
        threads, around = torch.get_num_threads(), self._run
        torch.set_num_threads(self.settings.torch_threads)
        # A BatchSizeFinder runs the loop within that loop's own start.
        with nullcontext() if around is None else around.suspended(), compiled_calls_apart():
            self._run = run = EvaluationRun(self)
            try:
                return original()
            except SettingError as error:
                stage = self.trainer.state.stage
                assert stage is not None
                error.args = (f"in this {_STAGES[stage]}, {error.args[0]}", *error.args[1:])
                raise
            finally:
                self._run = around
                try:
                    run.close()
                finally:
                    torch.set_num_threads(threads)

    def evaluation_step(self, hook: str, native: Callable[..., Any], *args: Any) -> Any:
        return native(*args) if self._run is None else self._run.step(hook, native, *args)

    # What a run asks.

    def plan(self, pieces: Sequence[Piece], default_dtype: torch.dtype | None) -> None:
        """Split the layers of ``pieces`` into stages, and move them to their devices."""
        devices, wanted = self.settings.devices, self.settings.stages
        stages = min(len(devices) if wanted == "auto" else wanted, sum(len(piece.layers) for piece in pieces))
        times = ProfilingInput(pieces, self.generators, default_dtype).seconds(backward=False)
        where = place(stages, devices)
        first = self._within_memory(self.settings.choose_split_points(times, stages), pieces, where, times)
        in_flight = stages + 1 if self.settings.in_flight == "auto" else self.settings.in_flight
        layout = Layout.of(pieces, Decision(first, where, in_flight, stage_times(times, first)))
        move_to_devices(layout, self.module, None)
        for piece in pieces:
            piece.inputs.clear()
        self.take_over(pieces, layout, in_flight)

    def _within_memory(
        self, first: tuple[int, ...], pieces: Sequence[Piece], devices: Sequence[torch.device], times: Sequence[float]
    ) -> tuple[int, ...]:
        """Return split points ``first``, or other ones if the weights of their stages would fill ``devices``."""
        limits = self.settings.memory
        room = [FULL * limits.get(device, math.inf) / devices.count(device) for device in devices]
        sizes = [_bytes(layer.module) for piece in pieces for layer in piece.layers]
        sizes[-1] += max(0, _bytes(self.module) - sum(sizes))  # what no stage holds lies on the last one's device
        taken = stage_times(sizes, first)
        is_within = all(own <= most for own, most in zip(taken, room, strict=True))
        return first if is_within else partition_within(times, sizes, room)

    def context(self, hook: str) -> AbstractContextManager[Any]:
        """Open the precision plugin's context around the user's step ``hook``."""
        contexts = {
            "validation_step": self.precision.val_step_context,
            "test_step": self.precision.test_step_context,
            "predict_step": self.precision.predict_step_context,
        }
        return contexts[hook]()

    def warn(self, reasons: Mapping[str, str]) -> None:
        """Warn once for each piece why it is not pipelined."""
        for name, reason in reasons.items():
            if name not in self._warned:
                self._warned.add(name)
                warnings.warn(f"the evaluation of '{name}' does not run in the pipeline: {reason}", stacklevel=2)


class EvaluationRun(Driver):
    """One run of the loop of ``evaluation``."""

    def __init__(self, evaluation: Evaluation) -> None:
        super().__init__(evaluation.trainer, evaluation.precision)
        self._evaluation = evaluation
        self._generators: RandomGenerators
        self._ahead: tuple[DataFetcher, LookAhead] | None = None
        self._steps = 0
        self._hook = ""
        self._seeds = seeds_of_torch()
        self._reset = Redirect(evaluation.loop, "reset", self._on_reset)

    def close(self) -> None:
        with ExitStack() as stack:
            stack.callback(self._reset.remove)
            if self._ahead is not None:
                fetcher, ahead = self._ahead
                stack.callback(set_fetcher, self._evaluation.loop, fetcher)
                stack.callback(ahead.close)
            super().close()

    def suspended(self) -> AbstractContextManager[None]:
        """Suspend this run for another run of the loop within it."""
        return self._reset.suspended()

    def step(self, hook: str, native: Callable[..., Any], *args: Any) -> Any:
        if self._ahead is None:  # the user's step fetches batches itself
            return native(*args)
        self._steps += 1
        if self.pipeline is not None and self._steps in self.pipeline.minibatches:
            return self.finish(self._steps, args).output
        return self._first(hook, native, *args) if self._steps == 1 else native(*args)

    def _first(self, hook: str, native: Callable[..., Any], *args: Any) -> Any:
        """Run the first step in Lightning's own thread, and then start the pipeline if it has pieces to run."""
        evaluation, settings, pieces = self._evaluation, self._evaluation.settings, self._evaluation.pieces
        self._hook = hook
        if seeds_of_torch() != self._seeds:
            rank_zero_info(
                "HetPipe: this evaluation does not run in the pipeline, because a hook has set a seed before its first"
                " batch, and batches of a pipeline draw from random states of their own"
            )
            return native(*args)
        settings.waited_in()
        trainer = self._trainer
        self._generators = replace(evaluation.generators, evaluation=f"{trainer.state.stage} {trainer.global_step}")
        with own_state(self._generators.state(1)):  # a state that, like later batches', depends on no thread's timing
            calls: list[nn.Module] = []
            state = CarriedState(evaluation.module, calls)
            state.watch([evaluation.module, *evaluation.parts])
            watch = EvaluationWatch(
                evaluation.module,
                evaluation.names,
                self._generators,
                1,
                capture_timeout=settings.capture_timeout,
                known=pieces,
                calls=calls,
                on_apart=lambda module: state.watch(user_parts([module], ())),
            )
            # Weights lie on provisional stages as long as there is no layout.
            limits = settings.memory if evaluation.layout is None else {}
            overflow = Overflow(evaluation.module, settings.spread, limits)
            with closing(state), watch.watching(), evaluation.operands.told(overflow):
                output = native(*args)
            pieces = watch.pieces
            modules = {piece.module for piece in pieces}
            evaluation.shared = evaluation.shared or (SHARED if watch.shares else state.found(modules))
            if watch.apart:
                evaluation.parts = user_parts(watch.apart.values(), modules)
            evaluation.warn(watch.reasons)
            for line in watch.without_graph:
                rank_zero_info(line)
        waited = settings.waited_in() is not None  # with the other virtual workers, which wait in each step
        if pieces and evaluation.shared is not None:
            names = "', '".join(piece.name for piece in pieces)
            evaluation.warn({names: f"code around it changes {evaluation.shared}, which the next batch may read"})
        elif pieces and not waited:
            self._begin(pieces)
        return output

    def _on_reset(self, redirect: Redirect) -> None:
        redirect.original()
        fetcher = fetcher_of(self._evaluation.loop)
        if fetcher is not None and not isinstance(fetcher, DataLoaderIterFetcher):
            self._ahead = fetcher, LookAhead(fetcher, self)
            set_fetcher(self._evaluation.loop, self._ahead[1])

    # What the driver asks of the loop.

    def begun(self) -> int:
        return self._steps

    def runs_ahead(self) -> bool:
        return self.pipeline is not None

    def ahead_limit(self) -> int:
        return self._evaluation.in_flight

    def submit(self, number: int, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        assert self.pipeline is not None
        evaluation, hook = self._evaluation, self._hook
        args = evaluation_arguments(evaluation.loop, hook, batch, batch_idx, dataloader_idx)
        inference, gradients = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        context, section = self.around_user(number)

        def run() -> tuple[Any, None]:
            with evaluation.context(hook), OperandsTogether(evaluation.settings.devices):
                return getattr(evaluation.module, hook)(*args), None

        @contextmanager
        def around() -> Iterator[None]:
            with torch.inference_mode(inference), torch.set_grad_enabled(gradients), context():
                yield

        self.pipeline.submit(number, Step(run, around, section))

    # The pipeline.

    def _begin(self, pieces: Sequence[Piece]) -> None:
        """Make the pipeline for ``pieces`` after the first batch."""
        evaluation, settings, module = self._evaluation, self._evaluation.settings, self._evaluation.module
        context = partial(evaluation.context, self._hook)
        default_dtype = default_dtype_in(context)
        if evaluation.layout is None:
            evaluation.plan(pieces, default_dtype)
        layout, in_flight = evaluation.layout, evaluation.in_flight
        assert layout is not None
        self.extensions.add(EvaluatedPieces(evaluation, layout, pieces, self._generators, self))
        engine = Engine(
            [(piece.name, piece.layers) for piece in evaluation.pieces],
            layout.split_points,
            layout.devices,
            StageSettings(
                self._generators, in_flight, settings.torch_threads, default_dtype, settings.before_pass, evaluates=True
            ),
            settings.timeout,
        )
        versions = Versions(STASH, in_flight, empty_at=1)
        self.extensions.add(
            UnchangedWeights(evaluation.pieces),
            RandomStates(self._generators),
            Replay(module, context),
            SharedValues(module, [piece.module for piece in evaluation.pieces], lambda: versions),
            *[Attributes(part, lambda: versions) for part in (module, *evaluation.parts)],
        )
        self.start(engine)


class UnchangedWeights(Extension):
    """A guard that refuses changes of weights and buffers of ``pieces`` while batches are in flight."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        own = ((p.name, each) for p in pieces for each in (*p.module.named_parameters(), *p.module.named_buffers()))
        self._before = [(f"{name}.{path}", tensor, version_counter(tensor)) for name, (path, tensor) in own]

    def continues(self, version: int) -> None:
        for name, tensor, counter in self._before:
            if version_counter(tensor) != counter:
                raise SettingError(
                    f"'{name}' was changed by batch {version} of an evaluation, in forward or in a hook, while later"
                    " batches were in flight; change it between evaluations, or set in_flight=1"
                )


class EvaluatedPieces(PieceForwards):
    """Replacement of the ``forward`` of the pieces of ``evaluation``. The pipeline runs the ``pipelined`` ones, whose
    live layers draw from ``generators`` meanwhile."""

    def __init__(
        self,
        evaluation: Evaluation,
        layout: Layout,
        pipelined: Sequence[Piece],
        generators: RandomGenerators,
        driver: Driver,
    ) -> None:
        super().__init__(evaluation.pieces, layout, generators, driver)
        self._evaluation = evaluation
        self._pipelined = pipelined
        self._undo.enter_context(
            attached({layer.name: layer.module for piece in evaluation.pieces for layer in piece.layers})
        )

    def through_pipeline(self, minibatch: Minibatch, index: int, piece: Piece, call: ModuleCall) -> Any:
        if piece not in self._pipelined or torch.is_grad_enabled() or (has_own_seed() and draws(piece)):
            return NOT_TAKEN
        if any(part.training for part in piece.module.modules()):
            return NOT_TAKEN
        try:
            with call.own_forward():  # an input of a new kind is captured now
                value = piece.value(call.args, call.kwargs)
                if piece.captured is not None and piece.captured.changed(value) is not None:
                    given, ordinal = (call.args, call.kwargs), minibatch.calls_of(index)
                    compare(piece, given, value, self._generators, minibatch.number, ordinal)
        except SettingError as error:
            self._evaluation.warn({piece.name: str(error)})
            return NOT_TAKEN
        return minibatch.call(index, piece.name, value, lambda given: given)


def _bytes(module: nn.Module) -> int:
    return sum(each.nbytes for each in (*module.parameters(), *module.buffers()))
