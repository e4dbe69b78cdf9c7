"""What one run did: the report that summaries are made from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StageReport:
    """One stage.

    Attributes:
        device: Where it ran, for people.
        layers: Paths of its layers, such as "net.3".
        layer_types: Their classes' names.
        time_s: Measured seconds of its layers per minibatch, forward and backward, before training.
        busy: Fraction of the training time in which it computed, 0 to 1.
        parameters: Number of parameters.
    """

    device: str
    layers: list[str]
    layer_types: list[str]
    time_s: float
    busy: float
    parameters: int


@dataclass(frozen=True)
class RunReport:
    """One ``fit``.

    Attributes:
        in_flight: Nm.
        minibatches: Minibatches trained through the pipeline: all but the first, which is watched.
        samples_per_second: Over the time of those minibatches, without validation.
        stages: In order.
    """

    in_flight: int
    minibatches: int
    samples_per_second: float
    stages: list[StageReport]
