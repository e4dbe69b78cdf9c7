"""End of a run that was told to end, by SIGTERM or by SLURM: no failure, and one exit code for all of its processes."""

from __future__ import annotations

import signal

from lightning.pytorch.utilities.exceptions import SIGTERMException

TERMINATED = 128 + signal.SIGTERM
"""The exit code of a program that SIGTERM has ended, as shells report it."""

REASON = "told to end"
"""Reason that the others are told where a virtual worker leaves them."""


class ToldToEnd(SIGTERMException):
    """Raised once a run that was told to end is saved, or may be left.

    Args:
        alone: This virtual worker leaves, and the others go on without it; else all end, at a cut.
    """

    def __init__(self, alone: bool = False) -> None:
        super().__init__(TERMINATED)
        self.alone = alone
