"""Parts of weights that the members of a group hold: made once for each version, where a member first uses it.

Where a member is on the home device, a part that lies in one piece there is no copy.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from lightning_hetpipe.pipeline.split.parts import part
from lightning_hetpipe.pipeline.streams import move
from lightning_hetpipe.rules.channel_layouts import ChannelLayout


class VersionParts:
    """Parts of the weights in each version buffer.

    A buffer is known by a key, and what is in it by how often it has been filled.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[Any, tuple[int, dict[Any, Tensor]]] = {}
        self._now: dict[Any, Tensor] = {}

    def use(self, buffer: Any, fills: int) -> None:
        """Weights are those in ``buffer`` from now on."""
        kept = self._kept.get(buffer)
        if kept is None or kept[0] != fills:
            kept = self._kept[buffer] = fills, {}
        self._now = kept[1]

    def clear(self) -> None:
        """Give the memory back."""
        self._kept.clear()
        self._now = {}

    def of(self, weight: Tensor, layout: ChannelLayout | None, member: int, device: torch.device) -> Tensor:
        """The part of ``member`` of a ``weight``, or the whole where there is no layout, on ``device``."""
        key = id(weight), layout, member
        now = self._now
        with self._lock:
            found = now.get(key)
        if found is None:
            taken = weight.detach() if layout is None else part(weight.detach(), layout, member)
            found = move(taken.contiguous(), device)
            with self._lock:
                now[key] = found
        return found
