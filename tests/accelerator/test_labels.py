"""Models of Hugging Face's that compute their loss from labels, which lie on one device, are captured whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch.utils.data import DataLoader, TensorDataset

from tests.exact.running import assert_equal, expect, fit
from tests.oracle import Batch, Outputs
from tests.support.accelerator import TestAccelerator
from tests.support.marks import slow_except
from tests.support.models import ADAMW, CLASSES, WORDS, Learner
from tests.support.strategies import stashing

SIZES: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
STILL: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
KINDS: dict[str, Any] = {"num_labels": CLASSES}


def gpt2() -> Any:
    still: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes: dict[str, Any] = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8}
    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=WORDS, use_cache=False, **sizes, **still))


def bert() -> Any:
    return hf.BertForSequenceClassification(
        hf.BertConfig(vocab_size=WORDS, max_position_embeddings=8, **SIZES, **STILL, **KINDS)
    )


def t5() -> Any:
    sizes: dict[str, Any] = {"d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_heads": 2}
    special: dict[str, Any] = {"dropout_rate": 0.0, "use_cache": False, "decoder_start_token_id": 0}
    return hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=WORDS, **sizes, **special))


def vit() -> Any:
    return hf.ViTForImageClassification(hf.ViTConfig(image_size=8, patch_size=4, **SIZES, **STILL, **KINDS))


class Labelled(Learner):
    def __init__(self, make: Callable[[], Any], key: str) -> None:
        super().__init__(ADAMW)
        torch.manual_seed(7)
        self.model = make()
        self.key = key

    def compute(self, batch: Batch) -> Outputs:
        return {"loss": self.model(**{self.key: batch[0], "labels": batch[1]}).loss}


def loader(key: str, samples: int, *, one_for_each: bool) -> DataLoader[Any]:
    chance = torch.Generator().manual_seed(3)
    words = torch.randint(1, WORDS, (samples, 7), generator=chance)
    given = words if key == "input_ids" else torch.randn(samples, 3, 8, 8, generator=chance)
    return DataLoader(
        TensorDataset(given, torch.randint(CLASSES, (samples,), generator=chance) if one_for_each else words), 4
    )


MODELS: dict[str, tuple[Callable[[], Any], str, bool]] = {
    "gpt2": (gpt2, "input_ids", False),
    "bert": (bert, "input_ids", True),
    "t5": (t5, "input_ids", False),
    "vit": (vit, "pixel_values", True),
}


@pytest.mark.parametrize("name", slow_except(MODELS, "gpt2"))
def test_a_model_that_is_given_labels(accelerator: TestAccelerator, name: str) -> None:
    make, key, one_for_each = MODELS[name]
    data = loader(key, 12 if name == "gpt2" else 14, one_for_each=one_for_each)
    strategy = stashing(stages=3, in_flight=3)
    record = fit(Labelled(make, key), data, strategy=strategy, accelerator=accelerator, devices=3)
    assert not strategy.last_run.taken_apart
    assert len(strategy.last_run.stages) == 3
    assert_equal(expect(Labelled(make, key), data, 3), record)
