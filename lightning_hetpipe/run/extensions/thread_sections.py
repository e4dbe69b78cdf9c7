"""What Lightning's thread does for the pipeline, by name: for Lightning's profilers, and for the timeline.

Profilers are not made for several threads: SimpleProfiler and AdvancedProfiler keep one start for each name, and
AdvancedProfiler ends what runs already. So they hear of Lightning's thread alone, and of one section at a time. What
stages compute is shown to PyTorchProfiler, whose ranges belong to threads.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import lightning as L
from lightning.pytorch.profilers import PassThroughProfiler, Profiler, PyTorchProfiler
from torch.profiler import record_function

from lightning_hetpipe.pipeline.recorder import Recorder
from lightning_hetpipe.pipeline.stage import BeforePass
from lightning_hetpipe.run.lifecycle import NOTHING

PREFIX = "[HetPipe]"
"""Of our names, as Lightning has "[Strategy]" and "[Callback]" before its own."""

Section = AbstractContextManager[None]


class ThreadSections:
    """Opens sections of Lightning's thread.

    Args:
        trainer: Whose profiler hears of them.
        recorder: Records them; None for no timeline.
    """

    def __init__(self, trainer: L.Trainer, recorder: Recorder | None) -> None:
        profiler = _profiler(trainer)
        self._profiler = None if isinstance(profiler, PassThroughProfiler) else profiler
        self._recorder = recorder

    def wait_for_minibatch(self, minibatch: int) -> Section:
        """Its gradients are not there yet."""
        return self._section("wait_for_minibatch", minibatch, then_step=True)

    def publish(self, version: int) -> Section:
        """The live weights become ``version`` on all stages."""
        return self._section("publish", version)

    def synchronise(self, version: int) -> Section:
        """With the other virtual workers, after the step of that number."""
        return self._section("synchronise", version)

    def fetch(self, minibatch: int) -> Section:
        """The DataLoader's batch; Lightning's own name for it is what profilers hear."""
        return self._section("fetch", minibatch, told=False)

    def look_ahead(self, minibatch: int) -> Section:
        """Its batch is moved to the devices, and it is put in flight."""
        return self._section("look_ahead", minibatch)

    def drain(self, minibatch: int) -> Section:
        """Those in flight end, as an evaluation begins after the step of that number."""
        return self._section("drain", minibatch)

    def evaluation(self, minibatch: int) -> Section:
        """After the step of that number; Lightning's own names for it are what profilers hear."""
        return self._section("evaluation", minibatch, told=False)

    def _section(self, name: str, minibatch: int, told: bool = True, then_step: bool = False) -> Section:
        profiler = self._profiler if told else None
        if profiler is None and self._recorder is None:
            return NOTHING
        return _Open(name, minibatch, profiler, self._recorder, then_step)


def _profiler(trainer: L.Trainer) -> Profiler | None:
    profiler: Profiler | None = getattr(trainer, "profiler", None)  # set by a connector, without declaring it
    return profiler


class _Open:
    def __init__(
        self, name: str, minibatch: int, profiler: Profiler | None, recorder: Recorder | None, then_step: bool
    ) -> None:
        self._name = name
        self._minibatch = minibatch
        self._profiler = profiler
        self._recorder = recorder
        self._then_step = then_step

    def __enter__(self) -> None:
        if self._recorder is not None:
            self._recorder.enter(self._name, self._minibatch)
        if self._profiler is not None:
            self._profiler.start(PREFIX + self._name)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._profiler is not None:
            self._profiler.stop(PREFIX + self._name)
        if self._recorder is not None:
            self._recorder.leave(self._then_step and kind is None)


def observed(before: BeforePass | None, trainer: L.Trainer, recorder: Recorder | None) -> BeforePass | None:
    """``before``, with what records passes, and shows them to PyTorchProfiler, if that is asked for."""
    if recorder is not None:
        before = recorder.around(before)
    if isinstance(_profiler(trainer), PyTorchProfiler):
        before = _Ranges(before)
    return before


class _Ranges:
    """Names what stages compute where torch's profiler looks: "[HetPipe]stage 1 backward"."""

    def __init__(self, before: BeforePass | None) -> None:
        self._before = before

    def __call__(self, stage: int, work: str, minibatch: int) -> Callable[[], None]:
        shown: Any = record_function(f"{PREFIX}stage {stage} {work}", str(minibatch))
        shown.__enter__()
        after = None if self._before is None else self._before(stage, work, minibatch)

        def ended() -> None:
            if after is not None:
                after()
            shown.__exit__(None, None, None)

        return ended
