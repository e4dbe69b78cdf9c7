"""Whether an exception that nobody has caught ends this program."""

from __future__ import annotations

import sys


class Uncaught:
    """What Python has printed as uncaught since this was made; it does so before anything that runs at exit.

    A notebook or a prompt goes on after such an exception: there it ends nothing. What was there before is an earlier
    one's, which some test runners keep, too.
    """

    def __init__(self) -> None:
        self._before = getattr(sys, "last_value", None)

    @property
    def error(self) -> BaseException | None:
        last: BaseException | None = getattr(sys, "last_value", None)
        return None if last is self._before or hasattr(sys, "ps1") else last
