"""Settings of a run from environment variables."""

from __future__ import annotations

import os

import torch


def run_seed() -> int:
    """Seed of the run's random numbers: PL_GLOBAL_SEED, else torch's own."""
    seed = os.environ.get("PL_GLOBAL_SEED")
    return int(seed) if seed else torch.initial_seed()


def torch_threads() -> int:
    """Threads of each torch operation in training: OMP_NUM_THREADS, else 1; never derived from k, for exactness."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return max(1, int(threads)) if threads.isdigit() else 1
