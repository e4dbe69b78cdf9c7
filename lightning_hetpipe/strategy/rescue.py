"""Rescue of a run that has lost virtual worker 0: the lowest one that is left saves what it has, before all end."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import lightning as L

from lightning_hetpipe.launch.supervision import note_lost
from lightning_hetpipe.run.preemption import how_to_resume, unplanned_path
from lightning_hetpipe.server.process.notices import say
from lightning_hetpipe.workers.synchroniser import NoSynchroniser, Synchroniser

if TYPE_CHECKING:
    from lightning_hetpipe.workers.group import Group


def rescue(
    trainer: L.Trainer,
    group: Group,
    synchroniser: Synchroniser | NoSynchroniser,
    exception: BaseException,
    save: Callable[[str], None],
) -> None:
    """Save the run in a checkpoint, if ``exception`` ends it as virtual worker 0 is lost, and this one is to save.

    The checkpoint has the weights that this one took last, which all have had, and its own buffers, optimizer state,
    schedulers and loops.

    Args:
        trainer: Whose fit has ended.
        group: The virtual workers.
        synchroniser: The fit's.
        exception: What has ended it.
        save: Writes the checkpoint, though this is not virtual worker 0.
    """
    if not isinstance(synchroniser, Synchroniser) or not group.ends_without_first(exception):
        return
    note_lost()
    if trainer.checkpoint_callback is None or not synchroniser.go_back():
        return
    path = unplanned_path(trainer, "rescued")
    try:
        save(path)
    except Exception as error:
        say(f"virtual worker 0 is lost, and virtual worker {group.index} cannot save {path} in its place: {error}")
    else:
        say(f"virtual worker 0 is lost, and virtual worker {group.index} has saved {path}; {how_to_resume(path)}")
