"""Progress bar for work that takes longer than a moment: measuring layers, searching for a plan."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING

from tqdm import tqdm

if TYPE_CHECKING:
    import lightning as L
    from lightning.pytorch.callbacks import RichProgressBar

MOMENT = 1.0
"""Seconds before a bar is drawn."""

_BETWEEN = 0.1
"""Minimum seconds between drawings, as in tqdm."""

Bar = Callable[[str, int | None], AbstractContextManager[Callable[[], object]]]
"""Context of named work with a number of steps (None if unknown). It gives a function to call after each step."""


@contextmanager
def hidden(what: str, of: int | None) -> Iterator[Callable[[], object]]:
    """Show no bar."""
    yield lambda: None


@contextmanager
def on_terminal(what: str, of: int | None) -> Iterator[Callable[[], object]]:
    """Show a bar on stderr, if that is a terminal."""
    with tqdm(
        desc=what, total=of, unit="plan" if of is None else "layer", leave=False, delay=MOMENT, disable=None
    ) as bar:
        yield bar.update


def of_trainer(trainer: L.Trainer) -> Bar:
    """Return the bar that fits the progress bar of the user's Trainer in this process."""
    from lightning.pytorch.callbacks import RichProgressBar  # hetpipe-plan has bars without Lightning

    own = trainer.progress_bar_callback
    if own is None or not trainer.is_global_zero:
        return hidden
    return partial(_below, own) if isinstance(own, RichProgressBar) else on_terminal


@contextmanager
def _below(own: RichProgressBar, what: str, of: int | None) -> Iterator[Callable[[], object]]:
    """Show a line of Rich, which holds the terminal: another bar would print a new line for each step."""
    progress = own.progress
    if progress is None:  # it was switched off
        yield lambda: None
        return
    task = progress.add_task(what, total=math.inf if of is None else of, visible=False)  # Lightning refuses None
    due = time.monotonic() + MOMENT

    def tick() -> None:
        nonlocal due
        now = time.monotonic()
        progress.update(task, advance=1)
        if now >= due:
            due = now + _BETWEEN
            progress.update(task, visible=True)
            progress.refresh()  # Lightning's bar draws itself only after batches

    try:
        yield tick
    finally:
        progress.update(task, visible=False)  # not removed, as Lightning 2.6.0 finds its own tasks by their places
        progress.refresh()
