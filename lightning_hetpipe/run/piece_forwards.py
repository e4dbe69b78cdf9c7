"""Calls of the pipelined modules: through a pipeline where one takes them, and on the live layers anywhere else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_hetpipe.capture.interceptor import NOT_TAKEN, Interceptor, ModuleCall
from lightning_hetpipe.capture.pieces import Piece
from lightning_hetpipe.placement.layout import Layout


class PieceForwards:
    """Stands in for the ``forward`` of each of ``pieces``, until its ``interceptor`` is removed.

    Args:
        pieces: In the order of the user's step.
        layout: Where their layers are.
    """

    def __init__(self, pieces: Sequence[Piece], layout: Layout) -> None:
        self._layout = layout
        self._pieces = {piece.module: (index, piece) for index, piece in enumerate(pieces)}
        self.interceptor = Interceptor([(piece.name, piece.module) for piece in pieces], self._answer)

    def through_pipeline(self, index: int, piece: Piece, call: ModuleCall) -> Any:
        """Runs piece number ``index`` in the pipeline; ``NOT_TAKEN`` where that does not take the call."""
        raise NotImplementedError

    def _answer(self, call: ModuleCall) -> Any:
        index, piece = self._pieces[call.module]
        output = self.through_pipeline(index, piece, call)
        if output is NOT_TAKEN and self._layout.is_spread():
            with call.aside():
                return self._layout.run_piece(piece, call.args, call.kwargs)
        return output
