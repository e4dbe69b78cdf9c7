"""Launches of virtual workers, each a process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent.parent
SECONDS = 180


@dataclass
class Job:
    """What ``tests.wsp.worker`` is told."""

    folder: Path
    task: str = "mlp"
    lengths: Sequence[int] = (5, 5)
    stages: Any = 2
    in_flight: Any = 3
    more: dict[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        told = {name: value for name, value in vars(self).items() if name != "more"}
        return json.dumps({**told, "folder": str(self.folder), "lengths": list(self.lengths), **self.more})

    def command(self) -> list[str]:
        return [sys.executable, "-m", "tests.wsp.worker", self.text()]

    def written(self) -> list[dict[str, Any]]:
        """What each virtual worker wrote."""
        return [torch.load(self.folder / f"{worker}.pt", weights_only=False) for worker in range(len(self.lengths))]


def start(job: Job) -> subprocess.CompletedProcess[str]:
    """Runs ``job`` to its end, whatever that is."""
    return subprocess.run(job.command(), cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False)


def finished(job: Job) -> tuple[list[dict[str, Any]], str]:
    """Runs ``job`` to its end; gives what each virtual worker wrote, and what was said on stderr."""
    done = start(job)
    assert done.returncode == 0, done.stderr
    return job.written(), done.stderr


def run(job: Job) -> list[dict[str, Any]]:
    """Runs ``job`` to its end; gives what each virtual worker wrote."""
    return finished(job)[0]
