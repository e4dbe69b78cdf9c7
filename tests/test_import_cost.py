"""Modules that importing the strategy does not load. A benchmark measures the time of the import."""

from __future__ import annotations

from tests.support import forks

HEAVY = ("grpc", "torch.export", "torch._dynamo", "sympy", "matplotlib", "tensorboard", "hydra", "omegaconf", "sklearn")
PROGRAM = """
import sys
import lightning
before = set(sys.modules)
from lightning_hetpipe import HetPipeStrategy
print(*sorted(set(sys.modules) - before))
"""


def test_heavy_modules_are_imported_only_where_they_are_used() -> None:
    run = forks.run("-c", PROGRAM, loaded="libraries")  # which has not loaded what a capture does
    assert run.returncode == 0, run.stderr
    added = run.stdout.split()
    assert "lightning_hetpipe.strategy.hetpipe_strategy" in added
    found = [name for name in added if any(name == heavy or name.startswith(f"{heavy}.") for heavy in HEAVY)]
    assert found == [], "import these inside the function that needs them"
