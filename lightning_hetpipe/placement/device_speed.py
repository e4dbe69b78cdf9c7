"""Speed of a device that the catalogue of GPUs does not know, such as a CPU, by the catalogue's rule."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from lightning_hetpipe.accelerator import accelerates
from lightning_hetpipe.planning.model.catalogue import speed_by

SIZE = 1024
"""Rows and columns of the matrices whose product shows the peak: 2.1 GFLOP."""

BYTES = 64 << 20
"""Bytes that are copied to show the bandwidth of memory, more than caches hold."""

_ROUNDS = 5


def measured_speed(device: torch.device) -> float:
    """FLOP/s of ``device`` in 32 bits: from the fastest of some products of matrices, and of some copies in memory.

    No random number is drawn.
    """
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        one, product = (torch.ones(SIZE, SIZE, dtype=torch.float32, device=device) for _ in range(2))
        source, target = (torch.ones(BYTES, dtype=torch.uint8, device=device) for _ in range(2))
        peak = 2 * SIZE**3 / _fastest(lambda: torch.mm(one, one, out=product), device)
        bandwidth = 2 * BYTES / _fastest(lambda: target.copy_(source), device)  # each byte is read and written
    return speed_by(peak, bandwidth)


def _fastest(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest run, after one that warms up."""
    found = []
    for _ in range(1 + _ROUNDS):
        began = time.perf_counter()
        run()
        if accelerates(device):
            torch.accelerator.synchronize(device)
        found.append(time.perf_counter() - began)
    return min(found[1:])
