"""Shares of the data for unequal virtual workers, in proportion to the lengths of their waves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import lightning as L
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler

from lightning_hetpipe.rules.waves import dealt_samples


class InjectedRank(int):
    """Rank of a virtual worker in samplers that Lightning has made. A user's sampler has a plain number."""


class LongInterval(int):
    """``val_check_interval`` that may be longer than an epoch, because another virtual worker may have more
    minibatches. Lightning refuses intervals that are greater than the number of minibatches, and this interval never
    is."""

    def __gt__(self, other: object) -> bool:
        return False

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (int(self),)


def let_be_long(trainer: L.Trainer) -> None:
    """Make Lightning accept a ``val_check_interval`` of ``trainer`` that is longer than an epoch here."""
    if type(trainer.val_check_interval) is int:
        trainer.val_check_interval = LongInterval(trainer.val_check_interval)


class Shares:
    """Division of the data among ``size`` virtual workers: each sample goes to one virtual worker, without padding.

    Attributes:
        lengths: Proportions of the shares. If ``decided``, the lengths W_v of waves, else waves are of equal length.
        adapts: True if the lengths are decided anew after each epoch.
    """

    def __init__(self, vw: int, size: int, lengths: Sequence[int] | None = None, adapts: bool = False) -> None:
        self.vw = vw
        self.lengths = tuple(lengths or [1] * size)
        self.decided = lengths is not None
        self.adapts = adapts
        self.seats: Sequence[int] = range(size)
        """Virtual workers that take part. Other virtual workers have no share."""

    def __str__(self) -> str:
        return f"{'auto, now ' if self.adapts else ''}{list(self.lengths)}"

    def decide(self, lengths: Sequence[int]) -> None:
        """Set W_v."""
        self.lengths, self.decided = tuple(lengths), True

    def deal(self, loader: Any) -> None:
        """Make ``loader`` take its samples by shares, if Lightning has made its sampler."""
        if not isinstance(loader, DataLoader) or type(loader.sampler) is not DistributedSampler:
            return
        batches: Any = loader.batch_sampler
        if isinstance(loader.sampler.rank, InjectedRank) and type(batches) is BatchSampler:
            batches.sampler = SharedSampler(self, loader.sampler, batches.batch_size, batches.drop_last)

    def why_not(self, loaders: Sequence[Any]) -> str | None:
        """Return the reason why one of ``loaders`` does not follow the shares, as text, or None."""
        for loader in loaders:
            if isinstance(getattr(loader, "dataset", None), IterableDataset) or not isinstance(loader, DataLoader):
                return "only a DataLoader over a dataset that has a length can be divided otherwise"
            if not isinstance(getattr(loader.batch_sampler, "sampler", None), SharedSampler):
                return "a sampler of one's own is not divided otherwise"
        return None


class SharedSampler(Sampler[int]):
    """Samples of one virtual worker by ``shares``, in the order of a ``DistributedSampler`` of one process.
    ``injected`` is Lightning's sampler for this virtual worker."""

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
    """Make ``loader`` give virtual worker ``vw`` its own samples among the virtual workers ``seats``. Leave a loader
    with a user's sampler as it is."""
    sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", getattr(loader, "sampler", None))
    if isinstance(sampler, SharedSampler):
        sampler.shares.seats = seats
    elif isinstance(sampler, DistributedSampler) and isinstance(sampler.rank, InjectedRank):
        epoch, rank = sampler.epoch, InjectedRank(_place(seats, vw))
        last = {"drop_last": sampler.drop_last}
        # The base class's method, because Lightning's wrapper of a user's sampler has this as its dataset now.
        unrepeated = isinstance(sampler, UnrepeatedDistributedSampler)  # for predictions
        base: Any = UnrepeatedDistributedSampler if unrepeated else DistributedSampler
        base.__init__(sampler, sampler.dataset, len(seats), rank, sampler.shuffle, sampler.seed, **last)
        sampler.set_epoch(epoch)


def _place(seats: Sequence[int], vw: int) -> int:
    """Return the place of ``vw`` among ``seats``. Without a seat, it counts as the first: a learning rate schedule
    needs the count with which the other virtual workers began."""
    return seats.index(vw) if vw in seats else 0
