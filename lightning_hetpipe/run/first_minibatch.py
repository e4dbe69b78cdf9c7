"""The first minibatch of a fit: watched for pieces and their layers, which are then laid out as stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import lightning as L
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from lightning_hetpipe.capture.compiled_modules import look_through
from lightning_hetpipe.capture.pieces import Piece, named_pieces
from lightning_hetpipe.capture.profiling import ProfilingInput
from lightning_hetpipe.capture.watch import Watch
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.pipeline.random.generators import RandomGenerators
from lightning_hetpipe.pipeline.user.user_section import ProcessState
from lightning_hetpipe.placement.planner import Decision, told_in_flight
from lightning_hetpipe.planning.model.units import in_bytes
from lightning_hetpipe.redirect import Redirect
from lightning_hetpipe.reporting.meter import batch_size
from lightning_hetpipe.run.extensions.outside_parameters import OutsideParameters
from lightning_hetpipe.run.extensions.random_states import own_state
from lightning_hetpipe.run.run_settings import RunSettings, check_resumed, nothing_to_recompute
from lightning_hetpipe.run.staleness_warning import check_staleness
from lightning_hetpipe.run.steps import Steps
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


class Begin(Protocol):
    """Begins the pipeline that was decided on.

    Args:
        pieces: What it runs.
        decision: On stages.
        in_flight: Nm.
        outside: What the module has besides ``pieces``.
        changing: The ``id`` of each live buffer that forwards change.
    """

    def __call__(
        self,
        pieces: Sequence[Piece],
        decision: Decision,
        in_flight: int,
        outside: OutsideParameters,
        changing: set[int],
    ) -> None: ...


class FirstMinibatch(Steps):
    """Runs the first minibatch of a fit in Lightning's own thread; once its gradients are there, a pipeline begins."""

    def __init__(
        self,
        trainer: L.Trainer,
        precision: Precision,
        settings: RunSettings,
        run_seed: int,
        chance: RandomGenerators,
        user_step: UserStep,
        synchroniser: Synchroniser | None,
        begin: Begin,
    ) -> None:
        self._module: L.LightningModule = trainer.lightning_module
        self._settings = settings
        self._run_seed = run_seed
        self._synchroniser = synchroniser
        self._begin = begin
        names = named_pieces(self._module, settings.module)
        self._watch = partial(WatchedStep, trainer, precision, settings, chance, names, user_step)
        self._watched: WatchedStep | None = None

    def redirects(self) -> list[Redirect]:
        return look_through(self._module, stages_compile=self._settings.compile is not None)

    def step(self, number: int, native: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        self._watched = self._watch(number)
        return self._watched.run(native, args, self._run_seed)

    def backward(self, native: Callable[[], None]) -> None:
        watched, self._watched = self._watched, None
        assert watched is not None
        with noting_where():
            native()
            decision, in_flight = watched.decide(self._synchroniser)
            self._begin(watched.pieces, decision, in_flight, watched.outside, watched.changed_buffers())


class WatchedStep:
    """Minibatch ``number``, run in Lightning's own thread on the live weights.

    Attributes:
        outside: What the module has besides its pieces.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        precision: Precision,
        settings: RunSettings,
        chance: RandomGenerators,
        names: Sequence[str] | None,
        user_step: UserStep,
        number: int,
    ) -> None:
        callbacks = getattr(trainer, "callbacks", [])  # set by a connector, without declaring it
        finetuning = any(isinstance(callback, BaseFinetuning) for callback in callbacks)
        module: L.LightningModule = trainer.lightning_module
        self.outside = OutsideParameters(module)
        self._trainer = trainer
        self._precision = precision
        self._settings = settings
        self._chance = chance
        self._user_step = user_step
        self._number = number
        self._watch = Watch(module, names, chance, number, frozen_too=finetuning)
        self._asked: str | None = None  # of the other virtual workers
        self._samples = 1

    @property
    def pieces(self) -> Sequence[Piece]:
        return self._watch.pieces

    def changed_buffers(self) -> set[int]:
        """The ``id`` of each live buffer that the forward has changed."""
        return self._watch.changed_buffers()

    def run(self, native: Callable[..., Any], args: tuple[Any, ...], run_seed: int) -> Any:
        """The user's step, as Lightning would run it: by ``native``."""
        torch.set_num_threads(self._settings.torch_threads)
        if (limit := self._settings.first_memory) is not None:
            check_first_minibatch(self._trainer.lightning_module, self._trainer.optimizers[0], limit)
        asked = self._settings.asked
        asked()
        with self._watch.watching(), self._own_random_numbers(run_seed), noting_where():
            output = native(*args)
        self._asked = asked()
        loss = self._user_step.loss_of(output)
        with self._precision.train_step_context():
            self._watch.check(loss)
        self._samples = batch_size(args[0] if args else None)
        return output

    def decide(self, synchroniser: Synchroniser | None) -> tuple[Decision, int]:
        """What is to be run, and the Nm that all virtual workers agree on.

        Raises:
            SettingError: where what was asked for cannot be done with these layers.
        """
        settings = self._settings
        dtype, optimizer = self._user_step.default_dtype(), self._trainer.optimizers[0]
        study = ProfilingInput(self.pieces, self._chance, dtype, optimizer, self._samples)
        assert settings.decide is not None
        decision = settings.decide(study)
        in_flight = decision.in_flight if synchroniser is None else synchroniser.agree(decision.in_flight)
        check_resumed(settings.resumed, in_flight)
        if self._asked is not None and in_flight > 1:
            raise ahead(self._asked)
        for line in decision.said:
            rank_zero_info(line)
        if decision.said and in_flight != decision.in_flight:
            rank_zero_info(
                f"but {told_in_flight(in_flight)}: the most that any virtual worker has, as all have as many"
            )
        check_staleness(self._trainer, in_flight, synchroniser)
        if settings.recompute and len(decision.cuts) == len(self.pieces) == 1:
            nothing_to_recompute()
        return decision, in_flight

    @contextmanager
    def _own_random_numbers(self, run_seed: int) -> Iterator[None]:
        """The minibatch's, if several are to be in flight: it draws the same where a run is resumed."""
        asked, stages = self._settings.in_flight, self._settings.stages
        if asked == 1 or (asked == "auto" and (stages == 1 or (stages == "auto" and len(self._settings.devices) == 1))):
            yield
            return
        with own_state(ProcessState.seeded(run_seed, self._settings.virtual_worker, self._number)):
            yield
