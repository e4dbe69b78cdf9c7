"""Summary that hetpipe-train prints at the end: stages, throughput, results, and where to look closer."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Protocol, SupportsFloat

from lightning_hetpipe.planning.model.units import in_bytes
from lightning_hetpipe.planning.plan.table import aligned, span

_NONE = "–"  # where nothing was measured: one stage need not be balanced, and a run of one minibatch only watches it
_MEASURED = "ms per minibatch: forward and backward of the stage's layers alone, measured before training"
_EMULATED = (
    "ms per minibatch: what the stage takes on its emulated device, with what it receives; it computes for less and"
    " sleeps for the rest"
)
_COUNTED = (
    "memory: the most at once of weight versions, activations and waiting gradients; live weights and the optimizer's"
    " state come on top"
)


class StageResult(Protocol):
    """One stage, as the summary reads it from `reporting.StageReport`."""

    @property
    def device(self) -> str: ...
    @property
    def layers(self) -> Sequence[str]: ...
    @property
    def layer_types(self) -> Sequence[str]: ...
    @property
    def parameters(self) -> int: ...
    @property
    def time_s(self) -> float: ...
    @property
    def busy(self) -> float: ...
    @property
    def memory_bytes(self) -> int | None: ...


class RunResult(Protocol):
    """A run, as the summary reads it from `reporting.RunReport`."""

    @property
    def in_flight(self) -> int: ...
    @property
    def minibatches(self) -> int: ...
    @property
    def samples_per_second(self) -> float: ...
    @property
    def stages(self) -> Sequence[StageResult]: ...
    @property
    def emulated(self) -> bool: ...


def summary(
    run: RunResult | None,
    metrics: Mapping[str, SupportsFloat],
    *,
    virtual_workers: int = 1,
    torch_threads: int | None = None,
    checkpoint: str = "",
    log_dir: str | None = None,
) -> str:
    """The text, several lines.

    Args:
        run: the strategy's report; None for a strategy that makes none, which leaves the table of stages out.
        metrics: Lightning's, by name; those of the last part of the run (test, else val, else train) are shown.
        virtual_workers: that trained together; the report is of one of them.
        torch_threads: of each torch operation in a run without the pipeline, to be told beside its stages'; None leaves
            it out.
        checkpoint: path of the best checkpoint; empty if there is none.
        log_dir: folder of TensorBoard's event files; None if nothing was logged.
    """
    lines = [""]
    rows: list[tuple[str, str]] = []
    if run is not None:
        lines += [
            _headline(run, virtual_workers),
            "",
            *_stage_table(run),
            "",
            _EMULATED if run.emulated else _MEASURED,
            _COUNTED,
            "",
        ]
        each = "" if virtual_workers == 1 else "   of this virtual worker; each trains on a share of the data"
        rows.append(("samples per second", f"{run.samples_per_second:,.0f}{each}" if run.minibatches else _NONE))
    rows += _results(metrics)
    if torch_threads is not None:
        rows.append(("torch threads", f"{torch_threads}; stages of a pipeline use OMP_NUM_THREADS each, by default 1"))
    if checkpoint:
        rows.append(("checkpoint", _relative(checkpoint)))
    if log_dir:
        rows.append(("to see the curves", f"{_tensorboard()} --logdir {shlex.quote(_relative(log_dir))}"))
    width = max((len(label) for label, _ in rows), default=0)
    return "\n".join(lines + [f"{label:<{width}}   {value}" for label, value in rows])


def _headline(run: RunResult, virtual_workers: int) -> str:
    stages = f"{len(run.stages)} stage{'' if len(run.stages) == 1 else 's'}"
    minibatches = f"{run.in_flight} minibatch{'' if run.in_flight == 1 else 'es'}"
    which = "" if virtual_workers == 1 else f", as the first of {virtual_workers} virtual workers"
    return f"Trained as a pipeline of {stages}, {minibatches} in flight{which}"


def _stage_table(run: RunResult) -> list[str]:
    header = ["stage", "device", "layers", "", "parameters", "ms per minibatch", "busy", "memory"]
    rows = [
        [
            str(index),
            stage.device,
            span(stage.layers),
            _kinds(stage.layer_types),
            f"{stage.parameters:,}",
            f"{stage.time_s * 1000:,.1f}" if stage.time_s else _NONE,
            f"{stage.busy:.0%}" if run.minibatches else _NONE,
            _NONE if stage.memory_bytes is None else in_bytes(stage.memory_bytes),
        ]
        for index, stage in enumerate(run.stages)
    ]
    return aligned([header, *rows], left=(0, 1, 2, 3))


def _kinds(types: Sequence[str]) -> str:
    """The layers' types in order, those that repeat counted."""
    runs = ((kind, len(list(group))) for kind, group in groupby(types))
    return ", ".join(kind if count == 1 else f"{kind} ×{count}" for kind, count in runs)


def _results(metrics: Mapping[str, SupportsFloat]) -> list[tuple[str, str]]:
    """The metrics of the latest part of the run that logged any, in words."""
    for part in ("test", "val", "train"):
        found = [(name, float(value)) for name, value in metrics.items() if name.startswith(part)]
        if found:
            return [(_words(name), f"{value:.2%}" if _is_accuracy(name) else f"{value:.4g}") for name, value in found]
    return []


def _is_accuracy(name: str) -> bool:
    return "acc" in name.replace("/", "_").lower().split("_") or "accuracy" in name.lower()


def _words(name: str) -> str:
    words = name.replace("/", " ").replace("_", " ").split()
    return " ".join("accuracy" if word == "acc" else word for word in words)


def _relative(path: str) -> str:
    """Shorten a path to one relative to the working directory, where that is shorter."""
    try:
        return min(os.path.relpath(path), path, key=len)
    except ValueError:  # another drive
        return path


def _tensorboard() -> str:
    """The command: by name where the shell finds it, else by path, as in a virtual environment not activated."""
    beside = Path(sys.executable).with_name("tensorboard")
    return shlex.quote(_relative(str(beside))) if not shutil.which("tensorboard") and beside.exists() else "tensorboard"
