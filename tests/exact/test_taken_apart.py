"""Models that cannot be captured as a whole are taken apart, and train as the oracle says, bit for bit."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch

from tests.exact.pipelines import Pinned, delayed
from tests.exact.running import assert_equal, expect, fit
from tests.support.marks import quick
from tests.support.models import vectors
from tests.support.refused_models import Checks


def made(blocks: int = 3, dropout: float = 0.0) -> Checks:
    torch.manual_seed(7)
    return Checks(blocks, dropout)


@quick("3-0.3")
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("in_flight", [1, 3])
def test_against_the_oracle(in_flight: int, dropout: float) -> None:
    loader = vectors(22, 4)
    expected = expect(made(dropout=dropout), loader, in_flight)
    record = fit(made(dropout=dropout), loader, [Watches()], strategy=delayed(Pinned([0, 7], in_flight), 1))
    assert_equal(expected, record)


class Watches(L.Callback):
    """Sees after each step the attribute that the model has set in that minibatch (law L9)."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        assert pl_module.model.largest == outputs["largest"].item()


def test_against_the_plain_trainer() -> None:
    loader = vectors(24, 4)
    plain, ours = made(), made()
    fit(plain, loader)
    record = fit(ours, loader, strategy=Pinned([0, 7], 1))
    assert_equal(expect(made(), loader, 1), record)
    for one, other in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(one, other)
    assert plain.model.largest == ours.model.largest
