"""Report of one run: its numbers, as a meter counts them, and the table that shows them to people."""

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
    """Samples, minibatches and seconds of training. Time counts between :meth:`start` and :meth:`stop` only."""

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
        """A minibatch is done, which computed ``batch`` and was in flight for ``seconds``."""
        self.samples += batch_size(batch)
        self.minibatches += 1
        self._flown += seconds

    def interval(self, busy_seconds: Sequence[float]) -> dict[str, float]:
        """The metrics over the time since the last call, by their names on a logger.

        A minibatch counts where it ends, so that few of them make "in_flight", their mean number, a rough figure.

        Args:
            busy_seconds: For each stage, the seconds in which it has computed so far.
        """
        seconds = max(self.seconds - self._until, 1e-9)
        metrics = {"hetpipe/samples_per_second": (self.samples - self._samples_until) / seconds}
        for stage, (busy, before) in enumerate(zip(busy_seconds, self._busy_until, strict=True)):
            metrics[f"hetpipe/stage_{stage}/busy"] = min(1.0, (busy - before) / seconds)
        # Little's law: what arrives per second, times how long each stays, is how many are there.
        metrics["hetpipe/in_flight"] = self._flown / seconds
        self._until += seconds
        self._flown = 0.0
        self._samples_until, self._busy_until = self.samples, list(busy_seconds)
        return metrics


def batch_size(batch: object) -> int:
    """The first dimension of the first tensor in ``batch``; 1 where there is none."""
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.ndim:
            return leaf.shape[0]
    return 1


@dataclass(frozen=True)
class StageReport:
    """One stage.

    Attributes:
        device: Where it ran, for people.
        layers: Paths of its layers, such as "net.3".
        layer_types: Their classes' names.
        time_s: Measured seconds of its layers per minibatch, forward and backward, before training.
        busy: Fraction of the training time in which it computed, 0 to 1; None where it was not measured.
        parameters: Number of parameters.
        versions_bytes: The most bytes of weight versions at once; see :mod:`lightning_hetpipe.pipeline.memory`.
        activations_bytes: The most bytes kept from forwards for backwards at once; None where it was not counted.
        gradients_bytes: The most bytes of gradients that waited for Lightning's step at once; None as above.
        memory_bytes: The most bytes of these three together at once; None as above.
        host_bytes: The most bytes of gradients that waited on the host at once, as the device had no room for them.
        held: The most minibatches whose activations it held at once.
        device_bytes: The most bytes that torch had allocated at once on its device, for whomever; None on CPU.
        compile_s: Seconds of the passes in which torch.compile may have been at work, which run alone.
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
    """One ``fit``. ``print`` shows it as the table that ``hetpipe-train`` ends with.

    Attributes:
        in_flight: Nm.
        minibatches: Minibatches trained, but for the first, which is watched.
        samples_per_second: Over the time of those minibatches, without validation.
        stages: In order; empty where no fit has had any.
        timeline: What took place when, if it was asked for.
        emulated: Whether stages took as long as other devices would, and ``time_s`` is of those.
        virtual_worker: i, of the virtual worker that this is the report of.
        virtual_workers: N.
        taken_apart: Why modules do not run in stages as a whole, by their paths: their own code runs as user code,
            around the pipelined modules in them. Empty where all that ``training_step`` calls is pipelined.
        spread: Whether it was a spread run: with one minibatch in flight, and without a pipeline.
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
        """Headline, a row for each stage, and what the columns mean; :data:`NOTHING` without stages."""
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
        """Samples per second as text; a dash where no minibatch was counted."""
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
                _kinds(stage.layer_types),
                f"{stage.parameters:,}",
                f"{stage.time_s * 1000:,.1f}" if stage.time_s else NONE,
                f"{stage.busy:.0%}" if self.minibatches and stage.busy is not None else NONE,
                NONE if stage.memory_bytes is None else in_bytes(stage.memory_bytes),
            ]
            for index, stage in enumerate(self.stages)
        ]
        return aligned([header, *rows], left=(0, 1, 2, 3))


def _kinds(types: Sequence[str]) -> str:
    """The layers' types in the order of their first layers, those of several layers counted."""
    return ", ".join(kind if count == 1 else f"{kind} ×{count}" for kind, count in Counter(types).items())
