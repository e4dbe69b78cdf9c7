"""Loaders that are dealt by shares, and those that are not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler, TensorDataset

from lightning_hetpipe.workers.shared_data import InjectedRank, Shares, deal_among

DATA: TensorDataset = TensorDataset(torch.arange(22))
LENGTHS = (1, 3)


def loader_of(vw: int, shuffle: bool, rank: type[int] = InjectedRank, **settings: Any) -> DataLoader[Any]:
    sampler: DistributedSampler[Any] = DistributedSampler(DATA, 2, rank(vw), shuffle=shuffle, seed=5)
    return DataLoader(DATA, 4, sampler=sampler, **settings)


def batches_of(loader: DataLoader[Any]) -> list[list[int]]:
    found = [batch.tolist() for (batch,) in loader]
    assert len(found) == len(loader)
    return found


def test_each_sample_once_in_the_order_of_one_process() -> None:
    one, other = (loader_of(vw, shuffle=False) for vw in range(2))
    for vw, loader in enumerate((one, other)):
        Shares(vw, 2, LENGTHS).deal(loader)
    assert batches_of(one) == [[0, 1, 2, 3]]  # and nothing of the last wave
    assert batches_of(other) == [[4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15], [16, 17, 18, 19], [20, 21]]


def test_another_order_in_every_epoch_and_other_shares_from_then_on() -> None:
    loaders = [loader_of(vw, shuffle=True, drop_last=True) for vw in range(2)]
    shares = [Shares(vw, 2, LENGTHS) for vw in range(2)]
    for one, loader in zip(shares, loaders, strict=True):
        one.deal(loader)
    epochs = []
    for epoch, lengths in enumerate([LENGTHS, (3, 2)]):
        for one, loader in zip(shares, loaders, strict=True):
            loader.batch_sampler.sampler.set_epoch(epoch)  # type: ignore[union-attr]  # as Lightning does
            one.lengths = lengths
        epochs.append([batches_of(loader) for loader in loaders])
    assert [[len(mine) for mine in epoch] for epoch in epochs] == [[1, 4], [3, 2]]
    for epoch, of_epoch in enumerate(epochs):
        order = list(torch.randperm(22, generator=torch.Generator().manual_seed(5 + epoch)).tolist())
        assert {sample for mine in of_epoch for batch in mine for sample in batch} == set(order[:20])
        assert of_epoch[0][0] == order[:4]


def samplers_of(loader: Any) -> list[Any]:
    batch_sampler = getattr(loader, "batch_sampler", None)
    return [getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Own(BatchSampler):
    """A batch sampler of the user's."""


@pytest.mark.parametrize(
    ("loader", "why"),
    [
        (loader_of(0, True, rank=int), "a sampler of one's own"),  # a user's own, which Lightning leaves alone
        (DataLoader(DATA, 4, sampler=RandomSampler(DATA)), "a sampler of one's own"),
        (DataLoader(DATA, batch_sampler=Own(loader_of(0, True).sampler, 4, False)), "a sampler of one's own"),
        (DataLoader(DATA, None, sampler=loader_of(0, True).sampler), "a sampler of one's own"),
        (DataLoader(Stream(), 4), "a dataset that has a length"),
        ([1, 2, 3], "only a DataLoader"),
    ],
)
def test_what_is_not_ours_to_divide(loader: Any, why: str) -> None:
    shares = Shares(0, 2, LENGTHS)
    before = samplers_of(loader)
    shares.deal(loader)
    assert why in (shares.why_not([loader]) or "")
    assert samplers_of(loader) == before
    dealt = loader_of(0, True)
    shares.deal(dealt)
    assert shares.why_not([dealt]) is None
    assert shares.why_not([dealt, loader]) is not None


def test_data_is_dealt_among_those_that_take_part() -> None:
    """As among so many from the start: each sample once, and the same order as of theirs in that epoch."""
    loader = loader_of(1, shuffle=True)
    loader.sampler.set_epoch(3)  # type: ignore[attr-defined]
    before = batches_of(loader)
    deal_among([1], 1, loader)
    alone: DistributedSampler[Any] = DistributedSampler(DATA, 1, 0, seed=5)
    alone.set_epoch(3)
    assert [sample for batch in batches_of(loader) for sample in batch] == list(alone)
    deal_among([0, 1], 1, loader)
    assert batches_of(loader) == before


def test_shares_are_dealt_among_those_that_take_part() -> None:
    """The others' waves keep their lengths."""
    loaders = [loader_of(vw, shuffle=False, rank=InjectedRank) for vw in range(2)]
    for vw, loader in enumerate(loaders):
        Shares(vw, 2, LENGTHS).deal(loader)
    deal_among([1], 1, loaders[1])
    assert [sample for batch in batches_of(loaders[1]) for sample in batch] == list(range(22))


@pytest.mark.parametrize("lengths", [None, LENGTHS])
def test_one_that_has_no_seat_yet_counts_batches_as_the_first_one_that_has(lengths: Sequence[int] | None) -> None:
    loaders = [loader_of(vw, shuffle=False, rank=InjectedRank) for vw in range(2)]
    for vw, loader in enumerate(loaders):
        if lengths is not None:
            Shares(vw, 2, lengths).deal(loader)
        deal_among([0], vw, loader)
    assert batches_of(loaders[1]) == batches_of(loaders[0])
    deal_among([0, 1], 1, loaders[1])
    assert batches_of(loaders[1]) != batches_of(loaders[0])


def test_a_sampler_of_ones_own_goes_on_as_it_is() -> None:
    loader = loader_of(1, False, int)
    before = batches_of(loader)
    deal_among([1], 1, loader)
    assert batches_of(loader) == before


def test_batch_samplers_and_predictions_are_dealt_among_others() -> None:
    """Lightning puts its sampler into the batch sampler there; predictions repeat no sample, however many there are."""

    class Pairs(BatchSampler):
        """One of a user's own, as Lightning makes it anew."""

    injected: DistributedSampler[Any] = DistributedSampler(DATA, 3, InjectedRank(2), shuffle=False)
    loader = DataLoader(DATA, batch_sampler=Pairs(injected, 2, drop_last=False))
    deal_among([0, 2], 2, loader)
    assert [sample for batch in batches_of(loader) for sample in batch] == list(range(1, 22, 2))
    few = TensorDataset(torch.arange(5))
    for index, vw in enumerate([0, 2]):
        unrepeated = UnrepeatedDistributedSampler(few, 3, InjectedRank(vw), shuffle=False)
        predicts = DataLoader(few, batch_sampler=BatchSampler(unrepeated, 2, drop_last=False))
        deal_among([0, 2], vw, predicts)
        assert [sample for batch in batches_of(predicts) for sample in batch] == list(range(index, 5, 2))
