"""Parts of tensors that the members of a group hold: taken from the whole, and put together again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

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
