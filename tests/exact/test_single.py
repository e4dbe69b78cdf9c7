"""Pieces that are one layer of torch.nn's own run as they are: recurrent ones on any length, packed sequences too."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader, Dataset

from tests.exact.pipelines import even
from tests.exact.running import assert_equal, expect, fit
from tests.oracle import Batch, Outputs
from tests.support.marks import slow_except
from tests.support.models import ADAMW, CLASSES, WORDS, Learner


class Tags(Learner):
    """Tags words of sentences whose lengths vary."""

    def __init__(self, packed: bool) -> None:
        super().__init__(ADAMW)
        self.words, self.lstm, self.out = nn.Embedding(WORDS, 6), nn.LSTM(6, 8, batch_first=True), nn.Linear(8, CLASSES)
        self.packed = packed

    def compute(self, batch: Batch) -> Outputs:
        ids, tags = batch
        x = self.words(ids)
        if self.packed:
            lengths = torch.tensor([ids.shape[1], *[1] * (len(ids) - 1)])
            hidden, _ = self.lstm(pack_padded_sequence(x, lengths, batch_first=True))
            hidden, _ = pad_packed_sequence(hidden, batch_first=True)
        else:
            hidden, _ = self.lstm(x)
        return {"loss": F.cross_entropy(self.out(hidden).flatten(0, 1), tags.flatten())}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("in_flight", slow_except([1, 3], 3))
def test_recurrent_layers_on_many_lengths(in_flight: int, packed: bool) -> None:
    chance = torch.Generator().manual_seed(5)
    sizes = [(2, length) for length in (5, 3, 8, 6, 2, 9, 4, 7, 10, 11, 12)]
    batches = [
        (torch.randint(WORDS, size, generator=chance), torch.randint(CLASSES, size, generator=chance)) for size in sizes
    ]
    loader: Any = DataLoader(cast(Dataset[Any], batches), batch_size=None)
    task = Tags(packed)
    assert_equal(expect(task, [batches] * 2, in_flight), fit(task, loader, strategy=even(3, 3, in_flight)))
