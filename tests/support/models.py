"""Small LightningModules, and data, whose training the oracle can repeat."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, TensorDataset

from tests.oracle import Batch, Outputs, Recipe

CLASSES = 5
WORDS = 11


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    """Biases and norms without weight decay and at a rate of their own, as people do."""
    matrices = [weight for weight in model.parameters() if weight.ndim > 1]
    others = [weight for weight in model.parameters() if weight.ndim <= 1]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 0.002}], lr=0.01)


decay = functools.partial(ExponentialLR, gamma=0.8)

SGD = Recipe(sgd)
ADAMW = Recipe(adamw)


class Learner(L.LightningModule):
    """The oracle calls ``compute``, Lightning ``training_step``."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe

    def compute(self, batch: Batch) -> Outputs:
        raise NotImplementedError

    def training_step(self, batch: Batch, batch_idx: int) -> Outputs:
        return self.compute(batch)

    def configure_optimizers(self) -> Any:
        optimizer = self.recipe.optimizer(self)
        if self.recipe.scheduler is None:
            return optimizer
        scheduler = {"scheduler": self.recipe.scheduler(optimizer), "interval": self.recipe.interval}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class Task(Learner):
    """Classifies with ``self.net``."""

    def __init__(self, net: nn.Sequential, recipe: Recipe = SGD) -> None:
        super().__init__(recipe)
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)
        return logits

    def compute(self, batch: Batch) -> Outputs:
        x, y = batch
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits.flatten(0, -2), y.flatten()), "logits": logits.detach()}

    def training_step(self, batch: Batch, batch_idx: int) -> Outputs:
        outputs = self.compute(batch)
        self.log("loss", outputs["loss"], on_step=True, on_epoch=True)
        return outputs

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", self.compute(batch)["loss"])

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("test_loss", self.compute(batch)["loss"])

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.forward(batch[0])


class Through(Task):
    """Calls the model as ``self(x)``, through ``forward``."""

    def compute(self, batch: Batch) -> Outputs:
        x, y = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits.flatten(0, -2), y.flatten()), "logits": logits.detach()}


class Pieces(Learner):
    """An encoder and a decoder, as in Lightning's introduction, with the user's own code between and after them."""

    def __init__(self, recipe: Recipe = SGD) -> None:
        super().__init__(recipe)
        self.encoder = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8))
        self.decoder = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 6))

    def compute(self, batch: Batch) -> Outputs:
        x, _ = batch
        z = self.encoder(x)
        # The code z is read twice: by the decoder, and by a term of the loss.
        decoded = self.decoder(torch.tanh(z).reshape(len(x), -1))
        return {"loss": F.mse_loss(decoded, x) + 0.1 * z.square().mean(), "z": z.detach()}


class Residual(nn.Module):
    """x + body(x)."""

    def __init__(self, *body: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*body)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.body(x)
        return y


class Attention(nn.Module):
    """Causal self-attention with two heads, for (N, T, C)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, t, c = x.shape
        q, k, v = self.qkv(x).view(n, t, 3, 2, c // 2).permute(2, 0, 3, 1, 4)
        y: Tensor = self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(n, t, c))
        return y


class Words(nn.Module):
    """Embeddings of words and places: (N, T) to (N, T, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.places = nn.Parameter(torch.randn(8, width) / 10)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.words(tokens) + self.places[: tokens.shape[1]]
        return embedded


def block(width: int, dropout: float) -> list[nn.Module]:
    """A transformer's block, as two layers."""
    return [
        Residual(nn.LayerNorm(width), Attention(width), nn.Dropout(dropout)),
        Residual(
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.GELU(),
            nn.Linear(2 * width, width),
            nn.Dropout(dropout),
        ),
    ]


def mlp(recipe: Recipe = SGD, task: Callable[[nn.Sequential, Recipe], Task] = Task) -> Task:
    """Six layers on vectors."""
    layers = [nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(inplace=True), nn.Linear(16, 16), nn.Tanh()]
    return task(nn.Sequential(*layers, nn.Linear(16, CLASSES)), recipe)


def resnet(recipe: Recipe = SGD) -> Task:
    """A residual network with BatchNorm, on images of 8 x 8."""
    return _pooled(
        recipe,
        *_normed(),
        Residual(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1)),
        nn.Conv2d(4, 8, 3, stride=2, padding=1),
        Residual(nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)),
    )


def convnet(recipe: Recipe = SGD) -> Task:
    """Nine layers of torch's own with BatchNorm, on images of 8 x 8, which run without a graph."""
    return _pooled(recipe, *_normed(), nn.Conv2d(4, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU())


def _normed() -> list[nn.Module]:
    """First layers on images, which give four channels."""
    return [nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True)]


def _pooled(recipe: Recipe, *layers: nn.Module) -> Task:
    """A classifier by the eight channels that ``layers`` give."""
    return Task(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES)), recipe)


def transformer(recipe: Recipe = SGD, dropout: float = 0.2) -> Task:
    """Two blocks with dropout, on sequences of eight words."""
    layers = [Words(8), nn.Dropout(dropout), *block(8, dropout), *block(8, dropout)]
    return Task(nn.Sequential(*layers, nn.LayerNorm(8), nn.Linear(8, WORDS)), recipe)


def tied_language_model(recipe: Recipe = SGD, *, captured: bool = True) -> Task:
    """The first and the last layer share their matrix. Unless it is to be ``captured``, it runs without a graph."""
    embedding, head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS, bias=False)
    head.weight = embedding.weight
    between = [*block(8, 0.0), *block(8, 0.0)] if captured else [nn.Linear(8, 8), nn.GELU()]
    return Task(nn.Sequential(embedding, *between, nn.LayerNorm(8), head), recipe)


def recurring(recipe: Recipe = SGD) -> Task:
    """One linear layer stands in two places, and one dropout in two."""
    shared, dropout = nn.Linear(16, 16), nn.Dropout(0.3)
    layers = [nn.Linear(6, 16), dropout, shared, nn.Tanh(), dropout, shared, nn.LayerNorm(16)]
    return Task(nn.Sequential(*layers, nn.Linear(16, CLASSES)), recipe)


def labelled(samples: int, batch_size: int, *shape: int, classes: int = CLASSES, seed: int = 1) -> DataLoader[Any]:
    """(N, *shape) and labels (N,). The last batch is what remains."""
    chance = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (samples,), generator=chance)
    return DataLoader(TensorDataset(torch.randn(samples, *shape, generator=chance), labels), batch_size)


def vectors(samples: int, batch_size: int, seed: int = 1) -> DataLoader[Any]:
    """(N, 6) and labels (N,)."""
    return labelled(samples, batch_size, 6, seed=seed)


def images(samples: int, batch_size: int, seed: int = 2) -> DataLoader[Any]:
    """(N, 1, 8, 8) and labels (N,)."""
    return labelled(samples, batch_size, 1, 8, 8, seed=seed)


def words(samples: int, batch_size: int, seed: int = 3) -> DataLoader[Any]:
    """(N, 7) words."""
    chance = torch.Generator().manual_seed(seed)
    return DataLoader(TensorDataset(torch.randint(WORDS, (samples, 7), generator=chance)), batch_size)


def sentences(samples: int, batch_size: int, seed: int = 3) -> DataLoader[Any]:
    """(N, 8) words and the words that follow them."""
    words = torch.randint(WORDS, (samples, 9), generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(words[:, :-1], words[:, 1:]), batch_size)


def whole_batches(loader: DataLoader[Any]) -> DataLoader[Any]:
    """``loader`` without its last batch, if that is smaller: each other size has a captured model captured again."""
    return DataLoader(loader.dataset, loader.batch_size, drop_last=True)


MODELS: dict[str, tuple[Callable[[Recipe], Task], Callable[[int, int], DataLoader[Any]]]] = {
    "mlp": (mlp, vectors),
    "resnet": (resnet, images),
    "transformer": (transformer, sentences),
}
