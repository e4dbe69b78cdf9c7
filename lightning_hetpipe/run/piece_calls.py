"""Calls of the pipelined modules in one fit, which minibatches in flight make through the pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_hetpipe.capture.fingerprint import Fingerprint
from lightning_hetpipe.capture.interceptor import NOT_TAKEN, ModuleCall
from lightning_hetpipe.capture.parity_check import compare
from lightning_hetpipe.capture.pieces import Piece
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.pipeline.random.generators import RandomGenerators
from lightning_hetpipe.pipeline.user.batch_in_flight import current
from lightning_hetpipe.pipeline.user.minibatch import Minibatch
from lightning_hetpipe.placement.layout import Layout
from lightning_hetpipe.run.piece_forwards import PieceForwards


class PieceCalls(PieceForwards):
    """Stands in for the ``forward`` of each of ``pieces`` in a fit.

    Args:
        pieces: In the order of ``training_step``.
        layout: Where their layers are.
        chance: The run's random numbers.
    """

    def __init__(self, pieces: Sequence[Piece], layout: Layout, chance: RandomGenerators) -> None:
        super().__init__(pieces, layout)
        self._chance = chance
        self._first: int | None = None
        self._modes: list[bool] = []
        self._form = Fingerprint(pieces)  # with the redirects, which are no change

    def epoch_begins(self, first: int) -> None:
        """An epoch begins with minibatch ``first``, in which graphs are compared with their modules."""
        self._first = first

    def changed(self) -> str | None:
        """What has changed of the live layers since copies were made of them, other than weights and buffers."""
        return self._form.changed()

    def follow(self) -> None:
        """Captures anew what has changed; the copies of layers are made next, and then :meth:`take` is called."""
        with self.interceptor.aside():
            self._form.follow()

    def take(self) -> None:
        """Copies were made of the layers as they are now."""
        self._form.take()

    def take_modes(self) -> None:
        """A stretch of ``training_step`` begins: it must not change modes of the pipelined modules."""
        self._modes = self._form.modes()

    def through_pipeline(self, index: int, piece: Piece, call: ModuleCall) -> Any:
        minibatch = current()
        if not isinstance(minibatch, Minibatch):
            return NOT_TAKEN
        self._check(index, piece.name)

        def prepare(given: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
            with call.aside():  # an input of a new kind is captured now
                value = piece.value(*given)
                if (captured := piece.captured) is not None and (
                    self._is_due(minibatch.number) or captured.way(value) is None or captured.changed(value)
                ):
                    compare(piece, given, value, self._chance, minibatch.number)
                return value

        return minibatch.call(index, piece.name, (call.args, call.kwargs), prepare)

    def _is_due(self, minibatch: int) -> bool:
        """Whether graphs are compared with their modules whatever is known to have changed: ever more rarely, and at
        the start of each epoch."""
        return minibatch == self._first or minibatch & (minibatch - 1) == 0

    def _check(self, index: int, name: str) -> None:
        """Refuses what ``training_step`` has done to the piece ``name`` that it calls, and copies would not do."""
        changed = self._form.changed()
        if changed is not None and not self._form.with_own_parameters(index):
            raise SettingError(
                f"training_step calls '{name}' with other parameters than its own (as with"
                " torch.func.functional_call), of which the pipeline keeps no versions; call it with its own"
            )
        if changed is None and (other := self._form.other_mode(self._modes)) is not None:
            changed = f"{other}.training"
        if changed is not None:
            raise SettingError(
                f"training_step changes '{changed}' before it calls '{name}', which stages, that run copies, would see"
                " too late; give it to the call as an argument, or change it in a callback at the start of an epoch"
            )
