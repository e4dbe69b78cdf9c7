"""What every test gets: one torch thread, a fixed seed, and a check that no thread of ours outlives it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def same_start() -> Iterator[None]:
    """One torch thread for each operation (sums depend on their number), and seeds that no other test has set."""
    threads = torch.get_num_threads()
    seed = os.environ.pop("PL_GLOBAL_SEED", None)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
    os.environ.pop("PL_GLOBAL_SEED", None)
    if seed is not None:
        os.environ["PL_GLOBAL_SEED"] = seed


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    """A run ends with all of its threads, however it ends."""
    before = set(threading.enumerate())
    yield
    left = [thread for thread in threading.enumerate() if thread not in before and thread.name.startswith("hetpipe")]
    for thread in left:
        thread.join(timeout=1)  # one that is on its last lines is not left behind
    alive = [thread.name for thread in left if thread.is_alive()]
    assert not alive, f"threads left alive: {', '.join(alive)}"
