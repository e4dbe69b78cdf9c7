"""Models of other kinds that no single device could hold: a scan, a graph network, a U-Net, tied embeddings."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetpipe.planning.model.estimate import Estimate
from tests.accelerator.four_devices import SHARE
from tests.accelerator.large_models import Evaluated, Translates, check_pipeline
from tests.oracle import Batch, Outputs
from tests.support.accelerator import TestAccelerator
from tests.support.captured_models import CrossBlock
from tests.support.models import ADAMW, WORDS, Learner, words

pytestmark = pytest.mark.usefixtures("own_profiles")


class Scan(nn.Module):
    """A selective state space: the state is carried from each word to the next (Mamba, without its kernel)."""

    def __init__(self, width: int, state: int = 4) -> None:
        super().__init__()
        self.state = state
        self.norm = nn.LayerNorm(width)
        self.enter = nn.Linear(width, 2 * width)
        self.local = nn.Conv1d(width, width, 3, padding=2, groups=width)
        self.select = nn.Linear(width, width + 2 * state)
        self.decay = nn.Parameter(torch.arange(1.0, state + 1).log().repeat(width, 1))
        self.skip = nn.Parameter(torch.ones(width))
        self.leave = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        inner, gate = self.enter(self.norm(x)).chunk(2, -1)
        inner = F.silu(self.local(inner.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        step, given, read = self.select(inner).split([x.shape[-1], self.state, self.state], -1)
        step = F.softplus(step)
        keep = (step.unsqueeze(-1) * -self.decay.exp()).exp()
        add = (step * inner).unsqueeze(-1) * given.unsqueeze(2)
        state = torch.zeros_like(add[:, 0])
        found = []
        for place in range(x.shape[1]):
            state = keep[:, place] * state + add[:, place]
            found.append((state * read[:, place].unsqueeze(1)).sum(-1))
        y: Tensor = x + self.leave((torch.stack(found, 1) + self.skip * inner) * F.silu(gate))
        return y


class Language(nn.Module):
    def __init__(self, width: int = 64, blocks: int = 8) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList([Scan(width) for _ in range(blocks)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(self.norm(x))
        return y


class Next(Evaluated):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(ADAMW)
        self.model = model

    def compute(self, batch: Batch) -> Outputs:
        (ids,) = batch
        logits = self.model(ids[:, :-1])
        return {"loss": F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()), "logits": logits.detach()}


def mamba() -> tuple[Learner, Any]:
    torch.manual_seed(7)
    return Next(Language()), words(20, 4)


class Passing(nn.Module):
    """Sends messages along edges: scattered sums, a mean by counts, and a largest one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(2 * width, width), nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        sent = F.relu(self.message(torch.cat([x[source], x[target]], -1)))
        total = torch.zeros_like(x).index_add(0, target, sent)
        count = torch.zeros(len(x), 1, device=x.device).index_add(
            0, target, torch.ones(len(target), 1, device=x.device)
        )
        index = target.unsqueeze(-1).expand_as(sent)
        largest = torch.zeros_like(x).scatter_reduce(0, index, sent, "amax", include_self=True)
        y: Tensor = x + self.norm(self.update(torch.cat([x, total, total / count.clamp(min=1), largest], -1)))
        return y


class Graphs(nn.Module):
    def __init__(self, width: int = 48, layers: int = 8) -> None:
        super().__init__()
        self.enter = nn.Linear(6, width)
        self.layers = nn.ModuleList([Passing(width) for _ in range(layers)])
        self.leave = nn.Linear(width, 3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x, edges)
        y: Tensor = self.leave(x)
        return y


class Nodes(Evaluated):
    """Classifies nodes of a graph for each batch; its edges are so many as they are."""

    def __init__(self) -> None:
        super().__init__(ADAMW)
        self.model = Graphs()

    def compute(self, batch: Batch) -> Outputs:
        x, edges, kinds = batch
        logits = self.model(x, edges)
        return {"loss": F.cross_entropy(logits, kinds), "logits": logits.detach()}


def graphs() -> tuple[Learner, Any]:
    torch.manual_seed(7)
    chance = torch.Generator().manual_seed(3)
    found = []
    for number in range(5):
        nodes, edges = 20 + number, 50 + 3 * number
        found.append(
            (
                torch.randn(nodes, 6, generator=chance),
                torch.randint(nodes, (2, edges), generator=chance),
                torch.randint(3, (nodes,), generator=chance),
            )
        )
    return Nodes(), DataLoader(found, batch_size=None)  # type: ignore[arg-type]


class Level(nn.Module):
    """Convolutions that are told the time, and attention over all places."""

    def __init__(self, channels: int, width: int, attends: bool) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, channels), nn.Conv2d(channels, width, 3, padding=1)
        self.time = nn.Linear(32, 2 * width)
        self.norm2, self.conv2 = nn.GroupNorm(4, width), nn.Conv2d(width, width, 3, padding=1)
        self.short = nn.Conv2d(channels, width, 1) if channels != width else nn.Identity()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True) if attends else None

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y: Tensor = self.conv1(F.silu(self.norm1(x)))
        scale, shift = self.time(F.silu(time))[..., None, None].chunk(2, 1)
        y = self.conv2(F.silu(self.norm2(y) * (1 + scale) + shift)) + self.short(x)
        if self.attention is not None:
            flat = y.flatten(2).transpose(1, 2)
            attended, _ = self.attention(flat, flat, flat, need_weights=False)
            y = y + attended.transpose(1, 2).reshape(y.shape)
        return y


class UNet(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 32))
        self.enter = nn.Conv2d(1, width, 3, padding=1)
        self.down = nn.ModuleList([Level(width, width, False), Level(width, 2 * width, True)])
        self.shrink = nn.ModuleList([nn.Conv2d(w, w, 3, 2, 1) for w in (width, 2 * width)])
        self.middle = Level(2 * width, 2 * width, True)
        self.up = nn.ModuleList([Level(4 * width, 2 * width, True), Level(3 * width, width, False)])
        self.leave = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        waves = torch.exp(-math.log(1e4) * torch.arange(16, device=x.device) / 16) * time[:, None]
        told = self.time(torch.cat([waves.sin(), waves.cos()], -1))
        x, kept = self.enter(x), []
        for level, shrink in zip(self.down, self.shrink, strict=True):
            x = level(x, told)
            kept.append(x)
            x = shrink(x)
        x = self.middle(x, told)
        for level in self.up:
            x = level(torch.cat([F.interpolate(x, scale_factor=2.0), kept.pop()], 1), told)
        y: Tensor = self.leave(x)
        return y


class Denoises(Evaluated):
    def __init__(self) -> None:
        super().__init__(ADAMW)
        self.model = UNet()

    def compute(self, batch: Batch) -> Outputs:
        images, noise, time = batch
        share = torch.cos(time / 1000 * math.pi / 2)[:, None, None, None]
        found = self.model(share * images + (1 - share**2).sqrt() * noise, time)
        return {"loss": F.mse_loss(found, noise), "found": found.detach()}


def denoiser() -> tuple[Learner, Any]:
    torch.manual_seed(7)
    chance = torch.Generator().manual_seed(3)
    images, noise = (torch.randn(20, 1, 16, 16, generator=chance) for _ in range(2))
    time = torch.randint(1000, (20,), generator=chance).float()
    return Denoises(), DataLoader(TensorDataset(images, noise, time), 4)


class Tied(nn.Module):
    """One embedding for the encoder, the decoder and the head; the encoder is frozen."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.shared = nn.Embedding(WORDS, width)
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False).requires_grad_(False)
        self.decoder = nn.ModuleList([CrossBlock(width) for _ in range(6)])
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.shared.weight

    def forward(self, ids: Tensor, given: Tensor) -> Tensor:
        memory, x = self.encoder(self.shared(ids)), self.shared(given)
        for block in self.decoder:
            x = block(x, memory)
        y: Tensor = self.head(x)
        return y


class Summarises(Translates):
    def __init__(self) -> None:
        super().__init__(Tied())


def summariser() -> tuple[Learner, Any]:
    torch.manual_seed(7)
    return Summarises(), words(20, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "devices", "share", "in_flight"),
    [(mamba, 4, SHARE, 3), (graphs, 4, SHARE, 3), (denoiser, 3, 2.2, 2), (summariser, 4, SHARE, 3)],
)
def test_it_trains_and_is_evaluated(
    make: Callable[[], tuple[Learner, Any]],
    devices: int,
    share: float,
    in_flight: int,
    planned: list[Estimate],
    accelerator: TestAccelerator,
    tmp_path: Path,
) -> None:
    """``share`` is what a model needs, as a multiple of a device; layers of the U-Net are few and large."""
    check_pipeline(make, in_flight, planned, accelerator, tmp_path, devices, share)
