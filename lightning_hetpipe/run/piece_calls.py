"""Calls of the pipelined modules: in a pipeline if it takes them, otherwise on the live layers.

Stages follow changes of the live layers, other than of weights and buffers, when their pipeline is empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device

from lightning_hetpipe.capture.effects import refuse_seeded
from lightning_hetpipe.capture.parity_check import compare
from lightning_hetpipe.capture.pieces import Fingerprint, Piece
from lightning_hetpipe.errors import PipelineRefusal, SettingError
from lightning_hetpipe.pipeline.operands import OperandsTogether
from lightning_hetpipe.pipeline.random.generators import RandomGenerators, drawing_nothing, draws_now
from lightning_hetpipe.pipeline.user.minibatch import Minibatch, current
from lightning_hetpipe.pipeline.user.user_section import UserSection, has_own_seed
from lightning_hetpipe.placement.layout import Layout
from lightning_hetpipe.redirect import NOT_TAKEN, Interceptor, ModuleCall
from lightning_hetpipe.run.driver import Driver
from lightning_hetpipe.run.lifecycle import NOTHING, Around, Extension


def draws(piece: Piece) -> bool:
    """Return True if a layer of ``piece`` draws random numbers now."""
    return any(draws_now(layer.module) for layer in piece.layers)


class PieceForwards(Extension):
    """Replacement of the ``forward`` of each of ``pieces``, which are in the order of the user's step. Layers draw from
    ``generators``. Computations of the pipeline of ``driver`` pause while a piece is captured anew."""

    def __init__(self, pieces: Sequence[Piece], layout: Layout, generators: RandomGenerators, driver: Driver) -> None:
        self._layout, self._generators = layout, generators
        self._undo = ExitStack()
        for captured in filter(None, [piece.captured for piece in pieces]):
            self._undo.callback(setattr, captured, "exclusive", captured.exclusive)
            captured.exclusive = driver.alone
        self._pieces = {piece.module: (index, piece) for index, piece in enumerate(pieces)}
        self.interceptor = Interceptor([(piece.name, piece.module) for piece in pieces], self._answer)
        self._undo.callback(self.interceptor.remove)

    def closed(self) -> None:
        self._undo.close()

    def through_pipeline(self, minibatch: Minibatch, index: int, piece: Piece, call: ModuleCall) -> Any:
        """Run piece number ``index`` in the pipeline, or return ``NOT_TAKEN`` if it does not take the call."""
        raise NotImplementedError

    def _answer(self, call: ModuleCall) -> Any:
        index, piece = self._pieces[call.module]
        minibatch = current()
        output = NOT_TAKEN if minibatch is None else self.through_pipeline(minibatch, index, piece, call)
        if output is NOT_TAKEN and self._layout.is_spread():
            with call.own_forward(), OperandsTogether(self._layout.devices):
                return move_data_to_device(call.run(), self._layout.devices[-1])
        return output


class PieceCalls(PieceForwards):
    """Replacement of the ``forward`` of ``pieces`` in a fit. The stages of ``driver`` follow changes of the pieces.
    ``context`` is opened while layers are captured anew. ``evaluates`` returns whether an evaluation runs in its own
    pipeline, through the modules' own ``forward``."""

    def __init__(
        self,
        pieces: Sequence[Piece],
        layout: Layout,
        generators: RandomGenerators,
        *,
        driver: Driver,
        context: Callable[[], Around],
        evaluates: Callable[[], bool],
    ) -> None:
        super().__init__(pieces, layout, generators, driver)
        self._driver, self._context, self._evaluates = driver, context, evaluates
        self._first: int | None = None  # minibatch of the epoch, in which graphs are compared with their modules
        self._modes: list[bool] = []
        self._fingerprint = Fingerprint(pieces)  # with the redirects, which are no change

    def epoch_begins(self, first: int) -> None:
        self._first = first

    def section(self, minibatch: int) -> UserSection:
        """Record modes at the beginning of each section of ``training_step``, which must not change them."""

        def take_modes() -> None:
            self._modes = self._fingerprint.modes()

        return UserSection(take_modes)

    def settled(self, version: int) -> None:
        changed, pipeline = self._fingerprint.changed(), self._driver.pipeline
        if changed is None or pipeline is None:
            return
        if not self._driver.restarts and pipeline.minibatches:
            raise SettingError(
                f"'{changed}' of the pipelined layers was changed after minibatch {version}, while later minibatches"
                " were in flight; change it at the start or end of an epoch, or set in_flight=1"
            )
        with self._context(), self.interceptor.suspended():
            self._fingerprint.follow()
        self._driver.restarts = True  # a pipeline of new copies starts empty
        pipeline.copy_layers()
        self._fingerprint.take()

    def evaluating(self, minibatch: int) -> Around:
        return self.interceptor.suspended() if self._evaluates() else NOTHING

    def through_pipeline(self, minibatch: Minibatch, index: int, piece: Piece, call: ModuleCall) -> Any:
        if torch.is_inference_mode_enabled():
            return NOT_TAKEN
        self._check(index, piece.name)

        def prepare(given: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
            with call.own_forward():  # an input of a new kind is captured now
                value = piece.value(*given)
                if piece.captured is not None and piece.captured.has_filled:
                    piece.captured.has_filled = False
                    self._fingerprint.take()
                if (captured := piece.captured) is not None and (
                    self._is_due(minibatch.number) or captured.autograd(value) is None or captured.changed(value)
                ):
                    compare(piece, given, value, self._generators, minibatch.number, minibatch.calls_of(index))
                return value

        with drawing_nothing():
            return minibatch.call(index, piece.name, (call.args, call.kwargs), prepare)

    def _is_due(self, minibatch: int) -> bool:
        """Return True if graphs are compared without a known change: ever more rarely, and in each epoch's first."""
        return minibatch == self._first or minibatch & (minibatch - 1) == 0

    def _check(self, index: int, name: str) -> None:
        """Refuse changes by ``training_step`` before its call of ``name`` that copies of layers would not follow."""
        if has_own_seed() and draws(self._fingerprint.pieces[index]):
            refuse_seeded(name)
        changed = self._fingerprint.changed()
        if changed is not None and not self._fingerprint.with_own_parameters(index):
            raise PipelineRefusal(
                f"training_step calls '{name}' with other parameters than its own (as with"
                " torch.func.functional_call), of which the pipeline keeps no versions; call it with its own"
            )
        if changed is None and (other := self._fingerprint.other_mode(self._modes)) is not None:
            changed = f"{other}.training"
        if changed is not None:
            raise PipelineRefusal(
                f"training_step changes '{changed}' before it calls '{name}', which stages, that run copies, would see"
                " too late; give it to the call as an argument, or change it in a callback at the start of an epoch"
            )
