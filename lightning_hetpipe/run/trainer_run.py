"""Interface between the strategy and the run of the Trainer that it is in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lightning_hetpipe.pipeline.engine import Engine


class TrainerRun:
    """One run of the Trainer: a fit or an evaluation. This class itself stands in between runs: all is Lightning's own.

    Attributes:
        pipeline: What computes minibatches in flight, once there are stages.
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
        """Report the numbers so far; training is over, and loggers are open."""

    def lacking(self) -> str:
        """Say what the devices were needed for, where one has run out of memory, and what helps."""
        return (
            "the model was on its way to its devices, which share it by the bytes of its weights; give more devices, or"
            " ones with more memory"
        )

    def trained_in_flight(self, before: int) -> int:
        """Nm that the weights of now are trained with; ``before``, that of the last fit, outside of a fit."""
        return before

    def last_changes(self) -> Sequence[Tensor | None]:
        """Changes by the last step, of each parameter of the optimizer, where weights are predicted by it."""
        return ()

    def restore_changes(self, changes: Sequence[Tensor | None]) -> None:
        """Take the ``changes`` of a checkpoint, as :meth:`last_changes` gave them: optimizer states were restored."""

    def training_step(self, native: Callable[..., Any], *args: Any) -> Any:
        """Run ``native``, Lightning's step, or wait for its minibatch if there is a pipeline."""
        return native(*args)

    def optimizer_step(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        """Open around ``optimizer``'s step."""
        return nullcontext()

    def offer(self) -> None:
        """Let user code that stages wait for go first, between Lightning's hooks."""

    def evaluation_step(self, hook: str, native: Callable[..., Any], *args: Any) -> Any:
        """Run ``native``, the strategy's own step ``hook``, or take its output from the pipeline."""
        return native(*args)


def default_dtype_in(context: Callable[[], AbstractContextManager[Any]]) -> torch.dtype | None:
    """The default dtype within ``context``, which a precision plugin gives; None where that is the process's."""
    with context():
        inside = torch.get_default_dtype()
    return None if inside is torch.get_default_dtype() else inside
