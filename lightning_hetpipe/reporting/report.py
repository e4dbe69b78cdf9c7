"""Report of one run, from which summaries are made."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_hetpipe.reporting.timeline import Timeline


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
        versions_bytes: The most bytes of weight versions at once; see :mod:`lightning_hetpipe.pipeline.memory`.
        activations_bytes: The most bytes kept from forwards for backwards at once; None where it was not counted.
        gradients_bytes: The most bytes of gradients that waited for Lightning's step at once; None as above.
        memory_bytes: The most bytes of these three together at once; None as above.
        held: The most minibatches whose activations it held at once.
        device_bytes: The most bytes that torch had allocated at once on its device, for whomever; None on CPU.
        compile_s: Seconds of the passes in which torch.compile may have been at work, which run alone.
    """

    device: str
    layers: list[str]
    layer_types: list[str]
    time_s: float
    busy: float
    parameters: int
    versions_bytes: int = 0
    activations_bytes: int | None = None
    gradients_bytes: int | None = None
    memory_bytes: int | None = None
    held: int = 1
    device_bytes: int | None = None
    compile_s: float = 0.0


@dataclass(frozen=True)
class RunReport:
    """One ``fit``.

    Attributes:
        in_flight: Nm.
        minibatches: Minibatches trained through the pipeline: all but the first, which is watched.
        samples_per_second: Over the time of those minibatches, without validation.
        stages: In order.
        timeline: What took place when, if it was asked for.
        emulated: Whether stages took as long as other devices would, and ``time_s`` is of those.
    """

    in_flight: int
    minibatches: int
    samples_per_second: float
    stages: list[StageReport]
    timeline: Timeline | None = None
    emulated: bool = False
