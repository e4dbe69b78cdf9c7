"""One evaluation: a run of one of Lightning's evaluating loops, from the first batch, which shows what there is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from lightning_hetpipe.capture.evaluation_watch import EvaluationWatch
from lightning_hetpipe.capture.interceptor import NOT_TAKEN, ModuleCall
from lightning_hetpipe.capture.parity_check import compare
from lightning_hetpipe.capture.pieces import Piece
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.lightning_private import (
    DataFetcher,
    DataLoaderIterFetcher,
    evaluation_arguments,
    fetcher_of,
    set_fetcher,
)
from lightning_hetpipe.pipeline.evaluator import EvaluationBatch, Evaluator
from lightning_hetpipe.pipeline.operands import OperandsTogether
from lightning_hetpipe.pipeline.random.generators import draws_now
from lightning_hetpipe.pipeline.user.batch_in_flight import current
from lightning_hetpipe.pipeline.user.user_section import (
    ProcessState,
    UserSection,
    has_own_seed,
    own_state,
    seeds_of_torch,
)
from lightning_hetpipe.redirect import Redirect
from lightning_hetpipe.rules.versions import STASH, Versions
from lightning_hetpipe.run.driver import Driver, Opened
from lightning_hetpipe.run.extensions.minibatch_state import RandomStates, user_parts
from lightning_hetpipe.run.extensions.module_attributes import Attributes
from lightning_hetpipe.run.extensions.replay import Replay
from lightning_hetpipe.run.extensions.shared_values import SHARED, CarriedState, SharedValues
from lightning_hetpipe.run.lifecycle import Extension
from lightning_hetpipe.run.look_ahead import LookAhead, prepared
from lightning_hetpipe.run.piece_calls import PieceForwards
from lightning_hetpipe.run.user_step import default_dtype_in
from lightning_hetpipe.torch_private.tensors import version_counter

if TYPE_CHECKING:
    from lightning_hetpipe.run.evaluation import Evaluation


class EvaluationRun:
    """One run of the loop of ``evaluation``; :meth:`close` leaves no thread and no change in the module behind."""

    def __init__(self, evaluation: Evaluation) -> None:
        self._evaluation = evaluation
        self._driver: Driver[EvaluationBatch] = Driver(self)
        self._evaluator: Evaluator | None = None
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
            self._driver.close()

    def suspended(self) -> AbstractContextManager[None]:
        """Suspend this run, for another run of the loop within it."""
        return self._reset.suspended()

    def step(self, hook: str, native: Callable[..., Any], *args: Any) -> Any:
        """The loop's next step."""
        if self._ahead is None:  # the user's step fetches batches itself
            return native(*args)
        self._steps += 1
        if self._driver.is_in_flight(self._steps):
            return self._driver.finish(self._steps, args).output
        return self._first(hook, native, *args) if self._steps == 1 else native(*args)

    def _first(self, hook: str, native: Callable[..., Any], *args: Any) -> Any:
        """The first step, in Lightning's own thread; then the pipeline takes over, if there is something for it."""
        evaluation, pieces = self._evaluation, self._evaluation.pieces
        self._hook = hook
        if seeds_of_torch() != self._seeds:
            rank_zero_info(
                "HetPipe: this evaluation does not run in the pipeline, because a hook has set a seed before its first"
                " batch, and batches of a pipeline draw from random states of their own"
            )
            return self._driver.step_inline(1, native, args)
        evaluation.settings.waited_in()
        with own_state(self._state(1)):  # which depends on no thread's timing, as that of later batches
            calls: list[nn.Module] = []
            state = CarriedState(evaluation.module, calls)
            state.watch([evaluation.module, *evaluation.parts])
            watch = EvaluationWatch(
                evaluation.module,
                evaluation.names,
                evaluation.generators,
                self._tag(1),
                capture_timeout=evaluation.settings.capture_timeout,
                known=pieces,
                calls=calls,
                on_apart=lambda module: state.watch(user_parts([module], ())),
            )
            with closing(state), watch.watching(), evaluation.operands.told(evaluation.overflow()):
                output = self._driver.step_inline(1, native, args)
            pieces = watch.pieces
            modules = {piece.module for piece in pieces}
            evaluation.shared = evaluation.shared or (SHARED if watch.shares else state.found(modules))
            if watch.apart:
                evaluation.parts = user_parts(watch.apart.values(), modules)
            evaluation.warn(watch.reasons)
            for line in watch.without_graph:
                rank_zero_info(line)
        waited = evaluation.settings.waited_in() is not None  # with the other virtual workers, which wait in each step
        if pieces and evaluation.shared is not None:
            names = "', '".join(piece.name for piece in pieces)
            evaluation.warn({names: f"code around it changes {evaluation.shared}, which the next batch may read"})
        elif pieces and not waited:
            self._start(self._stand_in(pieces))
        return output

    def _on_reset(self, redirect: Redirect) -> None:
        redirect.original()
        fetcher = fetcher_of(self._evaluation.loop)
        if fetcher is not None and not isinstance(fetcher, DataLoaderIterFetcher):
            self._ahead = fetcher, LookAhead(fetcher, self._driver)
            set_fetcher(self._evaluation.loop, self._ahead[1])

    # What the driver asks of the loop.

    def begun(self) -> int:
        return self._steps

    def runs_ahead(self) -> bool:
        return True

    def limit(self, in_flight: int) -> int:
        return in_flight

    def prepare(self, batch: Any, dataloader_idx: int) -> Any:
        return prepared(batch, dataloader_idx, self._evaluation.trainer, self._evaluation.precision)

    def submit(self, number: int, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        evaluation, evaluator, hook = self._evaluation, self._evaluator, self._hook
        assert evaluator is not None
        args = evaluation_arguments(evaluation.loop, hook, batch, batch_idx, dataloader_idx)

        def step() -> Any:
            with evaluation.context(hook), OperandsTogether(evaluation.settings.devices):
                return getattr(evaluation.module, hook)(*args)

        def start(context: Opened, section: UserSection) -> int:
            evaluator.launch(EvaluationBatch(evaluator, number, step, context, section))
            return 0  # the live weights are all there is

        self._driver.launch(number, start)

    # Random numbers.

    def _tag(self, number: int | None = None) -> str:
        """Names this evaluation, or its batch ``number``, for random numbers."""
        trainer = self._evaluation.trainer
        name = f"{trainer.state.stage} {trainer.global_step}"
        return name if number is None else f"{name} {number}"

    def _state(self, number: int) -> ProcessState:
        """The process-wide state that batch ``number`` begins with."""
        settings = self._evaluation.settings
        return ProcessState.seeded(self._evaluation.run_seed, settings.virtual_worker, self._tag(number))

    # The pipeline.

    def _stand_in(self, pieces: Sequence[Piece]) -> Evaluator:
        """Makes the pipeline, and lets calls of ``pieces`` go through it once it is started."""
        evaluation = self._evaluation
        default_dtype = default_dtype_in(partial(evaluation.context, self._hook))
        if evaluation.layout is None:
            evaluation.plan(pieces, default_dtype)
        assert evaluation.layout is not None
        evaluator = Evaluator(
            [(piece.name, piece.layers) for piece in evaluation.pieces],
            evaluation.layout.split_points,
            evaluation.layout.devices,
            evaluation.stage_settings(default_dtype),
            evaluation.settings.timeout,
            self._tag(),
        )
        self._driver.extensions.add(EvaluatedPieces(evaluation, evaluator, pieces, self._tag))
        return evaluator

    def _start(self, evaluator: Evaluator) -> None:
        """The first batch is through, in Lightning's own thread."""
        evaluation = self._evaluation
        self._evaluator = evaluator
        versions = Versions(STASH, evaluation.in_flight, empty_at=1)
        self._driver.extensions.add(
            UnchangedWeights(evaluation.pieces),
            RandomStates(self._state),
            Replay(evaluation.module, partial(evaluation.context, self._hook)),
            SharedValues(evaluation.module, [piece.module for piece in evaluation.pieces], lambda: versions),
            # After the stand-ins of Replay, which all see.
            *[Attributes(part, lambda: versions) for part in (evaluation.module, *evaluation.parts)],
        )
        self._driver.start(evaluator)


class UnchangedWeights(Extension):
    """Refuses changes of weights and buffers of ``pieces`` while batches are in flight, as stages run the live ones."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        own = ((p.name, each) for p in pieces for each in (*p.module.named_parameters(), *p.module.named_buffers()))
        self._tensors: dict[str, Tensor] = {f"{name}.{path}": tensor for name, (path, tensor) in own}
        self._counters = self._count()

    def continues(self, version: int) -> None:
        for name, before, now in zip(self._tensors, self._counters, self._count(), strict=True):
            if before != now:
                raise SettingError(
                    f"'{name}' was changed by batch {version} of an evaluation, in forward or in a hook, while later"
                    " batches were in flight; change it between evaluations, or set in_flight=1"
                )

    def _count(self) -> list[int]:
        return [version_counter(tensor) for tensor in self._tensors.values()]


class EvaluatedPieces(PieceForwards, Extension):
    """Stands in for the ``forward`` of pieces of ``evaluation``, of which ``evaluator`` runs those ``pipelined``.

    ``tag`` names a batch, for random numbers.
    """

    def __init__(
        self, evaluation: Evaluation, evaluator: Evaluator, pipelined: Sequence[Piece], tag: Callable[[int], str]
    ) -> None:
        assert evaluation.layout is not None
        super().__init__(evaluation.pieces, evaluation.layout)
        self._evaluation = evaluation
        self._pipelined = pipelined
        self._tag = tag
        self._exits = ExitStack()
        for piece in evaluation.pieces:
            if piece.captured is not None:
                self._exits.callback(setattr, piece.captured, "exclusive", piece.captured.exclusive)
                piece.captured.exclusive = evaluator.compute_lock.exclusive

    def closed(self) -> None:
        self._exits.close()
        self.interceptor.remove()

    def through_pipeline(self, index: int, piece: Piece, call: ModuleCall) -> Any:
        batch = current()
        if not isinstance(batch, EvaluationBatch) or piece not in self._pipelined:
            return NOT_TAKEN
        if torch.is_grad_enabled() or any(part.training for part in piece.module.modules()):
            return NOT_TAKEN
        if has_own_seed() and any(draws_now(layer.module) for layer in piece.layers):
            return NOT_TAKEN
        try:
            with call.own_forward():  # an input of a new kind is captured now
                value = piece.value(call.args, call.kwargs)
                if piece.captured is not None and piece.captured.changed(value) is not None:
                    given, tag = (call.args, call.kwargs), self._tag(batch.number)
                    compare(piece, given, value, self._evaluation.generators, tag, batch.calls[index])
        except SettingError as error:
            self._evaluation.warn({piece.name: str(error)})
            return NOT_TAKEN
        return batch.call(index, piece.name, value)
