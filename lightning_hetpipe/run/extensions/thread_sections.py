"""Sections of Lightning's thread by name: what it does for the pipeline, for Lightning's profilers and the timeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lightning as L
from lightning.pytorch.profilers import PassThroughProfiler, Profiler, PyTorchProfiler
from torch.profiler import record_function

from lightning_hetpipe.pipeline.stage import BeforePass
from lightning_hetpipe.run.lifecycle import NOTHING, Around, Extension

PREFIX = "[HetPipe]"
"""Prefix of our names, as Lightning has "[Strategy]" and "[Callback]" before its own."""

FETCH, EVALUATION, WAIT = "fetch", "evaluation", "wait_for_minibatch"


class ThreadSections(Extension):
    """Names what is done around each event in Lightning's thread."""

    def open(self, name: str, minibatch: int) -> Around:
        """Open around section ``name``, done for ``minibatch`` or after the step of that number."""
        raise NotImplementedError

    def fetching(self, minibatch: int) -> Around:
        return self.open(FETCH, minibatch)

    def transferring(self, minibatch: int) -> Around:
        return self.open("look_ahead", minibatch)

    def waiting(self, minibatch: int) -> Around:
        return self.open(WAIT, minibatch)

    def synchronising(self, version: int) -> Around:
        return self.open("synchronise", version)

    def publishing(self, version: int) -> Around:
        return self.open("publish", version)

    def draining(self, minibatch: int) -> Around:
        return self.open("drain", minibatch)

    def evaluating(self, minibatch: int) -> Around:
        return self.open(EVALUATION, minibatch)


@dataclass(eq=False)
class ProfiledSections(ThreadSections):
    """Tells ``profiler`` of sections.

    Profilers are not made for several threads: SimpleProfiler and AdvancedProfiler keep one start for each name, and
    AdvancedProfiler ends what runs already. So they hear of Lightning's thread alone, and of one section at a time.
    What stages compute is shown to PyTorchProfiler, whose ranges belong to threads.
    """

    profiler: Profiler

    def open(self, name: str, minibatch: int) -> Around:
        """Open around it; of what has a name of Lightning's own, profilers hear already."""
        return NOTHING if name in (FETCH, EVALUATION) else self._told(PREFIX + name)

    @contextmanager
    def _told(self, name: str) -> Iterator[None]:
        self.profiler.start(name)
        try:
            yield
        finally:
            self.profiler.stop(name)


def profiled_sections(trainer: L.Trainer) -> list[Extension]:
    """Extension that tells ``trainer``'s profiler of sections; none where it has no profiler."""
    profiler = _profiler(trainer)
    return [] if profiler is None or isinstance(profiler, PassThroughProfiler) else [ProfiledSections(profiler)]


def _profiler(trainer: L.Trainer) -> Profiler | None:
    profiler: Profiler | None = getattr(trainer, "profiler", None)  # set by a connector, without declaring it
    return profiler


def shown_to_profiler(before: BeforePass | None, trainer: L.Trainer) -> BeforePass | None:
    """``before``, with what names passes where PyTorchProfiler looks, if that is asked for."""
    if not isinstance(_profiler(trainer), PyTorchProfiler):
        return before

    def passes(stage: int, work: str, minibatch: int) -> Callable[[], None]:
        shown: Any = record_function(f"{PREFIX}stage {stage} {work}", str(minibatch))
        shown.__enter__()
        after = None if before is None else before(stage, work, minibatch)

        def passed() -> None:
            if after is not None:
                after()
            shown.__exit__(None, None, None)

        return passed

    return passes
