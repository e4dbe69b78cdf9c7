"""The table of third-party models: its list, what becomes of one model, and how rows and totals are written."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from benchmarks import models_table
from benchmarks.models_list import models

CAPTURED: dict[str, Any] = {"outcome": "captured", "said": "", "equal": "equal", "seconds": 3}
REFUSED: dict[str, Any] = {"outcome": "refused", "said": "model|net: <no>", "equal": "", "seconds": 2}


def test_how_many_models_are_tried() -> None:
    counts = Counter(name.partition("/")[0] for name in models())
    assert counts["timm"] >= 75
    assert counts["torchvision"] >= 15
    assert counts["transformers"] >= 60


def test_a_row_says_what_became_of_a_model() -> None:
    assert models_table.line("timm/resnet18", CAPTURED) == "| resnet18 | timm | captured | equal | 3 |"
    assert models_table.line("timm/other", REFUSED) == r"| other | timm | refused: model\|net: \<no> |  | 2 |"
    said = models_table.totals({"a": CAPTURED, "b": REFUSED})
    assert said == "2 models: 1 captured, 0 partly, 1 refused, 0 error; 1 equal to a plain run."


def test_a_model_that_takes_too_long_is_ended() -> None:
    found = models_table.tried("transformers/gpt2 for CausalLM", 0.01)
    assert (found["outcome"], found["said"]) == ("error", "it took more than 0.01 seconds")


@pytest.mark.slow
def test_a_model_is_compared_with_a_plain_run() -> None:
    found = models_table.tried("transformers/bert for SequenceClassification", 250)
    assert (found["outcome"], found["equal"]) == ("captured", "equal"), found["said"]
