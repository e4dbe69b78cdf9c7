"""Stages of this process that take longer, as long as other devices would."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe.emulation import Emulation, Pad


@contextmanager
def padded(strategy: HetPipeStrategy, pads: Sequence[Pad]) -> Iterator[Emulation]:
    """Context manager in which stages of this process's virtual worker take as long as ``pads``, one for each.

    The first minibatch of a fit, which is watched, runs without stages and so without pads.

    Raises:
        SettingError: in ``fit`` if a stage has no pad, and at the end if a pad has no stage.
    """
    before = strategy._before_pass
    emulation = strategy._before_pass = Emulation(pads)
    try:
        yield emulation
    finally:
        strategy._before_pass = before
    emulation.check()
