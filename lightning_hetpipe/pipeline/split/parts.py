"""Parts of tensors that the members of a group hold: taken from the whole, put together again, once per version."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_hetpipe.pipeline.streams import move
from lightning_hetpipe.rules.channel_layouts import ChannelLayout


def part(whole: Tensor, layout: ChannelLayout, member: int) -> Tensor:
    """The part of ``member``: a view where units lie in one block, else a copy."""
    start, end = ([0, *layout.ends][member + more] for more in (0, 1))
    if layout.outer == 1:
        return whole.narrow(layout.dim, start, end - start)
    blocks = _blocks(whole, layout.dim, layout.units * layout.inner)
    return blocks.narrow(layout.dim + 1, start, end - start).flatten(layout.dim, layout.dim + 1)


def joined(parts: Sequence[Tensor], layout: ChannelLayout) -> Tensor:
    """The whole of all ``parts``, in the order of the members that have something."""
    if len(parts) == 1:
        return parts[0]
    if layout.outer == 1:
        return torch.cat(list(parts), layout.dim)
    present = [layout.counts[member] * layout.inner for member in layout.members]
    blocks = [_blocks(each, layout.dim, size) for each, size in zip(parts, present, strict=True)]
    return torch.cat(blocks, layout.dim + 1).flatten(layout.dim, layout.dim + 1)


def _blocks(tensor: Tensor, dim: int, size: int) -> Tensor:
    """``tensor`` with the blocks of dimension ``dim``, each of that ``size``, as a dimension of their own."""
    return tensor.reshape(*tensor.shape[:dim], -1, size, *tensor.shape[dim + 1 :])


class VersionParts:
    """Parts of the weights in each version buffer, made once for each version, where a member first uses it.

    Where a member is on the home device, a part that lies in one piece there is no copy.

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
