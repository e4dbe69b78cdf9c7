"""The models whose capture is measured, and a batch for each: the tests' own, in sizes at which there is work to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from tests.oracle import Batch, Outputs
from tests.support.captured_models import (
    GPT,
    Autoencodes,
    Contrasts,
    ResNet,
    Translates,
    Translator,
    UNet,
    Whole,
    Words,
)
from tests.support.models import ADAMW, CLASSES, WORDS, Learner


@dataclass(frozen=True)
class Model:
    """A model to capture.

    Attributes:
        make: Makes it, with random weights.
        batch: Makes a batch with so many samples.
        samples: In the batch that is captured and timed; chosen for tens of milliseconds, as real minibatches take.
        few: Makes a batch of next to no work, which shows what a minibatch costs whatever its size.
        autocast: What "bf16-mixed" casts to; None for no autocast.
    """

    make: Callable[[], Learner]
    batch: Callable[[int], Batch]
    samples: int
    few: Callable[[], Batch]
    autocast: torch.dtype | None = None


class HuggingFace(Learner):
    """GPT-2 as Hugging Face has it, in its own default size, with its loss in the model."""

    def __init__(self) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        super().__init__(ADAMW)
        self.model = GPT2LMHeadModel(GPT2Config(use_cache=False)).train()

    def compute(self, batch: Batch) -> Outputs:
        (ids,) = batch
        outputs = self.model(input_ids=ids, labels=ids)
        return {"loss": outputs.loss, "logits": outputs.logits.detach()}


class Translating(Translates):
    """The encoder-decoder in another width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.model = Translator(width)


def vectors(samples: int) -> Batch:
    return torch.randn(samples, 6), torch.randint(CLASSES, (samples,))


def images(samples: int) -> Batch:
    return torch.randn(samples, 1, 32, 32), torch.randint(CLASSES, (samples,))


def words(length: int, vocabulary: int = WORDS) -> Callable[[int], Batch]:
    def batch(samples: int) -> Batch:
        return (torch.randint(vocabulary, (samples, length)),)

    return batch


def few_vectors() -> Batch:
    return vectors(4)


def few_images() -> Batch:
    return images(2)


def few_words() -> Batch:
    return words(7)(4)


def gpt(dropout: float = 0.0) -> Learner:
    return Words(GPT(blocks=3, width=128, dropout=dropout, length=128), ADAMW)


TIMED: Mapping[str, Model] = {
    "U-Net": Model(lambda: Whole(UNet()), vectors, 65536, few_vectors),
    "ResNet": Model(lambda: Whole(ResNet(), ADAMW), images, 32, few_images),
    "GPT": Model(gpt, words(129), 8, few_words),
    "GPT, dropout 0.1": Model(lambda: gpt(0.1), words(129), 8, few_words),
    "GPT, bf16-mixed": Model(gpt, words(129), 8, few_words, torch.bfloat16),
    "encoder-decoder": Model(lambda: Translating(128), words(65), 32, few_words),
    "CLIP": Model(Contrasts, vectors, 1024, few_vectors),
    "autoencoder": Model(Autoencodes, vectors, 65536, few_vectors),
}
"""Those of which capture and graph are timed."""

LARGE: Mapping[str, Model] = {
    "GPT, 12 x 1024": Model(lambda: Words(GPT(blocks=12, width=1024, length=128), ADAMW), words(129), 4, few_words),
    "GPT-2, Hugging Face's": Model(HuggingFace, words(128, 50257), 4, few_words),
}
"""Those of about 100M parameters, of which capture's memory is measured."""
