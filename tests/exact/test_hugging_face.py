"""Some of docs/captured-models.md: tied embeddings, three uses of one, regions without gradients, BatchNorm, towers."""

from __future__ import annotations

import pytest

from benchmarks.hugging_face import row


@pytest.mark.parametrize(
    "name",
    ["GPT2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("Phi", "T5", "ALBERT", "ResNet", "CLIP"))],
)
def test_a_model_of_hugging_faces_trains_as_it_does_plainly(name: str) -> None:
    assert row(name).endswith("| equal | equal |")
