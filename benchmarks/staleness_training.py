"""A small convolutional network on the digits, trained with a weight policy: by a plain loop, and by the strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe.demo.data import CLASSES, load_images, split_by_class
from lightning_hetpipe.pipeline.weight_stash import NO_MOVES, Moves
from lightning_hetpipe.rules.versions import POLICIES, Reading, Versions
from lightning_hetpipe.run.around_step import AroundStep, Correction, RateCorrection, around_step
from lightning_hetpipe.run.prediction import Prediction, prediction_of
from lightning_hetpipe.run.stale_gradients import automatic_policy

BATCH = 32
WITH_MOMENTUM = ("SGD", "RMSprop")
"""Optimizers that have the setting."""


@dataclass(frozen=True)
class Recipe:
    """An optimizer by its name in torch.optim, its arguments, and what Trainer and strategy do to its gradients.

    Attributes:
        weights: The weight policy; ``auto``: that of ``chosen``.
        correction: ``lr_correction``; 0 for none.
        least_tau: The least tau of the correction.
        norm: The net's: ``BatchNorm``, or ``GroupNorm``.
    """

    optimizer: str
    lr: float
    momentum: float = 0.0
    nesterov: bool = False
    beta: float = 0.9
    clip: float | None = None
    accumulate: int = 1
    weight_decay: float | None = None
    dampening: float = 0.0
    weights: str = "stash"
    correction: int = 0
    least_tau: int = 1
    norm: str = "BatchNorm"

    def __str__(self) -> str:
        parts = [f"{self.optimizer} {self.lr:g}"]
        parts += [f"first beta {self.beta:g}"] * (self.optimizer == "AdamW")
        parts += [f"momentum {self.momentum:g}"] * (self.optimizer in WITH_MOMENTUM)
        parts += ["Nesterov"] * self.nesterov
        parts += [f"dampening {self.dampening:g}"] * (self.dampening != 0)
        parts += [] if self.weight_decay is None else [f"weight decay {self.weight_decay:g}"]
        parts += [f"gradient_clip_val={self.clip:g}"] if self.clip else []
        parts += [f"accumulate_grad_batches={self.accumulate}"] if self.accumulate > 1 else []
        parts += [self.norm] * (self.norm != "BatchNorm")
        parts += [self.weights] * (self.weights != "stash")
        parts += [f"lr_correction={self.correction}"] * (self.correction > 0)
        return ", ".join(parts)

    @property
    def effective(self) -> float:
        """The learning rate with what momentum makes of it."""
        return self.lr / (1 - self.momentum)

    @property
    def chosen(self) -> Recipe:
        """The same with the policy and the correction that ``weights="auto"`` takes."""
        if self.weights != "auto":
            return self
        optimizer = self.make([nn.Parameter(torch.zeros(1))])
        found = automatic_policy(optimizer, clipped=self.clip is not None)
        updates, least = found.lr_correction or Correction(0)
        return replace(self, weights=found.policy.name, correction=updates, least_tau=least)

    def make(self, parameters: Any) -> torch.optim.Optimizer:
        options: dict[str, Any] = {"betas": (self.beta, 0.999)} if self.optimizer == "AdamW" else {}
        if self.optimizer in WITH_MOMENTUM:
            options["momentum"] = self.momentum
        if self.nesterov:
            options["nesterov"] = True
        if self.dampening:
            options["dampening"] = self.dampening
        if self.weight_decay is not None:
            options["weight_decay"] = self.weight_decay
        made: torch.optim.Optimizer = getattr(torch.optim, self.optimizer)(parameters, lr=self.lr, **options)
        return made


def convolutions(norm: str = "BatchNorm") -> nn.Sequential:
    """Four 3x3 convolutions with BatchNorm, or GroupNorm, and a linear layer."""
    layers: list[nn.Module] = []
    channels = 1
    for index, width in enumerate((16, 16, 32, 32)):
        normed = nn.BatchNorm2d(width) if norm == "BatchNorm" else nn.GroupNorm(4, width)
        layers += [nn.Conv2d(channels, width, 3, padding=1), normed, nn.ReLU()]
        layers += [nn.MaxPool2d(2)] * (index % 2)
        channels = width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * channels, CLASSES))


class Net(L.LightningModule):
    """The convolutions, and cross-entropy."""

    def __init__(self, recipe: Recipe, seed: int) -> None:
        super().__init__()
        self.recipe = recipe
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.net = convolutions(recipe.norm)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.net(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.recipe.make(self.parameters())


def digits() -> tuple[TensorDataset, TensorDataset]:
    """The training and the test images of `hetpipe-train`."""
    train, _, test = split_by_class(*load_images(), val_share=0.15, test_share=0.2, seed=0)
    return train, test


def batches(train: TensorDataset, seed: int) -> DataLoader[Any]:
    """In an order that depends on ``seed`` only, another one in each epoch."""
    order = RandomSampler(train, generator=torch.Generator().manual_seed(seed))
    return DataLoader(train, batch_size=None, sampler=BatchSampler(order, BATCH, drop_last=False))


def by_loop(recipe: Recipe, in_flight: int, loader: DataLoader[Any], seed: int, epochs: int) -> Net:
    """Trains by the formulas of the recipe's weight policy, and nothing runs at once."""
    net = Net(recipe, seed)
    for _ in updates(net, lambda batch: net.training_step(batch, 0), recipe, in_flight, loader, epochs):
        pass
    return net


def updates(
    net: nn.Module,
    loss_of: Callable[[Any], Tensor],
    recipe: Recipe,
    in_flight: int,
    loader: DataLoader[Any],
    epochs: int,
) -> Iterator[tuple[int, float]]:
    """Trains ``net`` by ``loss_of`` batches; yields after each update how many there were, and the last loss."""
    net.train()
    recipe = recipe.chosen
    weights = list(net.parameters())
    optimizer = recipe.make(weights)
    policy, every, count = POLICIES[recipe.weights], recipe.accumulate, len(loader)
    versions = Versions(policy, in_flight, every)
    done = 0
    prediction = prediction_of(policy.name, optimizer) if policy.predicts else None
    correction = AroundStep()
    if recipe.correction:
        setting = Correction(recipe.correction, recipe.least_tau)
        correction = RateCorrection(optimizer, setting, lambda: versions.most_steps, lambda: done)
    around = [correction] if prediction is None else [prediction, correction]
    p = 0
    for _ in range(epochs):
        versions = Versions(policy, in_flight, every, empty_at=p, start=p)
        held = _published({}, versions, p, weights, _moves(prediction, correction))
        for index, batch in enumerate(loader):
            p += 1
            live = [weight.data for weight in weights]
            _show(weights, held[versions.reading(p)])
            loss = loss_of(batch)
            (loss / every).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            _show(weights, live)
            steps = (index + 1) % every == 0 or index + 1 == count
            if steps:
                if recipe.clip:
                    nn.utils.clip_grad_norm_(weights, recipe.clip)
                with around_step(optimizer, around):
                    optimizer.step()
                optimizer.zero_grad()
                done += 1
            held = _published(held, versions, p, weights, _moves(prediction, correction))
            if steps:
                yield done, loss.item()


Held = Mapping[Reading, list[Tensor]]


def _moves(prediction: Prediction | None, correction: AroundStep) -> Moves:
    """Expected changes of parameters by the next step, at its corrected rate."""
    if prediction is None:
        return NO_MOVES
    with correction.stepping():
        return prediction.moves()


def _published(held: Held, versions: Versions, version: int, weights: list[nn.Parameter], moves: Moves) -> Held:
    """The weights that minibatches use once ``version`` is published."""
    needed = versions.needed(version)
    return {each: held[each] if each in held else _moved(weights, moves, each.steps) for each in needed}


def _moved(weights: list[nn.Parameter], moves: Moves, steps: int) -> list[Tensor]:
    """A copy of the weights, moved on by so many steps."""
    copies = [weight.detach().clone() for weight in weights]
    if steps:
        for weight, copy in zip(weights, copies, strict=True):
            if weight in moves:
                moves[weight].write(weight.detach(), steps, copy)
    return copies


def _show(weights: list[nn.Parameter], values: list[Tensor]) -> None:
    for weight, value in zip(weights, values, strict=True):
        weight.data = value


def by_strategy(recipe: Recipe, in_flight: int, loader: DataLoader[Any], seed: int, epochs: int) -> Net:
    """The same by the Trainer, as a pipeline of three stages."""
    net = Net(recipe, seed)
    correction: Any = "auto" if recipe.weights == "auto" else recipe.correction or None
    trainer = L.Trainer(
        strategy=HetPipeStrategy(stages=3, in_flight=in_flight, weights=recipe.weights, lr_correction=correction),
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
