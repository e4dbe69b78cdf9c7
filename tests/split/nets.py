"""Nets of the kinds that people train, small, with what they are given."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WORDS = 13


def vgg() -> nn.Sequential:
    """Convolutions, then linear layers with dropout."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 12, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(48, 16),
        nn.ReLU(inplace=True),
        nn.Dropout(0.3),
        nn.Linear(16, 5),
    )


class ResidualBlock(nn.Module):
    """Block of a ResNet, with a strided convolution beside it."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, out, 3, 2, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.beside = nn.Sequential(nn.Conv2d(channels, out, 1, 2, bias=False), nn.BatchNorm2d(out))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += self.beside(x)
        made: Tensor = self.relu(y)
        return made


class Residuals(nn.Module):
    """Two such blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.blocks = nn.Sequential(ResidualBlock(6, 8), ResidualBlock(8, 10))
        self.head = nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.head(F.adaptive_avg_pool2d(self.blocks(self.stem(x)), 1).flatten(1))
        return made


class InvertedResidual(nn.Module):
    """Block of a MobileNet: a depthwise convolution between two that change channels, and weights for these."""

    def __init__(self) -> None:
        super().__init__()
        self.expand, self.depth = nn.Conv2d(4, 12, 1), nn.Conv2d(12, 12, 3, padding=1, groups=12)
        self.norms = nn.ModuleList([nn.BatchNorm2d(12), nn.BatchNorm2d(12), nn.BatchNorm2d(4)])
        self.squeeze, self.excite = nn.Conv2d(12, 3, 1), nn.Conv2d(3, 12, 1)
        self.project = nn.Conv2d(12, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu6(self.norms[0](self.expand(x)))
        y = F.relu6(self.norms[1](self.depth(y)))
        y = y * torch.sigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(y, 1)))))
        made: Tensor = x + self.norms[2](self.project(y))
        return made


class Block(nn.Module):
    """Block of a GPT: one projection to queries, keys and values, and dropout everywhere."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        n, t, width = x.shape
        parts = self.qkv(self.norm1(x)).split(width, 2)
        q, k, v = (each.view(n, t, self.heads, width // self.heads).transpose(1, 2) for each in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        x = x + self.drop(self.out(y.transpose(1, 2).reshape(n, t, width)))
        made: Tensor = x + self.drop(self.mlp(self.norm2(x)))
        return made


class Language(nn.Module):
    """Words to words, with one matrix at both ends."""

    def __init__(self, dropouts: Sequence[float] = (0.2, 0.0)) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 8), nn.Embedding(8, 8)
        self.blocks = nn.ModuleList([Block(8, 4, dropout) for dropout in dropouts])
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.places(torch.arange(words.shape[1], device=words.device))
        for block in self.blocks:
            x = block(x)
        made: Tensor = self.head(self.norm(x))
        return made


class Grouped(nn.Module):
    """Block of a Llama: norms by root mean square, turned queries and keys, fewer heads of keys, and a gate."""

    def __init__(self, repeats: bool) -> None:
        super().__init__()
        self.repeats = repeats
        self.norm1, self.norm2 = nn.RMSNorm(16), nn.RMSNorm(16)
        self.q, self.k, self.v = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 8)
        self.o = nn.Linear(16, 16, bias=False)
        self.gate, self.up, self.down = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        n, t, _ = x.shape
        y = self.norm1(x)
        q, k, v = (each(y).view(n, t, -1, 4).transpose(1, 2) for each in (self.q, self.k, self.v))
        angles = torch.outer(torch.arange(t, dtype=x.dtype), torch.tensor([1.0, 0.1], dtype=x.dtype)).repeat(1, 2)
        q, k = self.turned(q, angles), self.turned(k, angles)
        if self.repeats:
            k, v = (each[:, :, None].expand(n, 2, 2, t, 4).reshape(n, 4, t, 4) for each in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=not self.repeats)
        x = x + self.o(y.transpose(1, 2).reshape(n, t, 16))
        y = self.norm2(x)
        made: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return made

    def turned(self, x: Tensor, angles: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()


class Bert(nn.Module):
    """Attention as products and softmax, with a mask, and norms behind."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        n, t, _ = x.shape
        q, k, v = (each(x).view(n, t, 4, 2).permute(0, 2, 1, 3) for each in (self.q, self.k, self.v))
        scores = torch.matmul(q, k.transpose(-1, -2)) / 2**0.5 + torch.zeros(n, 1, 1, t, dtype=x.dtype)
        y = torch.matmul(self.drop(scores.softmax(-1)), v).permute(0, 2, 1, 3).contiguous().view(n, t, 8)
        x = self.norm1(x + self.drop(self.out(y)))
        made: Tensor = self.norm2(x + self.drop(self.second(F.gelu(self.first(x)))))
        return made


def encoder() -> nn.Module:
    """Torch's own, with dropout."""
    return nn.TransformerEncoderLayer(8, 4, 16, dropout=0.2, batch_first=True)


def pixels(*sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(5))


def some_words() -> Tensor:
    return torch.randint(WORDS, (2, 6), generator=torch.Generator().manual_seed(6))


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], int]] = {
    "vgg": (vgg, lambda: pixels(2, 3, 8, 8), 3),
    "resnet": (Residuals, lambda: pixels(2, 3, 8, 8), 5),
    "mobilenet": (InvertedResidual, lambda: pixels(2, 4, 6, 6), 4),
    "gpt": (Language, some_words, 6),
    "llama": (lambda: Grouped(True), lambda: pixels(2, 5, 16), 2),
    "llama, fewer heads": (lambda: Grouped(False), lambda: pixels(2, 5, 16), 2),
    "bert": (Bert, lambda: pixels(2, 5, 8), 2),
    "encoder": (encoder, lambda: pixels(2, 5, 8), 2),
}
"""For each its maker, that of what it is given, and the number of regions that it has, divided by shares."""
