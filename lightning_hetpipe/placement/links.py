"""Links between the devices of this machine, measured by copies between each two of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import torch

from lightning_hetpipe.accelerator import accelerates
from lightning_hetpipe.planning.model.cluster import Link
from lightning_hetpipe.planning.model.link_timing import LARGEST, slower, timed_link


def links_between(devices: Sequence[torch.device], largest: int = LARGEST) -> dict[tuple[int, int], Link]:
    """Link of each two of ``devices``, by their places: the slower of both directions; none where they are CPUs.

    Each device holds ``largest`` bytes meanwhile, those of the largest copy.
    """
    return {
        (one, other): slower(_link(devices[one], devices[other], largest), _link(devices[other], devices[one], largest))
        for one, other in combinations(range(len(devices)), 2)
        if accelerates(devices[one]) and accelerates(devices[other])
    }


def _link(source: torch.device, target: torch.device, largest: int) -> Link:
    sent = torch.zeros(largest, dtype=torch.uint8, device=source)
    received = torch.empty(largest, dtype=torch.uint8, device=target)
    torch.accelerator.synchronize(source)

    def copy(nbytes: int) -> None:
        received[:nbytes].copy_(sent[:nbytes])
        torch.accelerator.synchronize(source)
        torch.accelerator.synchronize(target)

    return timed_link(copy, largest)
