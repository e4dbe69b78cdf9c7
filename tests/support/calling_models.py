"""Models that are called as people call theirs: caches, keywords that land in ``**kwargs``."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F

from tests.oracle import Batch, Outputs
from tests.support.models import ADAMW, WORDS, Learner


class Cache:
    """Keeps the states of each block, as Hugging Face's caches do; no pytree knows it."""

    def __init__(self) -> None:
        self.states: list[Tensor] = []

    def update(self, state: Tensor) -> Tensor:
        self.states.append(state)
        return torch.stack(self.states).mean(0)


class CachingModel(nn.Module):
    """Gives a cache that it has filled, whether it was given one or not, and what keywords ask for."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList([nn.Linear(width, width) for _ in range(3)])
        self.head = nn.Linear(width, WORDS)

    def forward(self, ids: Tensor, cache: Cache | None = None, labels: Tensor | None = None, **asked: Any) -> Any:
        cache = Cache() if cache is None else cache
        states = [self.words(ids)]
        for block in self.blocks:
            states.append(cache.update(torch.tanh(block(states[-1]))))
        logits = self.head(states[-1])
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, -2), labels.flatten())
        hidden = tuple(states) if asked.get("output_hidden_states") else None
        return {"loss": loss, "logits": logits, "cache": cache, "hidden": hidden}


class Caches(Learner):
    """Trains it by its own loss, and by its hidden states."""

    def __init__(self) -> None:
        super().__init__(ADAMW)
        self.model = CachingModel()

    def compute(self, batch: Batch) -> Outputs:
        (ids,) = batch
        outputs = self.model(ids[:, :-1], labels=ids[:, 1:], output_hidden_states=True)
        loss = outputs["loss"] + 0.01 * outputs["hidden"][2].square().mean()
        return {"loss": loss, "logits": outputs["logits"].detach()}


class Generates(Caches):
    """Evaluates with the loss, and then word by word, as ``generate`` does, with a cache of its own."""

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        (ids,) = batch
        loss = self.model(ids[:, :-1], labels=ids[:, 1:])["loss"]
        cache = Cache()
        for _ in range(2):
            outputs = self.model(ids, cache)
            cache, ids = outputs["cache"], outputs["logits"].argmax(-1)
        self.log_dict({"loss": loss, "states": sum(state.sum() for state in cache.states), "ids": ids.float().mean()})


class Scaled(Learner):
    """Numbers that change from call to call: two that it computes with, one that is a size, one that it decides by."""

    def __init__(self) -> None:
        super().__init__(ADAMW)
        self.model = Scales()

    def compute(self, batch: Batch) -> Outputs:
        x, _ = batch
        turn = int(x[0, 1] * 100)
        return {"loss": self.model(x, float(x[0, 0]), turn, 1 + turn % 2, is_scaled=float(x[0, 0] > 0))}


class Scales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, alpha: float, turn: int, rows: int, is_scaled: float = 1.0) -> Tensor:
        y = torch.relu(self.one(x)) * alpha + torch.ones(rows, 8, device=x.device) * torch.as_tensor(turn % 7)
        if is_scaled:
            y = y * 2
        loss: Tensor = self.two(y).square().mean() + (1 - alpha) * y.mean()
        return loss


class Rebinds(Learner):
    """Its buffer is made in the first forward, as in timm's ConViT."""

    def __init__(self) -> None:
        super().__init__(ADAMW)
        self.model = MadeLater()

    def compute(self, batch: Batch) -> Outputs:
        return {"loss": self.model(batch[0]).square().mean()}


class MadeLater(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 4)
        self.places: Tensor
        self.register_buffer("places", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if len(self.places) != x.shape[1]:
            self.places = torch.arange(x.shape[1], device=x.device) / 10
        y: Tensor = self.two(torch.relu(self.one(x + self.places)))
        return y


class Checkpoints(Learner):
    """A model of Hugging Face's with gradient checkpointing and frozen embeddings, whose hook lets it take part."""

    def __init__(self) -> None:
        super().__init__(ADAMW)
        sizes: dict[str, Any] = {
            "hidden_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 8,
        }
        model: Any = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, vocab_size=WORDS))
        model.get_input_embeddings().requires_grad_(False)
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
        self.model = model

    def compute(self, batch: Batch) -> Outputs:
        return {"loss": self.model(input_ids=batch[0], labels=batch[0]).loss}
