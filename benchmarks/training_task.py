"""Task of one training process of a benchmark; written by the benchmark, read by its workers."""

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

WORKER = "benchmarks.training_worker"
"""The module that does tasks."""

Variant = Literal["plain", "strategy", "ddp", "schedule_1f1b"]
ModelName = Literal["mlp", "resnet", "gpt", "bert", "words", "gpt2", "resnet50"]
"""See benchmarks.training_models."""
OptimizerName = Literal["sgd", "adamw", "soap", "muon"]


@dataclass(frozen=True)
class Task:
    """One measurement.

    The window of `steps` minibatches comes after `warmup` ones, in which stages are profiled and pipelines fill, and
    before `tail` ones: a pipeline that drains would finish its last minibatches faster than it can go on.
    """

    variant: Variant
    loop: Literal["fit", "test"] = "fit"
    """The Trainer's entry point; "schedule_1f1b" has no Trainer, and trains."""
    cores: tuple[int, ...] = ()
    """CPU cores to stay on; empty: wherever the operating system likes."""
    model: ModelName = "mlp"
    layers: int = 8
    """Linears, residual blocks, or transformer blocks."""
    width: int = 1024
    batch: int = 256
    """Samples in a minibatch, of each worker."""
    length: int = 64
    """Words in a text, or the side of an image, for the models that have a choice."""
    words: int = 256
    """Words that there are, for the same."""
    accelerator: str = "cpu"
    """The Trainer's; it takes one device."""
    precision: Literal["32-true", "bf16-mixed"] = "32-true"
    """The Trainer's."""
    momentum: float = 0.9
    """Momentum of SGD."""
    optimizer: OptimizerName | None = None
    """None for the model's own."""
    warmup: int = 10
    steps: int = 30
    tail: int = 10
    workers: int = 1
    """Processes that train one model on their own data, which the worker starts itself: virtual workers, or DDP's."""
    stages: int = 2
    """For "strategy": of each virtual worker."""
    in_flight: int | None = None
    """For "strategy": Nm; None for its default."""
    pads: tuple[tuple[float, float], ...] = ()
    """For "strategy": seconds that the forward and the backward of each stage take; empty for as long as they do."""
    weights: str | None = None
    """For "strategy": the weight policy; None for its default."""
    stage_steps: bool | None = None
    """For "strategy": whether stages step their own weights; None to time both ways, as users have it."""
    recompute: bool = False
    """For "strategy": whether forwards are computed again for their backwards."""
    compile: bool = False
    """For "strategy": whether stages run compiled layers."""
    timeline: bool = False
    """For "strategy": whether it records one."""
    wave: int | None = None
    """For "strategy": W; None for its default."""
    clock_distance: int = 0
    """For "strategy": D."""
    turns: int = 1
    """Repetitions, where one process alternates between several tasks."""
    profile: bool = False
    """Trace all threads, and note CPU time by folder (benchmarks.folder_profile)."""
    together: bool = False
    """Start the window at the same moment as the other processes of the same run."""
    rank: int = 0
    """For "schedule_1f1b": the stage that this process is."""
    rendezvous: str = ""
    """For "schedule_1f1b": a path that does not exist yet, for the two processes to find each other."""
    microbatches: tuple[int, ...] = ()
    """For "schedule_1f1b": numbers of microbatches to measure, one after the other."""

    @property
    def log_every(self) -> int:
        """Minibatches between two logs of metrics; `warmup` and `steps` should be multiples of it."""
        return max(4, self.wave or self.in_flight or 1)

    @property
    def total(self) -> int:
        """Minibatches of each worker."""
        return self.warmup + self.steps + self.tail

    def to_json(self) -> str:
        """The task as one command-line argument."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Task":
        """Reads what `to_json` wrote."""
        values: dict[str, Any] = json.loads(text)
        for name in ("cores", "microbatches"):
            values[name] = tuple(values[name])
        values["pads"] = tuple((forward, backward) for forward, backward in values["pads"])
        return cls(**values)
