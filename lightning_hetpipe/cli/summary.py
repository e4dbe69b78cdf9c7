"""Summary that hetpipe-train prints at the end: stages, throughput, results, and where to look closer."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import SupportsFloat

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

from lightning_hetpipe.reporting.report import RunReport


def summary(
    run: RunReport | None,
    metrics: Mapping[str, SupportsFloat],
    *,
    torch_threads: int | None = None,
    checkpoint: str = "",
    loggers: Sequence[Logger] = (),
) -> str:
    """The text, several lines.

    Args:
        run: the strategy's report; None for a strategy that makes none, which leaves the table of stages out.
        metrics: Lightning's, by name; those of the last part of the run (test, else val, else train) are shown.
        torch_threads: of each torch operation in a run without the pipeline, to be told beside its stages'; None leaves
            it out.
        checkpoint: path of the best checkpoint; empty if there is none.
        loggers: the Trainer's; it is said where files of TensorBoard and of metrics as CSV are.
    """
    lines = [""]
    rows: list[tuple[str, str]] = []
    if run is not None:
        lines += [run.table, ""]
        rows.append(("samples per second", run.throughput))
    rows += results(metrics)
    if torch_threads is not None:
        rows.append(("torch threads", f"{torch_threads}; stages of a pipeline use OMP_NUM_THREADS each, by default 1"))
    if checkpoint:
        rows.append(("checkpoint", _relative(checkpoint)))
    for logger in loggers:
        if isinstance(logger, CSVLogger):
            rows.append(("metrics", _relative(logger.experiment.metrics_file_path)))
        elif isinstance(logger, TensorBoardLogger):
            rows.append(("to see the curves", f"{_tensorboard()} --logdir {shlex.quote(_relative(logger.log_dir))}"))
    width = max((len(label) for label, _ in rows), default=0)
    return "\n".join(lines + [f"{label:<{width}}   {value}" for label, value in rows])


def results(metrics: Mapping[str, SupportsFloat]) -> list[tuple[str, str]]:
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
