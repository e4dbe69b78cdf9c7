"""Calls of the pipelined modules: through a pipeline where one takes them, and on the live layers anywhere else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from lightning_hetpipe.capture.pieces import Piece
from lightning_hetpipe.placement.layout import Layout
from lightning_hetpipe.redirect import Redirect

NOT_TAKEN = object()
"""In place of an output: the pipeline does not take this call."""


class PieceForwards:
    """Stands in for the ``forward`` of each of ``pieces``, until :meth:`close`.

    Args:
        pieces: In the order of the user's step.
        layout: Where their layers are.
    """

    def __init__(self, pieces: Sequence[Piece], layout: Layout) -> None:
        self._layout = layout
        self._redirects = [
            Redirect(piece.module, "forward", partial(self._forward, index, piece))
            for index, piece in enumerate(pieces)
        ]

    def close(self) -> None:
        for redirect in self._redirects:
            redirect.remove()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Within it, the modules have their own ``forward``."""
        with ExitStack() as stack:
            for redirect in self._redirects:
                stack.enter_context(redirect.aside())
            yield

    def through_pipeline(
        self, index: int, piece: Piece, redirect: Redirect, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs piece number ``index`` in the pipeline; ``NOT_TAKEN`` where that does not take the call."""
        raise NotImplementedError

    def _forward(self, index: int, piece: Piece, redirect: Redirect, *args: Any, **kwargs: Any) -> Any:
        output = self.through_pipeline(index, piece, redirect, args, kwargs)
        if output is not NOT_TAKEN:
            return output
        if not self._layout.is_spread():
            return redirect.original(*args, **kwargs)
        with redirect.aside():
            return self._layout.run_piece(piece, args, kwargs)
