"""The first minibatch of a fit: watched for pieces and their layers, which are then laid out as stages."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from lightning_hetpipe.capture.compiled_modules import look_through
from lightning_hetpipe.capture.piece_search import TakenApart
from lightning_hetpipe.capture.pieces import Piece, named_pieces
from lightning_hetpipe.capture.profiling import ProfilingInput
from lightning_hetpipe.capture.watch import TrainingWatch
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.pipeline.random.generators import RandomGenerators
from lightning_hetpipe.pipeline.user.user_section import ProcessState, own_state
from lightning_hetpipe.placement.hand_overs import without_gain
from lightning_hetpipe.placement.planner import Decision, told_in_flight
from lightning_hetpipe.planning.model.units import in_bytes
from lightning_hetpipe.reporting.meter import batch_size
from lightning_hetpipe.run.extensions.outside_parameters import OutsideParameters
from lightning_hetpipe.run.lifecycle import Extension
from lightning_hetpipe.run.run_settings import RunSettings, check_resumed, nothing_to_recompute
from lightning_hetpipe.run.single_stage import SingleStage
from lightning_hetpipe.run.staleness_warning import check_staleness
from lightning_hetpipe.run.user_step import UserStep
from lightning_hetpipe.torch_private import pytree
from lightning_hetpipe.workers.collectives import ahead
from lightning_hetpipe.workers.synchroniser import Synchroniser

WHOLE = "the first minibatch of a fit runs whole on the device of the last stage, in this release"


def check_first_minibatch(module: nn.Module, optimizer: torch.optim.Optimizer, limit: int) -> None:
    """Refuses what does not fit into ``limit`` bytes before any activation is there.

    Raises:
        SettingError: with what is there, and what is lacking.
    """
    weights = sum(parameter.nbytes for parameter in module.parameters())
    gradients = sum(parameter.nbytes for parameter in module.parameters() if parameter.requires_grad)
    held = pytree.tree_leaves([*optimizer.state.values()])
    state = sum(each.nbytes for each in held if isinstance(each, Tensor))
    if (taken := weights + gradients + state) > limit:
        also = f" and {in_bytes(state)} of optimizer state" if state else ""
        raise SettingError(
            f"{WHOLE}, where {type(module).__name__} takes {in_bytes(weights)} of weights, {in_bytes(gradients)} of"
            f" gradients{also}: {in_bytes(taken - limit)} more than its {in_bytes(limit)}; let that be a device with"
            " more memory, or train fewer weights"
        )


@contextmanager
def noting_where() -> Iterator[None]:
    """Within it, an error for want of memory is given a note that says why so much is needed."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        error.add_note(f"HetPipeStrategy: {WHOLE}; take smaller batches, or let that be one with more memory")
        raise


Begin = Callable[[Sequence[Piece], Sequence[int], TakenApart, Decision, int, OutsideParameters, set[int]], None]
"""Begins the pipeline that was decided on.

Called with the pieces that it runs, which of them ``training_step`` calls in which order, what was taken apart, the
decision on stages, Nm, what the module has besides the pieces, and the ``id`` of each live buffer that
forwards change.
"""


class FirstMinibatch(Extension):
    """Watches the first minibatch of a fit in Lightning's own thread; once its gradients are there, calls ``begin``.

    Where hand-overs would eat the gain of a pipeline, ``stay`` is called instead: all minibatches run as the first one.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        precision: Precision,
        settings: RunSettings,
        run_seed: int,
        generators: RandomGenerators,
        user_step: UserStep,
        synchroniser: Synchroniser | None,
        begin: Begin,
        stay: Callable[[], SingleStage],
    ) -> None:
        callbacks = getattr(trainer, "callbacks", [])  # set by a connector, without declaring it
        module: L.LightningModule = trainer.lightning_module
        self._trainer = trainer
        self._module = module
        self._precision = precision
        self._settings = settings
        self._run_seed = run_seed
        self._generators = generators
        self._user_step = user_step
        self._synchroniser = synchroniser
        self._begin = begin
        self._stay = stay
        self._single: SingleStage | None = None
        self._names = named_pieces(module, settings.module)
        self._finetuned = any(isinstance(callback, BaseFinetuning) for callback in callbacks)
        self._compiled = look_through(module, stages_compile=settings.compile is not None)
        self._watched: tuple[TrainingWatch, OutsideParameters] | None = None
        self._apart = TakenApart()
        self._asked: str | None = None  # of the other virtual workers
        self._samples = 1

    @contextmanager
    def inline_step(self, minibatch: int) -> Iterator[None]:
        settings = self._settings
        if self._single is not None:
            with self._own_random_numbers(minibatch), self._single.inline_step(minibatch):
                yield
            return
        watch = TrainingWatch(
            self._module, self._names, self._generators, minibatch, self._finetuned, settings.capture_timeout
        )
        self._watched = watch, OutsideParameters(self._module)
        torch.set_num_threads(settings.torch_threads)
        if settings.first_memory is not None:
            check_first_minibatch(self._module, self._trainer.optimizers[0], settings.first_memory)
        settings.asked()
        with watch.watching(), self._own_random_numbers(minibatch), noting_where():
            yield
        self._asked = settings.asked()

    def inline_output(self, minibatch: int, args: Sequence[Any], output: Any) -> None:
        if self._single is not None:
            self._single.inline_output(minibatch, args, output)
            return
        assert self._watched is not None
        loss = self._user_step.loss_of(output)
        with self._precision.train_step_context():
            self._watched[0].check(loss)
        if apart := self._watched[0].apart:
            rank_zero_info(apart.explanation())
            if apart.timed_out:
                warnings.warn(apart.timeout_warning(self._settings.capture_timeout), stacklevel=2)
        self._samples = batch_size(args[0] if args else None)

    @contextmanager
    def inline_backward(self, minibatch: int) -> Iterator[None]:
        if self._single is not None:
            with self._single.inline_backward(minibatch):
                yield
            return
        assert self._watched is not None
        watch, outside = self._watched
        self._watched = None
        with noting_where():
            yield
            self._go_on(watch, outside)

    def _go_on(self, watch: TrainingWatch, outside: OutsideParameters) -> None:
        """Begin the pipeline for what ``watch`` has found, unless it is not worth it."""
        self._apart = watch.apart
        decision, in_flight = self.decide(watch.pieces, watch.called, self._synchroniser)
        if self._single is None:
            self._begin(watch.pieces, watch.called, watch.apart, decision, in_flight, outside, watch.changed_buffers())

    def _is_in_vain(self, pieces: Sequence[Piece], decision: Decision) -> bool:
        """Say where a pipeline is not worth it; tell whether one stage is to be run instead.

        Not so where stages or Nm, on which results depend, were asked for, or devices that are not here.
        """
        if (why := without_gain(self._apart, pieces, decision)) is None:
            return False
        asked = (self._settings.stages, self._settings.in_flight) != ("auto", "auto")
        if asked or self._synchroniser is not None or decision.emulated:
            rank_zero_info(f"HetPipe: {why}, so that a pipeline is hardly worth it; leave stages and in_flight out")
            return False
        rank_zero_info(f"HetPipe: one stage, as {why}; set stages for a pipeline all the same")
        return True

    def closed(self) -> None:
        if self._single is not None:
            self._single.closed()
        for redirect in self._compiled:
            redirect.remove()

    def decide(
        self, pieces: Sequence[Piece], called: Sequence[int], synchroniser: Synchroniser | None
    ) -> tuple[Decision, int]:
        """Decide what is to be run, and on the Nm that all virtual workers agree on.

        Where a pipeline is not worth it, all other minibatches run as this one.

        Args:
            pieces: What is to be divided into stages.
            called: Which of these a step calls, in order.
            synchroniser: Of several virtual workers.

        Raises:
            SettingError: where what was asked for cannot be done with these layers.
        """
        settings = self._settings
        dtype, optimizer = self._user_step.default_dtype(), self._trainer.optimizers[0]
        assert settings.decide is not None
        decision = settings.decide(ProfilingInput(pieces, self._generators, dtype, optimizer, self._samples, called))
        if self._is_in_vain(pieces, decision):
            self._single = self._stay()
            return decision, 1
        in_flight = decision.in_flight if synchroniser is None else synchroniser.agree(decision.in_flight)
        check_resumed(settings.resumed, in_flight)
        if self._asked is not None and in_flight > 1:
            raise ahead(self._asked)
        for line in decision.explanation:
            rank_zero_info(line)
        if decision.explanation and in_flight != decision.in_flight:
            rank_zero_info(
                f"but {told_in_flight(in_flight)}: the most that any virtual worker has, as all have as many"
            )
        if any(layer.recompute for piece in pieces for layer in piece.layers):
            rank_zero_info(
                "gradient checkpointing is enabled: stages with such layers, but the last, compute forwards again for"
                " the backward, as recompute=True does, and not by torch.utils.checkpoint"
            )
        check_staleness(self._trainer, in_flight, synchroniser)
        if settings.recompute and len(decision.split_points) == len(called) == 1:
            nothing_to_recompute()
        return decision, in_flight

    @contextmanager
    def _own_random_numbers(self, minibatch: int) -> Iterator[None]:
        """The minibatch's, if several are to be in flight: it draws the same where a run is resumed."""
        asked, stages = self._settings.in_flight, self._settings.stages
        if asked == 1 or (asked == "auto" and (stages == 1 or (stages == "auto" and len(self._settings.devices) == 1))):
            yield
            return
        with own_state(ProcessState.seeded(self._run_seed, self._settings.virtual_worker, minibatch)):
            yield
