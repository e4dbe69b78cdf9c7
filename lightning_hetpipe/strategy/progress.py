"""A progress bar for what takes longer than a moment: measuring layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import lightning as L
from tqdm import tqdm

MOMENT = 1.0
"""Seconds, before which no bar is drawn."""


def has_bars(trainer: L.Trainer) -> bool:
    """Whether the user wants progress bars of this process."""
    return trainer.is_global_zero and trainer.progress_bar_callback is not None


@contextmanager
def ticking(what: str, of: int, shown: bool) -> Iterator[Callable[[], object]]:
    """Within it there is a bar on stderr, if that is a terminal; it leaves nothing behind.

    Args:
        what: Is done meanwhile.
        of: How many steps it has.
        shown: Whether the user wants bars.

    Yields:
        What is to be called after each step.
    """
    disable = None if shown else True  # None: unless this is a terminal
    with tqdm(desc=what, total=of, unit="layer", leave=False, delay=MOMENT, disable=disable) as bar:
        yield bar.update
