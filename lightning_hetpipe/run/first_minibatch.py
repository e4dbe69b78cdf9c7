"""The first minibatch of a fit: it is watched for pieces and their layers, which are then laid out as stages."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from lightning_hetpipe.capture.pieces import named_pieces
from lightning_hetpipe.capture.profiling import ProfilingInput
from lightning_hetpipe.capture.watch import TrainingWatch
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.lightning_private import callbacks_of
from lightning_hetpipe.pipeline.operands import OperandsTogether
from lightning_hetpipe.pipeline.random.generators import RandomGenerators
from lightning_hetpipe.pipeline.user.user_section import own_state
from lightning_hetpipe.placement.decision import Decision, without_gain
from lightning_hetpipe.placement.spread import Overflow
from lightning_hetpipe.planning.model.units import in_bytes
from lightning_hetpipe.reporting.report import batch_size
from lightning_hetpipe.rules.versions import Versions
from lightning_hetpipe.run.driver import default_dtype_in
from lightning_hetpipe.run.extensions.outside_parameters import OutsideParameters, States
from lightning_hetpipe.run.lifecycle import NOTHING
from lightning_hetpipe.run.run_settings import (
    RunSettings,
    check_resumed,
    loss_of,
    nothing_to_recompute,
    trains_frozen_later,
)
from lightning_hetpipe.run.stale_gradients import check_staleness, has_batch_norm
from lightning_hetpipe.torch_private.tensors import pytree
from lightning_hetpipe.workers.collectives import ahead
from lightning_hetpipe.workers.synchroniser import NoSynchroniser, Synchroniser

SPREAD = "before stages are decided, a model is spread over its devices by the bytes of its weights"
LACKING = (
    f"this was the first minibatch of a fit; {SPREAD}; take smaller batches, or give more devices, or ones with more"
    " memory"
)
"""Note in the error of a first minibatch that runs out of memory."""


def check_memory(module: nn.Module, optimizer: torch.optim.Optimizer, limits: Mapping[torch.device, int]) -> None:
    """Raise SettingError if weights, gradients and optimizer state alone exceed the limit of a device in bytes."""
    for device, limit in limits.items():
        held = [parameter for parameter in module.parameters() if parameter.device == device]
        weights = sum(parameter.nbytes for parameter in held)
        gradients = sum(parameter.nbytes for parameter in held if parameter.requires_grad)
        states = pytree.tree_leaves([optimizer.state[parameter] for parameter in held if parameter in optimizer.state])
        state = sum(each.nbytes for each in states if isinstance(each, Tensor))
        if (taken := weights + gradients + state) > limit:
            also = f" and {in_bytes(state)} of optimizer state" if state else ""
            raise SettingError(
                f"{SPREAD}; of {type(module).__name__}, {in_bytes(weights)} of weights, {in_bytes(gradients)} of"
                f" gradients{also} come to {device}: {in_bytes(taken - limit)} more than its {in_bytes(limit)}; give"
                " more devices, or ones with more memory, or train fewer weights"
            )


Begin = Callable[[TrainingWatch, Decision, int, States], None]
"""Begins the pipeline from the watched step, the stages, Nm, and the module's tensors before that step."""


@dataclass(eq=False)
class FirstMinibatch:
    """A watch over the first minibatch of a fit in Lightning's own thread. It decides once the gradients are there.
    Then it calls ``begin`` for a pipeline, or ``stay`` if hand-overs would eat the gain of a pipeline."""

    trainer: L.Trainer
    precision: Precision
    settings: RunSettings
    generators: RandomGenerators
    synchroniser: Synchroniser | NoSynchroniser
    operands: OperandsTogether
    begin: Begin
    stay: Callable[[], None]

    def __post_init__(self) -> None:
        self._module: L.LightningModule = self.trainer.lightning_module
        self._names = named_pieces(self._module, self.settings.module)
        self._finetuned = trains_frozen_later(self.trainer)
        self._averaged = bool(callbacks_of(self.trainer, StochasticWeightAveraging))
        self._watch: TrainingWatch
        self._before: States
        self._waited: str | None = None  # the call, in the step, in which virtual workers have waited for each other
        self._samples = 1

    def step(self, minibatch: int, native: Callable[..., Any], args: Sequence[Any]) -> Any:
        settings = self.settings
        self._watch = watch = TrainingWatch(
            self._module,
            self._names,
            self.generators,
            minibatch,
            capture_timeout=settings.capture_timeout,
            frozen_too=self._finetuned,
            changed_later=self._changed_later,
            wants_graphs=settings.wants_graphs,
        )
        self._before = OutsideParameters(self._module).seen
        torch.set_num_threads(settings.torch_threads)
        self._collect_garbage()
        check_memory(self._module, self.trainer.optimizers[0], settings.memory)
        settings.waited_in()
        overflow = Overflow(self._module, settings.spread, settings.memory, self.trainer.optimizers, self._finetuned)
        # If minibatches have their own state, the user's step draws the same numbers as in a runner of a resumed run.
        state = own_state(self.generators.state(minibatch)) if settings.may_run_ahead else NOTHING
        with watch.watching(), self.operands.told(overflow), state:
            output = native(*args)
        self._waited = settings.waited_in()
        loss = loss_of(output, self.trainer)
        with self.precision.train_step_context():
            watch.check(loss, args[:1])
        if apart := watch.apart:
            rank_zero_info(apart.explanation())
            if apart.timed_out:
                warnings.warn(apart.timeout_warning(settings.capture_timeout), stacklevel=2)
        for line in watch.without_graph:
            rank_zero_info(line)
        self._samples = batch_size(args[0] if args else None)
        return output

    def backward(self, minibatch: int, native: Callable[[], None]) -> None:
        """Run Lightning's own backward ``native``, and begin the run of the next minibatches."""
        watch, before = self._watch, self._before
        del self._watch, self._before
        native()
        decision = self._decide(watch)
        self._collect_garbage()
        if self._is_without_gain(watch, decision):
            self.stay()
        else:
            decision, in_flight = self._agreed(watch, decision)
            self.begin(watch, decision, in_flight, before)

    def _collect_garbage(self) -> None:
        """Free device memory that an earlier fit, or the capture, left in reference cycles of graphs and layers. Python
        alone would collect them by the number of objects, whatever bytes they hold on a device."""
        if self.settings.memory:
            gc.collect()

    def _changed_later(self, layer: nn.Module) -> str | None:
        """Describe what a callback will do to ``layer`` that no graph follows, or return None."""
        if self._averaged and has_batch_norm(layer):
            return "has a BatchNorm, whose momentum StochasticWeightAveraging sets to None in the last epoch"
        return None

    def _decide(self, watch: TrainingWatch) -> Decision:
        return self.settings.decide(
            ProfilingInput(
                watch.pieces,
                self.generators,
                default_dtype_in(self.precision.train_step_context),
                self.trainer.optimizers[0],
                samples=self._samples,
                called=watch.called,
                user=watch.user,
                finetuned=self._finetuned,
                why_apart=next(iter(watch.apart.reasons.values()), ""),
            ),
            self.settings.weights,
        )

    def _is_without_gain(self, watch: TrainingWatch, decision: Decision) -> bool:
        """Log why a pipeline is not worth it, if so. Return True if one stage is to run instead. Return False if the
        user asked for stages or Nm, on which results depend, or for devices that are not here."""
        settings = self.settings
        if (why := without_gain(watch.apart, watch.pieces, decision)) is None:
            return False
        asked = (settings.stages, settings.in_flight) != ("auto", "auto")
        if asked or settings.virtual_workers > 1 or decision.emulated:
            rank_zero_info(f"HetPipe: {why}, so that a pipeline is hardly worth it; leave stages and in_flight out")
            return False
        rank_zero_info(f"HetPipe: one stage, as {why}; set stages for a pipeline all the same")
        return True

    def _agreed(self, watch: TrainingWatch, decision: Decision) -> tuple[Decision, int]:
        """Take the weight policy and Nm on which all virtual workers agree, and log what follows from them."""
        settings, layers = self.settings, [layer for piece in watch.pieces for layer in piece.layers]
        every = self.trainer.accumulate_grad_batches
        in_flight, weights = self.synchroniser.agree(decision.in_flight, decision.weights, every)
        if decision.at is not None and in_flight != decision.in_flight:
            decision = decision.at(in_flight, weights)  # in_flight may lack room, or have a faster plan
        decision = replace(decision, weights=weights, at=None)
        versions = Versions(decision.weights, in_flight, every)
        versions.check(self.synchroniser.wave)
        check_resumed(settings.resumed, in_flight)
        if self._waited is not None and in_flight > 1:
            raise ahead(self._waited)
        for line in decision.explanation:
            rank_zero_info(line)
        if decision.explanation and in_flight != decision.in_flight:
            rank_zero_info(
                f"but {decision.weights.told(in_flight)}: the most that any virtual worker has, as all have as many"
            )
        if any(layer.recompute for layer in layers):
            rank_zero_info(
                "gradient checkpointing is enabled: stages with such layers, but the last, compute forwards again for"
                " the backward, as recompute=True does, and not by torch.utils.checkpoint"
            )
        if in_flight > 1 and settings.automatic is not None:
            rank_zero_info(settings.automatic.told(decision.weights))
        behind = self.synchroniser.staleness(decision.weights.behind(versions))
        check_staleness(
            self.trainer,
            in_flight,
            *behind,
            predicted=decision.weights.predicts,
            corrected=settings.lr_correction is not None,
            automatic=settings.automatic is not None,
        )
        if settings.recompute and len(decision.split_points) == len(watch.called) == 1:
            nothing_to_recompute()
        return decision, in_flight
