"""Interface between the strategy and the Trainer's current run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lightning_hetpipe.pipeline.engine import Engine


class TrainerRun:
    """One run of the Trainer: a fit or an evaluation. An instance of this class itself stands for no run.

    Attributes:
        pipeline: Runs minibatches in flight, once there are stages.
        devices: The stages' devices, once there are stages.
    """

    def __init__(self) -> None:
        self.pipeline: Engine | None = None
        self.devices: Sequence[torch.device] = ()

    def open(self) -> None:
        """Begin the run."""

    def close(self) -> None:
        """End the run, and leave no thread and no change in the module behind."""

    def finish_report(self) -> None:
        """Report the numbers so far. Training is over, and loggers are open."""

    def lacking(self) -> str:
        """Describe what devices needed memory for when one ran out of it, and what helps."""
        return (
            "the model was on its way to its devices, which share it by the bytes of its weights; give more devices, or"
            " ones with more memory"
        )

    def trained_in_flight(self, before: int) -> int:
        """Return the Nm with which the weights are trained now, or ``before``, the last fit's Nm, outside of a fit."""
        return before

    def last_changes(self) -> Sequence[Tensor | None]:
        """Return each parameter's change by the optimizer's last step, if weights are predicted by it."""
        return ()

    def restore_changes(self, changes: Sequence[Tensor | None]) -> None:
        """Restore the ``changes`` of a checkpoint, from :meth:`last_changes`, after optimizer states were restored."""

    def training_step(self, native: Callable[..., Any], *args: Any) -> Any:
        """Run Lightning's step ``native``, or wait for its minibatch if there is a pipeline."""
        return native(*args)

    def optimizer_step(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        """Open a context around ``optimizer``'s step."""
        return nullcontext()

    def offer(self) -> None:
        """Run user code for which stages wait, between Lightning's hooks."""

    def evaluation_step(self, hook: str, native: Callable[..., Any], *args: Any) -> Any:
        """Run the strategy's own step ``hook``, ``native``, or take its output from the pipeline."""
        return native(*args)


def default_dtype_in(context: Callable[[], AbstractContextManager[Any]]) -> torch.dtype | None:
    """Return the default dtype within a precision plugin's ``context``, or None if it is the process's default."""
    with context():
        inside = torch.get_default_dtype()
    return None if inside is torch.get_default_dtype() else inside
