"""A small convolutional network on the digits, trained on stale gradients: by a plain loop, and by the strategy."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe.demo.digits import CLASSES, load, split
from lightning_hetpipe.rules.versions import STASH, Versions

BATCH = 32
OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": torch.optim.SGD,
    "AdamW": torch.optim.AdamW,
    "RMSprop": torch.optim.RMSprop,
}


@dataclass(frozen=True)
class Recipe:
    """An optimizer by its name, its arguments, and what the Trainer does to gradients."""

    optimizer: str
    lr: float
    momentum: float = 0.0
    nesterov: bool = False
    beta: float = 0.9
    clip: float | None = None
    accumulate: int = 1

    def __str__(self) -> str:
        parts = [f"{self.optimizer} {self.lr:g}"]
        parts += [f"first beta {self.beta:g}"] if self.optimizer == "AdamW" else [f"momentum {self.momentum:g}"]
        parts += ["Nesterov"] * self.nesterov
        parts += [f"gradient_clip_val={self.clip:g}"] if self.clip else []
        parts += [f"accumulate_grad_batches={self.accumulate}"] if self.accumulate > 1 else []
        return ", ".join(parts)

    @property
    def effective(self) -> float:
        """The learning rate with what momentum makes of it."""
        return self.lr / (1 - self.momentum)

    def make(self, parameters: Any) -> torch.optim.Optimizer:
        options: dict[str, Any] = {"betas": (self.beta, 0.999)} if self.optimizer == "AdamW" else {}
        if self.optimizer != "AdamW":
            options["momentum"] = self.momentum
        if self.nesterov:
            options["nesterov"] = True
        return OPTIMIZERS[self.optimizer](parameters, lr=self.lr, **options)


class Net(L.LightningModule):
    """Four 3x3 convolutions with BatchNorm, a linear layer, and cross-entropy."""

    def __init__(self, recipe: Recipe, seed: int) -> None:
        super().__init__()
        self.recipe = recipe
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            layers: list[nn.Module] = []
            channels = 1
            for index, width in enumerate((16, 16, 32, 32)):
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
                layers += [nn.MaxPool2d(2)] * (index % 2)
                channels = width
            self.net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * channels, CLASSES))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.net(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.recipe.make(self.parameters())


def digits() -> tuple[TensorDataset, TensorDataset]:
    """The training and the test images of `hetpipe-train`."""
    train, _, test = split(*load(), val_share=0.15, test_share=0.2, seed=0)
    return train, test


def batches(train: TensorDataset, seed: int) -> DataLoader[Any]:
    """In an order that depends on ``seed`` only, another one in each epoch."""
    order = RandomSampler(train, generator=torch.Generator().manual_seed(seed))
    return DataLoader(train, batch_size=None, sampler=BatchSampler(order, BATCH, drop_last=False))


def by_loop(recipe: Recipe, in_flight: int, loader: DataLoader[Any], seed: int, epochs: int) -> Net:
    """Trains by law L1: minibatch p computes its gradient on version max(v_e, p - Nm), and nothing runs at once."""
    net = Net(recipe, seed).train()
    weights = list(net.parameters())
    optimizer = recipe.make(weights)
    p = 0
    for _ in range(epochs):
        empty_at = p
        versions = deque([[weight.detach().clone() for weight in weights]], maxlen=in_flight)
        count = len(loader)
        for index, batch in enumerate(loader):
            p += 1
            # The newest of them is p - 1.
            stale = versions[Versions(STASH, in_flight, empty_at=empty_at).version(p) - p]
            live = [weight.data for weight in weights]
            _show(weights, stale)
            loss: Any = net.training_step(batch, index) / recipe.accumulate
            loss.backward()
            _show(weights, live)
            if (index + 1) % recipe.accumulate == 0 or index + 1 == count:
                if recipe.clip:
                    nn.utils.clip_grad_norm_(weights, recipe.clip)
                optimizer.step()
                optimizer.zero_grad()
            versions.append([weight.detach().clone() for weight in weights])
    return net


def _show(weights: list[nn.Parameter], values: list[Tensor]) -> None:
    for weight, value in zip(weights, values, strict=True):
        weight.data = value


def by_strategy(recipe: Recipe, in_flight: int, loader: DataLoader[Any], seed: int, epochs: int) -> Net:
    """The same by the Trainer, as a pipeline of three stages."""
    net = Net(recipe, seed)
    trainer = L.Trainer(
        strategy=HetPipeStrategy(stages=3, in_flight=in_flight),
        accelerator="cpu",
        max_epochs=epochs,
        gradient_clip_val=recipe.clip,
        accumulate_grad_batches=recipe.accumulate,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(net, loader)
    return net


def equal(one: Net, other: Net) -> bool:
    """True if all weights and buffers are equal to the bit."""
    found = other.state_dict()
    return all(torch.equal(value, found[name]) for name, value in one.state_dict().items())


def accuracy(net: Net, test: TensorDataset) -> float:
    """Accuracy on the test images, in percent."""
    images, labels = test.tensors
    with torch.inference_mode():
        right = net.eval().net(images).argmax(1) == labels
    return 100 * float(right.float().mean())
