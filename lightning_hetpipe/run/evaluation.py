"""Evaluation in a pipeline: validate, test and predict keep all stages busy, in order and without gradients.

As in training, the user's step runs ahead of Lightning's loop, in a thread for each batch in flight; what it logs,
counts and sets is there at its own step. Stages run the live layers: evaluation reads the live weights, which do not
change meanwhile, and leaves no trace in training. The first batch of every evaluation runs in Lightning's own thread,
and shows which of the modules that the step calls a pipeline can run, to the very same values. Any other call, such as
one with gradients, is left to the module itself.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import RunningStage
from torch import nn

from lightning_hetpipe.capture.pieces import Piece, named_pieces
from lightning_hetpipe.capture.profiling import ProfilingInput
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.lightning_private import BEFORE_TRANSFER, EvaluatingLoop
from lightning_hetpipe.pipeline.compile.compilation import compiled_calls_apart
from lightning_hetpipe.pipeline.operands import OperandsTogether
from lightning_hetpipe.pipeline.random.generators import RandomGenerators
from lightning_hetpipe.pipeline.stage import StageSettings
from lightning_hetpipe.placement.decision import Decision
from lightning_hetpipe.placement.layout import Layout, move_to_devices, place
from lightning_hetpipe.placement.spread import Overflow
from lightning_hetpipe.planning.search.split_points import partition_within, stage_times
from lightning_hetpipe.planning.search.spread_plan import FULL
from lightning_hetpipe.redirect import Redirect
from lightning_hetpipe.run.evaluation_run import EvaluationRun
from lightning_hetpipe.run.look_ahead import before_transfer
from lightning_hetpipe.run.run_settings import RunSettings
from lightning_hetpipe.run.trainer_run import TrainerRun

_STAGES = {
    RunningStage.SANITY_CHECKING: "validation",
    RunningStage.VALIDATING: "validation",
    RunningStage.TESTING: "test",
    RunningStage.PREDICTING: "prediction",
}


class Evaluation(TrainerRun):
    """The runs of one of Lightning's evaluating loops, ``loop``.

    Attributes:
        pieces: What a pipeline may run, once it is known.
        layout: The stages that they lie on.
        parts: Modules around these pieces that were taken apart, and run as user code.
        shared: What batches change that the next ones may read, so that one runs after the other; None for nothing.
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
        self.run_seed = run_seed
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
        """Take over every run of the loop from now on; for one outside of training."""
        self._undo.enter_context(self.operands)
        self._undo.callback(Redirect(self.loop, "run", lambda redirect: self.run(redirect.original)).remove)
        self._undo.callback(Redirect(self.module, BEFORE_TRANSFER, before_transfer).remove)

    def close(self) -> None:
        self._undo.close()

    def take_over(self, pieces: Sequence[Piece], layout: Layout, in_flight: int) -> None:
        """Training has found these pieces, and lies on these stages."""
        self.pieces, self.layout, self.in_flight = pieces, layout, in_flight

    def is_worth_it(self) -> bool:
        """Tell whether several batches could be in flight over several stages."""
        if self.layout is not None:
            return len(self.layout.devices) > 1 and self.in_flight > 1
        stages = len(self.settings.devices) if self.settings.stages == "auto" else self.settings.stages
        return stages > 1 and self.settings.in_flight != 1

    def run(self, original: Callable[[], Any]) -> Any:
        """One evaluation: ``original`` is Lightning's own loop."""
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

    def overflow(self) -> Overflow:
        """Overflow of the first batch, as long as weights lie on provisional stages."""
        limits = self.settings.memory if self.layout is None else {}
        return Overflow(self.module, self.settings.spread, limits)

    def plan(self, pieces: Sequence[Piece], default_dtype: torch.dtype | None) -> None:
        """Cuts the layers of ``pieces`` into stages, and moves them to their devices."""
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
        """Split points ``first``, or others where their stages' weights would fill ``devices``."""
        limits = self.settings.memory
        room = [FULL * limits.get(device, math.inf) / devices.count(device) for device in devices]
        sizes = [_bytes(layer.module) for piece in pieces for layer in piece.layers]
        sizes[-1] += max(0, _bytes(self.module) - sum(sizes))  # what no stage holds lies on the last one's device
        taken = stage_times(sizes, first)
        is_within = all(own <= most for own, most in zip(taken, room, strict=True))
        return first if is_within else partition_within(times, sizes, room)

    def stage_settings(self, default_dtype: torch.dtype | None) -> StageSettings:
        settings = self.settings
        return StageSettings(
            self.generators, self.in_flight, settings.torch_threads, default_dtype, settings.before_pass
        )

    def context(self, hook: str) -> AbstractContextManager[Any]:
        """Around the user's step ``hook``, what the precision plugin wants."""
        contexts = {
            "validation_step": self.precision.val_step_context,
            "test_step": self.precision.test_step_context,
            "predict_step": self.precision.predict_step_context,
        }
        return contexts[hook]()

    def warn(self, reasons: Mapping[str, str]) -> None:
        """Says once of each piece why it is not pipelined."""
        for name, reason in reasons.items():
            if name not in self._warned:
                self._warned.add(name)
                warnings.warn(f"the evaluation of '{name}' does not run in the pipeline: {reason}", stacklevel=2)


def _bytes(module: nn.Module) -> int:
    return sum(each.nbytes for each in (*module.parameters(), *module.buffers()))
