"""Shares of the data that unequal virtual workers train on, in proportion to the lengths of their waves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import lightning as L
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler

from lightning_hetpipe.rules.waves import dealt_samples

Setting = Literal["equal", "auto"] | tuple[int, ...]


class InjectedRank(int):
    """Rank of a virtual worker, in samplers that Lightning has made: one of the user's has a plain number."""


class LongInterval(int):
    """``val_check_interval`` that may be longer than an epoch, as where it is virtual worker 0's, on another one with
    fewer minibatches: Lightning refuses intervals that are larger than their number, and this one never is."""

    def __gt__(self, other: object) -> bool:
        return False

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (int(self),)


def let_be_long(trainer: L.Trainer) -> None:
    """Have Lightning take a ``val_check_interval`` of ``trainer`` that is longer than an epoch here."""
    if type(trainer.val_check_interval) is int:
        trainer.val_check_interval = LongInterval(trainer.val_check_interval)


class Shares:
    """Division of the data among virtual workers: each sample goes to one, without padding.

    Attributes:
        lengths: Proportion of the shares; the lengths of waves once ``decided``.
        decided: True if ``lengths`` are W_v; else waves are of equal length.
        adapts: True if they are decided anew after each epoch.

    Args:
        vw: Number of this virtual worker.
        size: N.
        lengths: W_v, if they are known.
        adapts: As above.
    """

    def __init__(self, vw: int, size: int, lengths: Sequence[int] | None = None, adapts: bool = False) -> None:
        self.vw = vw
        self.lengths = tuple(lengths or [1] * size)
        self.decided = lengths is not None
        self.adapts = adapts
        self.seats: Sequence[int] = range(size)
        """The virtual workers that take part; others have no share."""

    def __str__(self) -> str:
        return f"{'auto, now ' if self.adapts else ''}{list(self.lengths)}"

    def decide(self, lengths: Sequence[int]) -> None:
        """Set W_v."""
        self.lengths, self.decided = tuple(lengths), True

    def deal(self, loader: Any) -> None:
        """Have ``loader`` take its samples by shares, if Lightning has made its sampler."""
        if not isinstance(loader, DataLoader) or type(loader.sampler) is not DistributedSampler:
            return
        batches: Any = loader.batch_sampler
        if isinstance(loader.sampler.rank, InjectedRank) and type(batches) is BatchSampler:
            batches.sampler = SharedSampler(self, loader.sampler, batches.batch_size, batches.drop_last)

    def why_not(self, loaders: Sequence[Any]) -> str | None:
        """Reason why one of ``loaders`` is not dealt by shares, for people; None if all are."""
        for loader in loaders:
            if isinstance(getattr(loader, "dataset", None), IterableDataset) or not isinstance(loader, DataLoader):
                return "only a DataLoader over a dataset that has a length can be divided otherwise"
            if not isinstance(getattr(loader.batch_sampler, "sampler", None), SharedSampler):
                return "a sampler of one's own is not divided otherwise"
        return None


class SharedSampler(Sampler[int]):
    """The samples of one virtual worker, in the order that a ``DistributedSampler`` of one process would give.

    Args:
        shares: Says which.
        injected: Lightning's sampler for this virtual worker.
        batch_size, drop_last: The loader's.
    """

    def __init__(self, shares: Shares, injected: Any, batch_size: int, drop_last: bool) -> None:
        self.shares = shares
        self._whole: DistributedSampler[Any] = DistributedSampler(
            injected.dataset, num_replicas=1, rank=0, shuffle=injected.shuffle, seed=injected.seed
        )
        self._batch_size = batch_size
        self._drop_last = drop_last

    def set_epoch(self, epoch: int) -> None:
        self._whole.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        order = list(self._whole)
        for places in self._dealt():
            yield from order[places.start : places.stop]

    def __len__(self) -> int:
        return sum(map(len, self._dealt()))

    def _dealt(self) -> Iterator[range]:
        shares, samples = self.shares, len(self._whole)
        lengths = [shares.lengths[vw] for vw in shares.seats]
        return dealt_samples(samples, self._batch_size, lengths, _place(shares.seats, shares.vw), self._drop_last)


def deal_among(seats: Sequence[int], vw: int, loader: Any) -> None:
    """Have ``loader`` give virtual worker ``vw`` the samples that are its own where ``seats`` take part.

    A loader whose sampler the user has made stays as it is.
    """
    sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", getattr(loader, "sampler", None))
    if isinstance(sampler, SharedSampler):
        sampler.shares.seats = seats
    elif isinstance(sampler, DistributedSampler) and isinstance(sampler.rank, InjectedRank):
        epoch, rank = sampler.epoch, InjectedRank(_place(seats, vw))
        last = {"drop_last": sampler.drop_last}
        # Of the base class: Lightning's wrapper of a user's sampler has that as its dataset by now.
        unrepeated = isinstance(sampler, UnrepeatedDistributedSampler)  # of predictions
        base: Any = UnrepeatedDistributedSampler if unrepeated else DistributedSampler
        base.__init__(sampler, sampler.dataset, len(seats), rank, sampler.shuffle, sampler.seed, **last)
        sampler.set_epoch(epoch)


def _place(seats: Sequence[int], vw: int) -> int:
    """Place of ``vw`` among ``seats``; the first for one that is still to get a seat, and counts what the others have
    counted when they began, as for a schedule of learning rates."""
    return seats.index(vw) if vw in seats else 0
