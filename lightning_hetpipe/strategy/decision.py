"""What a fit is to run, decided once its first minibatch has shown the layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from lightning_hetpipe.capture.profiling import Study


@dataclass(frozen=True)
class Decision:
    """Which layers run where, and how many minibatches are in flight.

    Attributes:
        cuts: The first layer of each stage.
        devices: Of each stage.
        in_flight: Nm.
        times: Seconds of each stage for one minibatch, forward and backward; 0 where nothing was measured.
        said: What the user is told of it, a line each.
        names: Of each stage's device, where others were declared than torch's.
        emulated: Whether stages take as long as the devices ``names``, which are not here.
    """

    cuts: tuple[int, ...]
    devices: Sequence[torch.device]
    in_flight: int
    times: list[float]
    said: Sequence[str] = ()
    names: Sequence[str] | None = None
    emulated: bool = False


Decide = Callable[[Study], Decision]
"""Decides for a model."""


def told_in_flight(in_flight: int) -> str:
    """Nm and its staleness, for people."""
    if in_flight == 1:
        return "1 minibatch in flight"
    stale = in_flight - 1
    return f"{in_flight} minibatches in flight, so gradients up to {stale} minibatch{'es' * (stale > 1)} stale"
