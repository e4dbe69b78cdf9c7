"""Changes of the live layers other than of weights and buffers, which stages follow where their pipeline is empty."""

from __future__ import annotations

from collections.abc import Callable

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.pipeline.engine import Engine
from lightning_hetpipe.pipeline.user.minibatch import Minibatch
from lightning_hetpipe.pipeline.user.user_section import SectionBetween, UserSection
from lightning_hetpipe.run.driver import Driver
from lightning_hetpipe.run.lifecycle import NOTHING, Around, Extension
from lightning_hetpipe.run.piece_calls import PieceCalls


class Structure(Extension):
    """Has the stages of ``engine`` follow the live layers that ``calls`` stands in for.

    Args:
        driver: Drives ``engine``.
        engine: The pipeline.
        calls: Of the pipelined modules.
        context: Opened while layers are captured anew.
        evaluates: Tells whether an evaluation runs in a pipeline of its own, through the modules' own ``forward``.
    """

    def __init__(
        self,
        driver: Driver[Minibatch],
        engine: Engine,
        calls: PieceCalls,
        context: Callable[[], Around],
        evaluates: Callable[[], bool],
    ) -> None:
        self._driver = driver
        self._engine = engine
        self._calls = calls
        self._context = context
        self._evaluates = evaluates

    def epoch_begins(self, first: int) -> None:
        self._calls.epoch_begins(first)

    def section(self, minibatch: int) -> UserSection:
        """Note the modes of the pipelined modules at the beginning of each section, which must not change them."""
        return SectionBetween(self._calls.take_modes, lambda: None)

    def settled(self, version: int) -> None:
        changed = self._calls.fingerprint.changed()
        if changed is None:
            return
        if not self._driver.restarts and self._driver.in_flight():
            raise SettingError(
                f"'{changed}' of the pipelined layers was changed after minibatch {version}, while later minibatches"
                " were in flight; change it at the start or end of an epoch, or set in_flight=1"
            )
        with self._context():
            self._calls.follow()
        self._driver.restarts = True  # a pipeline of new copies starts empty
        self._engine.copy_layers()
        self._calls.fingerprint.take()

    def evaluating(self, minibatch: int) -> Around:
        return self._calls.interceptor.suspended() if self._evaluates() else NOTHING

    def closed(self) -> None:
        self._calls.interceptor.remove()
