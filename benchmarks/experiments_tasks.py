"""Tasks of the experiments on weight policies: small models, their data, and the recipes that train them plainly."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from benchmarks.staleness_training import Recipe, convolutions
from lightning_hetpipe.demo import GPT, ResNet
from lightning_hetpipe.demo.data import load_images, read_source, split_by_class, windows

CONTEXT = 32
"""Bytes of a text."""

TEXT, VALIDATION = 200_000, 128
"""Bytes of source code that are read, and texts of them that validate."""

CORRECTION = 132
"""K of ``lr_correction``, where there is one."""


@dataclass(frozen=True)
class Task:
    """A model, its data, and how it is trained.

    Attributes:
        title: For people.
        net: Makes the model.
        data: Gives what is trained on, and what is validated on.
        recipe: Its learning rate is the plain one, with which ``sync`` trains well.
        native: The weight policy that predicts by the optimizer's state.
        target: Validation loss to reach, nats.
    """

    title: str
    net: Callable[[], nn.Module]
    data: Callable[[], tuple[TensorDataset, TensorDataset]]
    recipe: Recipe
    native: str
    target: float

    def seeded(self, seed: int) -> nn.Module:
        """The model, the same for the same seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.net()

    def sync(self, recipe: Recipe) -> Recipe:
        """Plain training with as many minibatches to an update: what ``recipe`` is compared with."""
        return replace(self.recipe, weights="sync", accumulate=recipe.accumulate)

    def variants(self, in_flight: int) -> dict[str, Recipe]:
        """Recipes that are compared where so many minibatches are in flight, each with an update for each minibatch.

        With one in flight all weight policies are the same.
        """
        if in_flight == 1:
            return {"sync": self.sync(self.recipe)}
        found = {}
        for weights in ("stash", self.native, "pipeoptim"):
            found[weights] = replace(self.recipe, weights=weights)
            found[f"{weights}, K"] = replace(self.recipe, weights=weights, correction=CORRECTION)
            if weights != "pipeoptim":  # whose clipped runs are those of the native prediction
                found[f"{weights}, clip"] = replace(self.recipe, weights=weights, clip=1.0)
        return {**found, "auto": replace(self.recipe, weights="auto").chosen}

    def accumulating(self, in_flight: int) -> dict[str, Recipe]:
        """The same with as many minibatches to an update as are in flight, as ``2bw`` needs it."""
        names = ("sync", "stash", self.native, "2bw") if in_flight > 1 else ()
        return {name: replace(self.recipe, weights=name, accumulate=in_flight) for name in names}


def loss(net: nn.Module, batch: Any) -> Tensor:
    """Mean cross-entropy in nats, of classes or of the next bytes."""
    inputs, targets = batch
    return F.cross_entropy(net(inputs).flatten(0, -2), targets.flatten())


@torch.inference_mode()
def validation_loss(net: nn.Module, data: TensorDataset) -> float:
    """Mean loss over ``data``; the model goes on training."""
    net.eval()
    found = loss(net, data.tensors).item()
    net.train()
    return found


@cache
def digits() -> tuple[TensorDataset, TensorDataset]:
    """Images of handwritten digits: the training and the validation part of `hetpipe-train`."""
    train, validation, _ = split_by_class(*load_images(), val_share=0.15, test_share=0.2, seed=0)
    return train, validation


@cache
def source() -> tuple[TensorDataset, TensorDataset]:
    """Texts of the standard library's source; the last ones validate."""
    text = read_source(Path(sysconfig.get_paths()["stdlib"]), TEXT)
    last = VALIDATION * CONTEXT + 1
    return windows(text[:-last], CONTEXT), windows(text[-last:], CONTEXT)


def _gpt() -> nn.Module:
    return GPT(context=CONTEXT, width=32, blocks=2, heads=4, dropout=0.0).net


def _resnet() -> nn.Module:
    return ResNet(width=8, blocks=4).net


_SGD, _ADAMW = Recipe("SGD", 0.05, 0.9), Recipe("AdamW", 0.003)

TASKS: Mapping[str, Task] = {
    "cnn_sgd": Task("CNN, SGD with momentum", convolutions, digits, _SGD, "spectrain", 0.1),
    "cnn_adamw": Task("CNN, AdamW", convolutions, digits, _ADAMW, "xpipe", 0.1),
    "resnet": Task("residual net, SGD with momentum", _resnet, digits, _SGD, "spectrain", 0.1),
    "gpt": Task("GPT, AdamW", _gpt, source, _ADAMW, "xpipe", 2.6),
}
