"""What one process of the two-stage benchmark is asked to do; written by the benchmark, read by its workers."""

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

Variant = Literal["plain", "strategy", "schedule_1f1b"]


@dataclass(frozen=True)
class Task:
    """One measurement. The model is `layers` times Linear(width, width), with ReLU between them.

    The window of `steps` minibatches comes after `warmup` ones, in which stages are profiled and pipelines fill, and
    before `tail` ones: a pipeline that drains would finish its last minibatches faster than it can go on.
    """

    variant: Variant
    cores: tuple[int, ...] = ()
    """CPU cores to stay on; empty: wherever the operating system likes."""
    layers: int = 8
    width: int = 1024
    batch: int = 256
    warmup: int = 10
    steps: int = 30
    tail: int = 10
    stages: int = 2
    """For "strategy"."""
    together: bool = False
    """Start the window at the same moment as the other processes of the same run."""
    rank: int = 0
    """For "schedule_1f1b": the stage that this process is."""
    rendezvous: str = ""
    """For "schedule_1f1b": a path that does not exist yet, for the two processes to find each other."""
    microbatches: tuple[int, ...] = ()
    """For "schedule_1f1b": numbers of microbatches to measure, one after the other."""

    @property
    def total(self) -> int:
        """Minibatches to train on."""
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
        return cls(**values)
