"""The table of third-party models: its list, what becomes of one model, and how rows and totals are written."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import models_table
from benchmarks.models_list import CLASSES, Model, classified, models
from benchmarks.models_table_worker import Found, row
from tests import oracle

CAPTURED = Found("captured", "", "equal", "equal", "equal")
REFUSED = Found("refused", "model|net: <no>")
APART = Found("partly", "it decides", "equal", "differs by up to 1e-07", "equal; it is called with gradients")


def test_how_many_models_are_tried() -> None:
    counts = Counter(name.partition("/")[0] for name in models())
    assert counts["timm"] >= 75
    assert counts["torchvision"] >= 15
    assert counts["transformers"] >= 60


def test_a_row_says_what_became_of_a_model() -> None:
    assert models_table.line("timm/resnet18", CAPTURED) == "| resnet18 | timm | captured | equal | equal | equal |"
    assert models_table.line("timm/other", REFUSED) == r"| other | timm | refused: model\|net: \<no> |  |  |  |"
    said = models_table.totals({"a": CAPTURED, "b": REFUSED, "c": APART})
    assert said == (
        "3 models: 1 captured, 1 partly, 1 refused, 0 error. Of the 2 that are trained, 2 equal a plain run, 1 the"
        " oracle; the evaluation of 1 is pipelined, and equal."
    )
    assert models_table.totals({"b": REFUSED}).startswith(
        "1 models: 0 captured, 0 partly, 1 refused, 0 error. Of the 0"
    )


def test_a_table_is_put_between_its_marks(tmp_path: Path) -> None:
    file = tmp_path / "table.md"
    file.write_text(f"Before.\n{models_table.BEGIN}\nold\n{models_table.END}\nAfter.\n")
    rows = {"timm/resnet18": CAPTURED, "timm/vgg11": REFUSED, "transformers/bert for MaskedLM": APART}
    models_table.write(file, rows)
    text = file.read_text()
    assert text.startswith(f"Before.\n{models_table.BEGIN}\n\n3 models: 1 captured")
    assert text.endswith(
        f"{models_table.line('transformers/bert for MaskedLM', APART)}\n\n{models_table.END}\nAfter.\n"
    )
    assert models_table.read(text) == rows
    models_table.write(file, {"timm/vgg11": CAPTURED})
    assert models_table.read(file.read_text()) == {**rows, "timm/vgg11": CAPTURED}, "rows of other models are lost"


def test_a_model_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    for preloaded in ("OURS", "LIBRARIES"):
        monkeypatch.setattr(models_table, preloaded, ())  # the process is ended while it imports them
    found = models_table.tried("transformers/gpt2 for CausalLM", 0.01)
    assert (found.outcome, found.said) == ("error", "it took more than 0.01 seconds")


@pytest.mark.slow
def test_a_model_is_tried_in_a_process_of_its_own() -> None:
    found = models_table.tried("transformers/bert for SequenceClassification", 250)
    assert (found.outcome, found.plain) == ("captured", "equal"), found.said


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.second(self.first(x).tanh())
        return logits


def test_a_row_says_whether_runs_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time, the oracle has fewer minibatches in flight than the strategy."""
    model = Model("none", "small", Net, lambda: {"x": torch.randn(4, 6), "y": torch.randint(CLASSES, (4,))}, classified)
    assert row(model) == CAPTURED
    stale: Any = oracle.minibatches
    monkeypatch.setattr(oracle, "minibatches", lambda *arguments: stale(*arguments[:-1], 2))
    found = row(model)
    assert (found.outcome, found.plain) == ("captured", "equal")
    assert found.oracle.startswith("differs by up to ")
    assert found.evaluation.startswith("differs by up to ")


# Tied embeddings, grouped key heads; regions without gradients, three uses of one embedding, BatchNorm, towers.
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "gpt2 for CausalLM",
        "llama for CausalLM",
        "phi for CausalLM",
        "t5 for Seq2SeqLM",
        "albert for MaskedLM",
        "resnet for ImageClassification",
        "clip",
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_model_trains_as_it_does_plainly_and_by_the_oracle(name: str) -> None:
    assert row(models()[f"transformers/{name}"]) == CAPTURED
