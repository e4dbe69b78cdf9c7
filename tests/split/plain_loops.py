"""Divided layers as plain loops: the oracle of what a group computes, bit for bit.

Parts are cut with ``split``, each member computes in turn, and autograd does the rest. Loops run from the last member
to the first one: autograd adds the gradients of a tensor's uses from the latest to the first, and so in the order of
members. The first minibatch of a fit is unsplit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Counts = Sequence[int]


def _each(compute: Callable[[int], Tensor], counts: Counts) -> list[Tensor]:
    """Outputs of the members that have something, in their order."""
    found = {member: compute(member) for member in reversed(range(len(counts))) if counts[member]}
    return [found[member] for member in sorted(found)]


def _cut(tensor: Tensor | None, counts: Counts, dim: int = 0, blocks: int = 1, inner: int = 1) -> list[Any]:
    if tensor is None:
        return [None] * len(counts)
    sizes = [count * inner for count in counts]
    parts = [torch.split(each, sizes, dim) for each in tensor.chunk(blocks, dim)]
    return [torch.cat(each, dim) if blocks > 1 else each[0].contiguous() for each in zip(*parts, strict=True)]


def _added(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0]
    for each in parts[1:]:
        total = total + each
    return total


def _first(counts: Counts, bias: Tensor | None, member: int) -> Tensor | None:
    return bias if member == next(each for each, count in enumerate(counts) if count) else None


def columns_and_rows(
    first: nn.Linear, between: Callable[[Tensor], Tensor], second: nn.Linear, counts: Counts, x: Tensor
) -> Tensor:
    """Two linear layers."""
    weights, biases = _cut(first.weight, counts), _cut(first.bias, counts)
    rows = _cut(second.weight, counts, 1)

    def compute(member: int) -> Tensor:
        y = between(F.linear(x, weights[member], biases[member]))
        return F.linear(y, rows[member], _first(counts, second.bias, member))

    return _added(_each(compute, counts))


class Loops(nn.Module):
    """A module that computes as another class of its kind the first time, and divided from then on."""

    unsplit: type[nn.Module]
    begun = False

    def forward(self, x: Tensor) -> Tensor:
        if self.begun:
            return self.divided(x)
        self.begun = True
        made: Tensor = self.unsplit.forward(self, x)
        return made

    def divided(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class VGGLoops(Loops, nn.Sequential):
    """The net of :func:`tests.split.nets.vgg`, in one stage; has to be given its layers.

    Attributes:
        counts: Of the two convolutions, and of the last linear layer.
    """

    counts: tuple[Counts, Counts, Counts]

    def divided(self, x: Tensor) -> Tensor:
        layers: list[Any] = list(self)
        conv1, norm, _, _, conv2, _, _, _, rows, _, drop, last = layers
        x = self._convolved(conv1, norm, self.counts[0], x)
        parts = self._parts(conv2, None, self.counts[1], x)
        weights = _cut(rows.weight, self.counts[1], 1, inner=4)
        sums = [
            F.linear(each.flatten(1), weights[member], _first(self.counts[1], rows.bias, member))
            for member, each in enumerate(parts)
            if each is not None
        ]
        x = drop(F.relu(_added(sums)))
        weights, biases = _cut(last.weight, self.counts[2]), _cut(last.bias, self.counts[2])
        return torch.cat(_each(lambda member: F.linear(x, weights[member], biases[member]), self.counts[2]), 1)

    def _convolved(self, conv: Any, norm: Any, counts: Counts, x: Tensor) -> Tensor:
        return torch.cat([each for each in self._parts(conv, norm, counts, x) if each is not None], 1)

    def _parts(self, conv: Any, norm: Any, counts: Counts, x: Tensor) -> list[Tensor | None]:
        weights, biases = _cut(conv.weight, counts), _cut(conv.bias, counts)
        if norm is not None:
            scales, shifts = _cut(norm.weight, counts), _cut(norm.bias, counts)
            norm.num_batches_tracked.add_(1)
        found: list[Tensor | None] = [None] * len(counts)
        ends = torch.tensor([0, *counts]).cumsum(0).tolist()
        for member in reversed(range(len(counts))):
            if not counts[member]:
                continue
            y = F.conv2d(x, weights[member], biases[member], padding=1)
            if norm is not None:
                mean, var = (each[ends[member] : ends[member + 1]] for each in (norm.running_mean, norm.running_var))
                y = F.batch_norm(y, mean, var, scales[member], shifts[member], True, norm.momentum, norm.eps)
            found[member] = F.max_pool2d(F.relu(y), 2)
        return found


class BlockLoops(Loops):
    """The block of :class:`tests.split.nets.Block` without dropout, by heads and by columns and rows; has to be given
    its parts.

    Attributes:
        counts: Of the heads, and of the first linear layer.
    """

    counts: tuple[Counts, Counts]
    heads: int
    norm1: nn.Module
    norm2: nn.Module
    qkv: nn.Linear
    out: nn.Linear
    mlp: nn.Sequential

    def divided(self, x: Tensor) -> Tensor:
        n, t, width = x.shape
        size, (counts, others) = width // self.heads, self.counts
        weights, biases = (_cut(each, counts, 0, 3, size) for each in (self.qkv.weight, self.qkv.bias))
        rows, normed = _cut(self.out.weight, counts, 1, 1, size), self.norm1(x)

        def attended(member: int) -> Tensor:
            parts = F.linear(normed, weights[member], biases[member]).chunk(3, 2)
            q, k, v = (each.reshape(n, t, counts[member], size).transpose(1, 2) for each in parts)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(n, t, -1)
            return F.linear(y, rows[member], _first(counts, self.out.bias, member))

        x = x + _added(_each(attended, counts))
        return x + columns_and_rows(self.mlp[0], self.mlp[1], self.mlp[2], others, self.norm2(x))  # type: ignore[arg-type]


def as_loops(module: nn.Module, loops: type[Loops], counts: Any) -> None:
    """Make ``module`` itself one of ``loops``, with the same names for the same weights."""
    unsplit = type(module)
    module.__class__ = loops
    vars(module).update(unsplit=unsplit, counts=counts)
