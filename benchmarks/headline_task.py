"""The task of the headline benchmark: the demo's residual net on the digits, moved, turned and disturbed at random.

All images of an epoch are made once from a seed, `REPEATS` of each image of the training part, and lie in a fixed
order. So a way to train is told by who takes which of them, and nothing is random besides.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hetpipe.demo import ResNet
from lightning_hetpipe.demo.data import load_images, split_by_class

BATCH = 4
"""Samples of a minibatch of a virtual worker, and of a rank of DDP."""

REPEATS = 64

AVERAGED = 512
"""Images for BatchNorm's averages."""

WIDTH, BLOCKS = 16, 6

TURN, MOVE, SCALE, NOISE = 0.25, 0.125, 0.1, 0.1
"""Largest angle in radians, largest shift and change of scale (parts of the image), standard deviation of noise."""


def network(seed: int) -> nn.Sequential:
    """The net, with the weights of the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ResNet(width=WIDTH, blocks=BLOCKS).net


@cache
def held_out() -> tuple[Tensor, Tensor]:
    """The images that are tested on: the validation and the test part of `hetpipe-train`, each twice, disturbed too."""
    _, validation, test = split_by_class(*load_images(), val_share=0.15, test_share=0.2, seed=0)
    images, labels = zip(validation.tensors, test.tensors, strict=True)
    twice = torch.cat(images + images)
    return disturbed(twice, torch.Generator().manual_seed(1 << 20)), torch.cat(labels + labels)


@cache
def epoch(seed: int) -> tuple[Tensor, Tensor]:
    """The images of an epoch, in the order in which they are taken, and their labels."""
    train, _, _ = split_by_class(*load_images(), val_share=0.15, test_share=0.2, seed=0)
    generator = torch.Generator().manual_seed(seed)
    images, labels = train.tensors
    order = torch.cat([torch.randperm(len(images), generator=generator) for _ in range(REPEATS)])
    return disturbed(images[order], generator), labels[order]


def disturbed(images: Tensor, generator: torch.Generator) -> Tensor:
    """Each image turned, moved, scaled and with noise, by random amounts."""

    def drawn(reach: float) -> Tensor:
        return (2 * torch.rand(len(images), generator=generator) - 1) * reach

    angle, scale = drawn(TURN), 1 + drawn(SCALE)
    cos, sin = angle.cos() * scale, angle.sin() * scale
    rows = torch.stack([cos, -sin, 2 * drawn(MOVE), sin, cos, 2 * drawn(MOVE)], 1)
    grid = F.affine_grid(rows.view(-1, 2, 3), list(images.shape), align_corners=False)
    moved = F.grid_sample(images, grid, align_corners=False)
    return moved + NOISE * torch.randn(images.shape, generator=generator)


def batch(samples: Sequence[int], seed: int) -> tuple[Tensor, Tensor]:
    """Images and labels, by their places in the epoch."""
    images, labels = epoch(seed)
    chosen = torch.as_tensor(samples)
    return images[chosen], labels[chosen]


@torch.inference_mode()
def accuracy(net: nn.Module, seed: int) -> float:
    """Share of the held-out images that the net gets right.

    BatchNorm's averages are made anew, from the last training images and the net's weights as they are (precise
    BatchNorm, arXiv 2105.07576): its running averages lag behind weights, by how much depends on the method. The net is
    left in evaluation mode, with these averages.
    """
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
            module.momentum = None  # the mean over all batches, of which there is one
    net.train()(epoch(seed)[0][-AVERAGED:])
    images, labels = held_out()
    return float((net.eval()(images).argmax(1) == labels).float().mean())
