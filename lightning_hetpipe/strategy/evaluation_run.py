"""One evaluation: from the first batch, which shows what there is, to the last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from lightning_hetpipe.capture.calls import Calls
from lightning_hetpipe.capture.pieces import Piece
from lightning_hetpipe.capture.redirect import Redirect
from lightning_hetpipe.capture.trial import compare
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.pipeline.evaluator import EvaluationFlight, Evaluator
from lightning_hetpipe.pipeline.flight import current
from lightning_hetpipe.pipeline.stretch import ProcessState, Stretch
from lightning_hetpipe.private import version_counter
from lightning_hetpipe.strategy.lookahead import LookAhead
from lightning_hetpipe.strategy.outsiders import Outsiders
from lightning_hetpipe.strategy.private import (
    DataFetcher,
    DataLoaderIterFetcher,
    evaluation_arguments,
    fetcher_of,
    move_before_transfer,
    set_fetcher,
    with_workers,
)

if TYPE_CHECKING:
    from lightning_hetpipe.strategy.evaluation import Evaluation


class EvaluationRun:
    """One run of the loop of ``evaluation``; :meth:`close` leaves no thread and no change in the module behind."""

    def __init__(self, evaluation: Evaluation) -> None:
        self._evaluation = evaluation
        self._pipeline: _Pipeline | None = None
        self._ahead: tuple[DataFetcher, LookAhead] | None = None
        self._steps = 0
        self._in_step = False  # with the other virtual workers, which the user's step waits for
        self._reset = Redirect(evaluation.loop, "reset", self._on_reset)

    def close(self) -> None:
        with ExitStack() as stack:
            stack.callback(self._reset.remove)
            if self._ahead is not None:
                fetcher, ahead = self._ahead
                stack.callback(set_fetcher, self._evaluation.loop, fetcher)
                stack.callback(ahead.close)
            if self._pipeline is not None:
                stack.callback(self._pipeline.close)

    def resting(self) -> AbstractContextManager[None]:
        """Within it, another run of the loop does not go through this one."""
        return self._reset.aside()

    def step(self, hook: str, native: Callable[..., Any], *args: Any) -> Any:
        """The loop's next step."""
        if self._ahead is None:  # the user's step fetches batches itself
            return native(*args)
        self._steps += 1
        pipeline = self._ahead_of_loop
        if pipeline is not None and pipeline.has(self._steps):
            return pipeline.finish(self._steps)
        return self._first(hook, native, *args) if self._steps == 1 else native(*args)

    def _first(self, hook: str, native: Callable[..., Any], *args: Any) -> Any:
        evaluation, pieces = self._evaluation, self._evaluation.pieces
        evaluation.settings.asked()
        stretch = Stretch(self.state(1))  # which depends on no thread's timing, as that of later batches
        stretch.enter()
        try:
            if evaluation.layout is not None and evaluation.layout.is_spread():
                # No module could run as it is: its layers run on their devices, one by one.
                self._pipeline = _Pipeline(evaluation, self, hook, pieces)
                output = native(*args)
            else:
                calls = Calls(evaluation.module, evaluation.names, evaluation.chance, self.tag(1), pieces)
                with calls.watching():
                    output = native(*args)
                pieces = calls.pieces
                evaluation.warn(calls.reasons)
        finally:
            stretch.leave()
        self._in_step = evaluation.settings.asked() is not None
        if pieces and not self._in_step:
            self._pipeline = self._pipeline or _Pipeline(evaluation, self, hook, pieces)
            self._pipeline.start()
        return output

    def _on_reset(self, redirect: Redirect) -> None:
        redirect.original()
        fetcher = fetcher_of(self._evaluation.loop)
        if fetcher is not None and not isinstance(fetcher, DataLoaderIterFetcher):
            self._ahead = fetcher, LookAhead(fetcher, self)
            set_fetcher(self._evaluation.loop, self._ahead[1])

    # What the look-ahead asks.

    @property
    def _ahead_of_loop(self) -> _Pipeline | None:
        return None if self._in_step else self._pipeline

    def publish_last(self) -> None:
        if (pipeline := self._ahead_of_loop) is not None:
            pipeline.publish(self._steps)

    def ahead_limit(self) -> int:
        return 1 if self._ahead_of_loop is None else self._evaluation.in_flight

    def fetching(self, ahead: int) -> AbstractContextManager[None]:
        return nullcontext()

    def prepare(self, batch: Any, ahead: int, dataloader_idx: int) -> Any:
        evaluation = self._evaluation
        with nullcontext() if (pipeline := self._ahead_of_loop) is None else pipeline.transfer(self._steps + 1 + ahead):
            batch = evaluation.precision.convert_input(batch)
            batch = move_before_transfer(evaluation.module, batch, dataloader_idx)
            return evaluation.trainer.strategy.batch_to_device(batch, dataloader_idx=dataloader_idx)

    def submit(self, batch: Any, ahead: int, batch_idx: int, dataloader_idx: int) -> None:
        if (pipeline := self._ahead_of_loop) is not None:
            pipeline.submit(self._steps + 1 + ahead, batch, batch_idx, dataloader_idx)

    def on_iterators(self, fetcher: DataFetcher) -> list[Redirect]:
        return with_workers(fetcher, self._unlocked, self._drain)

    def _unlocked(self) -> AbstractContextManager[None]:
        return nullcontext() if (pipeline := self._ahead_of_loop) is None else pipeline.evaluator.unlocked()

    def _drain(self) -> None:
        if (pipeline := self._ahead_of_loop) is not None:
            pipeline.evaluator.drain()

    # Random numbers.

    def tag(self, number: int | None = None) -> str:
        """Names this evaluation, or its batch ``number``, for random numbers."""
        trainer = self._evaluation.trainer
        name = f"{trainer.state.stage} {trainer.global_step}"
        return name if number is None else f"{name} {number}"

    def state(self, number: int) -> ProcessState:
        """What batch ``number`` starts with."""
        return ProcessState.seeded(
            self._evaluation.run_seed, self._evaluation.settings.virtual_worker, self.tag(number)
        )


class _Pipeline:
    """Batches in flight, from the second on; ``pieces`` are those that may be pipelined."""

    def __init__(self, evaluation: Evaluation, run: EvaluationRun, hook: str, pieces: Sequence[Piece]) -> None:
        self._evaluation = evaluation
        self._run = run
        self._hook = hook
        with evaluation.context(hook):
            inside = torch.get_default_dtype()
        default_dtype = None if inside is torch.get_default_dtype() else inside
        if evaluation.layout is None:
            evaluation.plan(pieces, default_dtype)
        assert evaluation.layout is not None
        self._layout = evaluation.layout
        held = evaluation.pieces
        self.evaluator = Evaluator(
            [(piece.name, piece.layers) for piece in held],
            self._layout.cuts,
            self._layout.devices,
            evaluation.stage_settings(default_dtype),
            evaluation.settings.timeout,
            run.tag(),
        )
        self._tensors = [t for piece in held for t in (*piece.module.parameters(), *piece.module.buffers())]
        self._counters = self._count()
        self._exits = ExitStack()
        for index, piece in enumerate(held):
            redirect = Redirect(piece.module, "forward", partial(self._forward, index, piece, piece in pieces))
            self._exits.callback(redirect.remove)
            if piece.captured is not None:
                self._exits.callback(setattr, piece.captured, "alone", piece.captured.alone)
                piece.captured.alone = self.evaluator.quiet.alone

    def start(self) -> None:
        """The first batch is through, in Lightning's own thread."""
        self._outsiders = Outsiders(self._evaluation.module, self._evaluation.in_flight, version=1)
        self._exits.callback(self._outsiders.close)
        self._exits.callback(self._outsiders.discard)
        self._exits.callback(self.evaluator.close)
        self.evaluator.start()

    def close(self) -> None:
        self._exits.close()

    def has(self, number: int) -> bool:
        return number in self.evaluator.minibatches

    def transfer(self, number: int) -> AbstractContextManager[None]:
        return self._outsiders.transfer(number)

    def submit(self, number: int, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        """Puts batch ``number`` in flight."""
        evaluation, hook = self._evaluation, self._hook
        args = evaluation_arguments(evaluation.loop, hook, batch, batch_idx, dataloader_idx)

        def step() -> Any:
            with evaluation.context(hook):
                return getattr(evaluation.module, hook)(*args)

        stretch = self._outsiders.module_stretch(number, self._run.state(number))
        self.evaluator.submit(number, step, partial(self._outsiders.recording, number), stretch)

    def finish(self, number: int) -> Any:
        """Waits for batch ``number``; gives what the user's step has given."""
        try:
            flight = self.evaluator.finish(number)
        finally:  # what it has set before it failed is there, as in a plain run
            self._outsiders.assign(number)
        with self._evaluation.context(self._hook):
            self._outsiders.replay(number)
        return flight.output

    def publish(self, number: int) -> None:
        """Step ``number`` is over, with all its callbacks.

        Raises:
            SettingError: if they have changed weights.
        """
        if self._counters != self._count():
            raise SettingError(
                f"weights of the evaluated modules were changed after batch {number} of an evaluation, while later"
                " batches were in flight; change them between evaluations, or set in_flight=1"
            )
        self._outsiders.publish(number)

    def _count(self) -> list[int]:
        return [0 if tensor.is_inference() else version_counter(tensor) for tensor in self._tensors]

    def _forward(self, index: int, piece: Piece, pipelined: bool, redirect: Redirect, *args: Any, **kwargs: Any) -> Any:
        """The pipelined module's ``forward``: through the pipeline in a batch's thread, else on the live layers."""
        flight = current()
        if (
            pipelined
            and isinstance(flight, EvaluationFlight)
            and not torch.is_grad_enabled()
            and not any(part.training for part in piece.module.modules())
        ):
            try:
                with redirect.aside():  # an input of a new kind is captured now
                    value = piece.value(args, kwargs)
                    if piece.captured is not None and piece.captured.changed(value) is not None:
                        batch = self._run.tag(flight.number)
                        compare(piece, (args, kwargs), value, self._evaluation.chance, batch)
            except SettingError as error:
                self._evaluation.warn({piece.name: str(error)})
            else:
                return flight.call(index, piece.name, value)
        if not self._layout.is_spread():
            return redirect.original(*args, **kwargs)
        with redirect.aside():
            return self._layout.run_piece(piece, args, kwargs)
