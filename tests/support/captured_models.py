"""Models as people write them: no nn.Sequential at the top, skips, ties, several inputs and outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.oracle import Batch, Noise, Outputs, Recipe
from tests.support.models import ADAMW, CLASSES, SGD, WORDS, Learner


class Whole(Learner):
    """Classifies with ``self.model``."""

    def __init__(self, model: nn.Module, recipe: Recipe = SGD) -> None:
        super().__init__(recipe)
        self.model = model

    def compute(self, batch: Batch) -> Outputs:
        x, y = batch
        logits = self.model(x)
        return {"loss": F.cross_entropy(logits.flatten(0, -2), y.flatten()), "logits": logits.detach()}


class UNet(nn.Module):
    """Long skips, and an argument that is used at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Linear(6, 8), nn.Linear(8, 4)
        self.middle = nn.Linear(4, 4)
        self.up2, self.up1 = nn.Linear(8, 8), nn.Linear(16, 6)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        a = torch.relu(self.down1(x))
        b = torch.tanh(self.down2(a))
        m = torch.relu(self.middle(b))
        u = torch.tanh(self.up2(torch.cat([m, b], -1)))
        v = self.up1(torch.cat([u, a], -1))
        y: Tensor = self.head(torch.cat([v, x], -1))
        return y


class Bottleneck(nn.Module):
    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.downsample = nn.Conv2d(channels, out, 1) if channels != out else None

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        y: Tensor = self.relu(out)
        return y


class ResNet(nn.Module):
    """In-place ReLUs, BatchNorm, and layers in a list; as in torchvision."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.layers = nn.ModuleList([Bottleneck(4, 6), Bottleneck(6, 6), Bottleneck(6, 6)][:blocks])
        self.fc = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.fc(x.mean((-2, -1)))
        return y


class SelfAttention(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q @ k.transpose(-2, -1)).masked_fill(~mask, float("-inf"))
        y: Tensor = self.out(self.dropout(scores.softmax(-1)) @ v)
        return y


class GPTBlock(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = SelfAttention(width, dropout)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), mask)
        y: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return y


class GPT(nn.Module):
    """Tied embeddings, a mask that every block reads, and attention dropout."""

    def __init__(self, blocks: int = 3, width: int = 8, dropout: float = 0.0, length: int = 12) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([GPTBlock(width, dropout) for _ in range(blocks)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.mask: Tensor
        self.register_buffer("mask", torch.ones(length, length, dtype=torch.bool).tril(), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[-1]
        x = self.words(ids) + self.places(torch.arange(length, device=ids.device))
        mask = self.mask[:length, :length]
        for block in self.blocks:
            x = block(x, mask)
        y: Tensor = self.head(self.norm(x))
        return y


class Words(Whole):
    """Predicts the next word: inputs (N, T)."""

    def compute(self, batch: Batch) -> Outputs:
        (ids,) = batch
        logits = self.model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, -2), ids[:, 1:].flatten())
        return {"loss": loss, "logits": logits.detach()}


class CrossBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.memory, self.out = (
            nn.Linear(width, width),
            nn.Linear(width, 2 * width),
            nn.Linear(width, width),
        )

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        k, v = self.memory(memory).chunk(2, -1)
        y: Tensor = x + self.out((self.query(x) @ k.transpose(-2, -1)).softmax(-1) @ v)
        return y


class Translator(nn.Module):
    """An encoder, and a decoder whose every block reads the encoder's output; one embedding for three uses.

    Takes arguments by name, and gives its loss, as Hugging Face's models do.
    """

    def __init__(self, width: int = 8, encoders: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.encoder = nn.ModuleList([nn.Linear(width, width) for _ in range(encoders)])
        self.decoder = nn.ModuleList([CrossBlock(width) for _ in range(2)])
        self.norm = nn.LayerNorm(width)

    def forward(self, source: Tensor, *, target: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        memory = self.words(source)
        for layer in self.encoder:
            memory = torch.tanh(layer(memory))
        x = self.words(target)
        for block in self.decoder:
            x = block(x, memory)
        logits = F.linear(self.norm(x), self.words.weight)
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, -2), labels.flatten())
        return {"loss": loss, "logits": logits, "memory": memory}


class Translates(Learner):
    def __init__(self, recipe: Recipe = ADAMW) -> None:
        super().__init__(recipe)
        self.model = Translator(encoders=1)

    def compute(self, batch: Batch) -> Outputs:
        (ids,) = batch
        outputs = self.model(ids[:, ::2], target=ids[:, :-1], labels=ids[:, 1:])
        # A term of the loss on another output, as people regularise.
        loss = outputs["loss"] + 0.01 * outputs["memory"].square().mean()
        return {"loss": loss, "logits": outputs["logits"].detach()}


class Tower(nn.Module):
    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(inputs, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = F.normalize(self.out(torch.relu(self.hidden(x))), dim=-1)
        return y


class CLIP(nn.Module):
    """Two towers and a learnable temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = Tower(4), Tower(2)
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.temperature.exp() * self.image(image) @ self.text(text).T
        return logits, logits.T


class Contrasts(Learner):
    def __init__(self) -> None:
        super().__init__(SGD)
        self.model = CLIP()

    def compute(self, batch: Batch) -> Outputs:
        x, _ = batch
        rows, columns = self.model(x[:, :4], text=x[:, 4:])
        order = torch.arange(len(x))
        loss = (F.cross_entropy(rows, order) + F.cross_entropy(columns, order)) / 2
        return {"loss": loss, "logits": rows.detach()}


class Autoencodes(Learner):
    """Two captured pieces and a Sequential, with user code between: a VAE without its noise."""

    def __init__(self) -> None:
        super().__init__(ADAMW)
        self.encoder, self.decoder = Tower(6), nn.Sequential(nn.Linear(4, 8), nn.ReLU())
        self.head = nn.Linear(8, 6)

    def compute(self, batch: Batch) -> Outputs:
        x, _ = batch
        z = self.encoder(x)
        return {"loss": F.mse_loss(self.head(self.decoder(z * 2)), x) + z.square().mean(), "z": z.detach()}


class Encoder(nn.Module):
    """Gives the mean and the logarithm of the variance of a code."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.mean, self.log_variance = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.relu(self.hidden(x))
        return self.mean(y), self.log_variance(y)


class VAE(nn.Module):
    """A variational autoencoder that draws in its middle."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.noise, self.decoder = Encoder(), Noise(), Decoder()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x)
        z = mean + (0.5 * log_variance).exp() * self.noise(mean)
        return self.decoder(z), mean, log_variance


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(4, 8), nn.Linear(8, 6)

    def forward(self, z: Tensor) -> Tensor:
        y: Tensor = self.out(torch.relu(self.hidden(z)))
        return y


class Varies(Learner):
    """Trains a VAE that is one module."""

    def __init__(self) -> None:
        super().__init__(ADAMW)
        self.model = VAE()

    def compute(self, batch: Batch) -> Outputs:
        x, _ = batch
        return elbo(x, *self.model(x))


class VariesBetween(Learner):
    """A VAE as in Lightning's examples: training_step draws between its two pieces."""

    def __init__(self) -> None:
        super().__init__(ADAMW)
        self.encoder, self.decoder = Encoder(), Decoder()

    def compute(self, batch: Batch) -> Outputs:
        x, _ = batch
        mean, log_variance = self.encoder(x)
        z = mean + (0.5 * log_variance).exp() * torch.randn_like(mean)
        return elbo(x, self.decoder(z), mean, log_variance)


def elbo(x: Tensor, y: Tensor, mean: Tensor, log_variance: Tensor) -> Outputs:
    divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(-1).mean()
    return {"loss": F.mse_loss(y, x) + 0.1 * divergence, "y": y.detach()}


class Towers(Learner):
    """A CLIP whose towers are pieces, and whose temperature belongs to the LightningModule."""

    def __init__(self) -> None:
        super().__init__(SGD)
        self.image, self.text = Tower(4), Tower(2)
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def compute(self, batch: Batch) -> Outputs:
        x, _ = batch
        logits = self.temperature.exp() * self.image(x[:, :4]) @ self.text(x[:, 4:]).T
        order = torch.arange(len(x))
        return {"loss": (F.cross_entropy(logits, order) + F.cross_entropy(logits.T, order)) / 2}


class Backbone(nn.Module):
    """BatchNorm and Dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.drop, self.last = nn.Dropout(0.3), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.drop(torch.relu(self.norm(self.first(x)))))
        return y


class Projection(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(F.relu(self.norm(self.first(x))))
        return y


class Views(Learner):
    """Two views of each sample go through backbone and head, as in SimCLR."""

    def __init__(
        self, backbone: nn.Module | None = None, head: nn.Module | None = None, recipe: Recipe = ADAMW
    ) -> None:
        super().__init__(recipe)
        self.backbone = backbone or Backbone()
        self.head = head or Projection()

    def compute(self, batch: Batch) -> Outputs:
        x, _ = batch
        one, other = self.head(self.backbone(x + 0.1)), self.head(self.backbone(x * 1.1))
        both = F.normalize(torch.cat([one, other]))
        scores = (both @ both.T / 0.5).masked_fill(torch.eye(len(both), dtype=torch.bool), float("-inf"))
        loss = F.cross_entropy(scores, torch.arange(len(both)).roll(len(one)))
        return {"loss": loss, "one": one.detach(), "other": other.detach()}
