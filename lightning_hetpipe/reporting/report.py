"""Report of one run: numbers that a meter counts, and the table that shows them to people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter  # our own name, as suites script what `time.perf_counter` gives to Lightning

from torch import Tensor

from lightning_hetpipe.planning.model.units import in_bytes
from lightning_hetpipe.planning.plan.table import aligned, span
from lightning_hetpipe.reporting.timeline import Timeline
from lightning_hetpipe.torch_private.tensors import pytree

NOTHING = (
    "There is nothing to report: the strategy has run no fit yet, or its last fit ended in the first minibatch, before"
    " there were stages."
)
NONE = "–"  # where nothing was measured: one stage need not be balanced, and a run of one minibatch only watches it
_MEASURED = "ms per minibatch: forward and backward of the stage's layers alone, measured before training"
_WHOLE = "ms per minibatch: forward, loss and backward, in training"
_EMULATED = (
    "ms per minibatch: what the stage takes on its emulated device, with what it receives; it computes for less and"
    " sleeps for the rest"
)
_COUNTED = (
    "memory: the most at once of weight versions, activations and waiting gradients; live weights and the optimizer's"
    " state come on top"
)


class Meter:
    """Samples, minibatches and seconds of training. Time counts only between :meth:`start` and :meth:`stop`."""

    def __init__(self, stages: int) -> None:
        self.samples = 0
        self.minibatches = 0
        self._started: float | None = None
        self._before = 0.0  # seconds that counted before the last start
        self._until = 0.0  # seconds, samples and busy times at the last interval's end
        self._samples_until = 0
        self._busy_until = [0.0] * stages
        self._flown = 0.0  # seconds that the minibatches of this interval were in flight

    @property
    def seconds(self) -> float:
        running = 0.0 if self._started is None else perf_counter() - self._started
        return self._before + running

    def start(self) -> None:
        self._started = perf_counter()

    def stop(self) -> None:
        self._before, self._started = self.seconds, None

    def count(self, batch: object, seconds: float = 0.0) -> None:
        """Count a finished minibatch with the batch ``batch``, which was in flight for ``seconds``."""
        self.samples += batch_size(batch)
        self.minibatches += 1
        self._flown += seconds

    def interval(self, busy_seconds: Sequence[float]) -> dict[str, float]:
        """Return the metrics since the last call, by names on a logger. ``busy_seconds`` are each stage's total so far.

        Minibatches count at their end, so the mean number "in_flight" is rough if they are few.
        """
        seconds = max(self.seconds - self._until, 1e-9)
        metrics = {"hetpipe/samples_per_second": (self.samples - self._samples_until) / seconds}
        for stage, (busy, before) in enumerate(zip(busy_seconds, self._busy_until, strict=True)):
            metrics[f"hetpipe/stage_{stage}/busy"] = min(1.0, (busy - before) / seconds)
        # Little's law: arrivals per second, times the duration of each stay, is the number that is there.
        metrics["hetpipe/in_flight"] = self._flown / seconds
        self._until += seconds
        self._flown = 0.0
        self._samples_until, self._busy_until = self.samples, list(busy_seconds)
        return metrics


def batch_size(batch: object) -> int:
    """Return the first dimension of the first tensor in ``batch``, or 1 without a tensor."""
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.ndim:
            return leaf.shape[0]
    return 1


@dataclass(frozen=True)
class StageReport:
    """One stage.

    Attributes:
        device: Name of its device for people.
        layers: Paths of its layers, such as "net.3".
        time_s: Measured seconds of its layers per minibatch, forward and backward, before training.
        busy: Fraction of the training time in which it computed, 0 to 1. None if not measured.
        versions_bytes: Peak bytes of weight versions, see :mod:`lightning_hetpipe.pipeline.memory`.
        activations_bytes: Peak bytes that forwards kept for backwards. None if not counted.
        gradients_bytes: Peak bytes of gradients that waited for Lightning's step. None if not counted.
        memory_bytes: Peak bytes of versions, activations and gradients together. None if not counted.
        host_bytes: Peak bytes of gradients that waited on the host because the device had no room.
        held: Largest number of minibatches whose activations it held at once.
        device_bytes: Peak bytes that torch had allocated on its device, for anything. None on CPU.
        compile_s: Seconds of passes in which torch.compile may have worked. Such passes run alone.
    """

    device: str
    layers: list[str]
    layer_types: list[str]
    time_s: float
    busy: float | None
    parameters: int
    versions_bytes: int = 0
    activations_bytes: int | None = None
    gradients_bytes: int | None = None
    memory_bytes: int | None = None
    host_bytes: int = 0
    held: int = 1
    device_bytes: int | None = None
    compile_s: float = 0.0


@dataclass(frozen=True, repr=False)
class RunReport:
    """One ``fit``. ``print`` shows it as the table with which ``hetpipe-train`` ends.

    Attributes:
        minibatches: Number of trained minibatches without the first, which is watched.
        samples_per_second: Rate over the time of these minibatches, without validation.
        stages: Stages in order. Empty if no fit has had stages.
        timeline: Timeline, if it was requested.
        emulated: Whether stages emulated other devices. ``time_s`` is then the time of these devices.
        virtual_worker, virtual_workers: i and N.
        taken_apart: For each module that does not run in stages as a whole, by its path, the reason. Its own code runs
            as user code around the pipelined modules in it.
        spread: Whether it was a spread run: one minibatch in flight, without a pipeline.
    """

    in_flight: int = 1
    minibatches: int = 0
    samples_per_second: float = 0.0
    stages: list[StageReport] = field(default_factory=list)
    timeline: Timeline | None = None
    emulated: bool = False
    virtual_worker: int = 0
    virtual_workers: int = 1
    taken_apart: Mapping[str, str] = field(default_factory=dict)
    spread: bool = False

    def __str__(self) -> str:
        if not self.stages:
            return NOTHING
        return f"{self.table}\n\nsamples per second   {self.throughput}"

    __repr__ = __str__

    @property
    def table(self) -> str:
        """Headline, a row for each stage, and the meaning of the columns, or :data:`NOTHING` without stages."""
        if not self.stages:
            return NOTHING
        apart = [f"user code: of '{name}', the part around its pipelined modules" for name in self.taken_apart]
        moved = [
            f"host: up to {in_bytes(stage.host_bytes)} of stage {number}'s gradients waited there, as its device had no"
            " room for them"
            for number, stage in enumerate(self.stages)
            if stage.host_bytes
        ]
        timed = _WHOLE if self.spread else _EMULATED if self.emulated else _MEASURED
        columns = {
            timed: any(stage.time_s for stage in self.stages),
            _COUNTED: any(stage.memory_bytes is not None for stage in self.stages),
        }
        notes = [*(note for note, is_filled in columns.items() if is_filled), *moved, *apart]
        return "\n".join([self._headline(), "", *self._rows(), *([""] if notes else []), *notes])

    @property
    def throughput(self) -> str:
        """Samples per second as text, or a dash if no minibatch was counted."""
        each = "" if self.virtual_workers == 1 else "   of this virtual worker; each trains on a share of the data"
        return f"{self.samples_per_second:,.0f}{each}" if self.minibatches else NONE

    def _headline(self) -> str:
        stages = f"{len(self.stages)} stage{'' if len(self.stages) == 1 else 's'}"
        minibatches = f"{self.in_flight} minibatch{'' if self.in_flight == 1 else 'es'}"
        which = f", as virtual worker {self.virtual_worker} of {self.virtual_workers}"
        which = "" if self.virtual_workers == 1 else which
        kind = "spread run" if self.spread else "pipeline"
        return f"Trained as a {kind} of {stages}, {minibatches} in flight{which}"

    def _rows(self) -> list[str]:
        header = ["stage", "device", "layers", "", "parameters", "ms per minibatch", "busy", "memory"]
        rows = [
            [
                str(index),
                stage.device,
                span(stage.layers),
                ", ".join(kind if n == 1 else f"{kind} ×{n}" for kind, n in Counter(stage.layer_types).items()),
                f"{stage.parameters:,}",
                f"{stage.time_s * 1000:,.1f}" if stage.time_s else NONE,
                f"{stage.busy:.0%}" if self.minibatches and stage.busy is not None else NONE,
                NONE if stage.memory_bytes is None else in_bytes(stage.memory_bytes),
            ]
            for index, stage in enumerate(self.stages)
        ]
        return aligned([header, *rows], left=(0, 1, 2, 3))
