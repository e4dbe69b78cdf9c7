"""Data that nobody trains on, of the share of a virtual worker that was lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_hetpipe.run.together import EpochShare, MissedData
from tests.support.trainers import quiet_trainer


def missed(
    share: Sequence[Any], clock: int, *marks: tuple[int, int], lengths: Sequence[int] = (2, 2)
) -> tuple[str, int]:
    """Report on virtual worker 1, lost at ``clock`` in an epoch that began at clock 10, with cuts at ``marks``."""
    data = MissedData()
    data.begin([(0, 5, 4, 20), share])
    for mark in marks or [(10, 0)]:
        data.mark(*mark)
    return data.report(1, clock, lengths, 3)


def test_samples_after_the_last_wave() -> None:
    assert missed((1, 5, 4, 18), 11) == (
        "virtual worker 1 was lost after 1 wave of epoch 3: 10 of its 18 samples of that epoch were not trained on",
        10,
    )


def test_nothing_is_missed_by_one_that_was_through() -> None:
    assert missed((1, 5, 4, 18), 13) == ("", 0)


def test_a_short_wave_before_a_cut_counts_as_what_it_is() -> None:
    """The cut is after minibatch 3, with the second wave."""
    assert missed((1, 5, 4, 20), 12, (10, 0), (12, 3))[1] == 8
    assert missed((1, 5, 4, 20), 11, (10, 0), (12, 3))[1] == 12


def test_an_epoch_that_goes_on_in_the_middle() -> None:
    assert missed((1, 5, 4, 20), 11, (10, 2))[1] == 4


def test_shares_of_their_own() -> None:
    """The epoch goes on after one wave, of two minibatches here and four there."""
    assert missed((1, 12, 4, 48), 11, (10, 2), lengths=(2, 4))[1] == 16


def test_one_that_was_gone_when_the_epoch_began() -> None:
    data = MissedData()
    data.begin([(0, 5, 4, 20), (1, 5, 4, 20)])
    data.mark(0, 0)
    data.begin([(0, 5, 4, 20)])
    data.mark(3, 0)
    assert data.report(1, 3, (2, 2), 1)[1] == 20


def test_where_samples_cannot_be_counted() -> None:
    said, samples = missed((1, 5, None, None), 11)
    assert said.endswith("1 wave of epoch 3: 3 of its 5 minibatches of that epoch were not trained on")
    assert samples == 0
    said, samples = missed((1, None, None, None), 12)
    assert said.endswith("has trained on 4 minibatches of its data, and nobody knows how many it missed")
    assert samples == 0


class Stream(IterableDataset[Any]):
    """Ten samples, whose number it does not tell."""

    def __iter__(self) -> Any:
        return iter(torch.zeros(10, 6))


class Shares(L.Callback):
    """Keeps the shares of the epochs."""

    def __init__(self) -> None:
        self.seen: list[EpochShare] = []

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.seen.append(EpochShare.of(trainer))


class Idle(L.LightningModule):
    """Trains nothing."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        return None

    def configure_optimizers(self) -> None:
        return None


TEN: Any = range(10)
LOADERS: dict[str, tuple[Any, dict[str, Any], tuple[Any, ...]]] = {
    "last batch smaller": (DataLoader(TEN, 4), {}, (0, 3, 4, 10)),
    "last batch dropped": (DataLoader(TEN, 4, drop_last=True), {}, (0, 2, 4, 10)),
    "limited": (DataLoader(TEN, 4), {"limit_train_batches": 2}, (0, 2, 4, 10)),
    "stream": (DataLoader(Stream(), 4), {}, (0, None, None, None)),
    "several": ([DataLoader(TEN, 4), DataLoader(TEN, 4)], {}, (0, 3, None, None)),
    "batches of one's own": (DataLoader(TEN, batch_sampler=[[0, 1], [2]]), {}, (0, 2, None, None)),
}


@pytest.mark.parametrize("name", LOADERS)
def test_the_share_of_a_trainer(name: str) -> None:
    loader, settings, told = LOADERS[name]
    shares = Shares()

    quiet_trainer(callbacks=[shares], **settings).fit(Idle(), loader)
    (seen,) = shares.seen
    assert seen[:2] == told[:2]
    assert seen[2:] == told[2:] if told[2] is not None else None in seen[2:]
