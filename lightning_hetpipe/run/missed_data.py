"""Missed data: the data on which nobody trains, because its virtual worker was lost in the middle of an epoch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import lightning as L
from torch.utils.data import DataLoader

from lightning_hetpipe.lightning_private import train_loaders


class EpochShare(NamedTuple):
    """Share of virtual worker ``vw`` of an epoch. None is unknown, as with a user's batch sampler. ``batches`` are
    minibatches of ``batch_size`` samples each but the last one, ``samples`` all samples of the loader."""

    vw: int
    batches: int | None = None
    batch_size: int | None = None
    samples: int | None = None

    @classmethod
    def of(cls, trainer: L.Trainer) -> EpochShare:
        """Return the share of the virtual worker of ``trainer`` in the epoch that begins or continues."""
        vw, most, loaders = trainer.global_rank, trainer.num_training_batches, train_loaders(trainer)
        batches = None if most == math.inf else int(most)
        if batches is None or len(loaders) != 1 or not isinstance(loaders[0], DataLoader):
            return cls(vw, batches)
        sampler: Any = loaders[0].sampler
        try:
            return cls(vw, batches, loaders[0].batch_size, len(sampler))
        except TypeError:  # that of an iterable dataset, which may tell its number of batches
            return cls(vw, batches)

    def samples_of(self, minibatches: int) -> int | None:
        """Return the samples of the first ``minibatches``, or None if unknown."""
        if self.batch_size is None or self.samples is None:
            return None
        return min(minibatches * self.batch_size, self.samples)


class MissedData:
    """A count of the data on which lost virtual workers have not trained. A lost virtual worker has trained on its
    waves since the epoch's last cut at which all came to one minibatch, or since the epoch's beginning."""

    def __init__(self) -> None:
        self._shares: dict[int, EpochShare] = {}
        self._marks: list[tuple[int, int]] = []

    def begin(self, shares: Sequence[Sequence[Any]]) -> None:
        """Begin or continue an epoch with the ``shares`` of the virtual workers that are there. A virtual worker that
        was dealt data and is gone by now keeps its share of the epoch before."""
        self._shares |= {share[0]: EpochShare(*share) for share in shares}
        self._marks = []

    def mark(self, clock: int, minibatch: int) -> None:
        """Record that all present virtual workers are at ``clock``, after minibatch ``minibatch`` of the
        epoch on virtual worker 0."""
        self._marks.append((clock, minibatch))

    def report(self, vw: int, clock: int, lengths: Sequence[int], epoch: int) -> tuple[str, int]:
        """Return a sentence on the data that ``vw``, lost at ``clock``, missed in ``epoch``, and its samples, or 0.
        ``lengths`` are W_v of each virtual worker. The sentence is empty if nothing is missed."""
        share, first = self._shares.get(vw, EpochShare(vw)), self._marks[0][0]
        since, minibatch = next((mark for mark in reversed(self._marks) if mark[0] <= clock), self._marks[0])
        done = (minibatch * lengths[vw]) // lengths[0] + max(0, clock - since) * lengths[vw]
        waves = max(0, clock - first)
        lost = f"virtual worker {vw} was lost after {waves} wave{'s' * (waves != 1)} of epoch {epoch}"
        if share.batches is None:
            return f"{lost}: it has trained on {done} minibatches of its data, and nobody knows how many it missed", 0
        done = min(done, share.batches)
        if done == share.batches:
            return "", 0
        whole, trained = share.samples_of(share.batches), share.samples_of(done)
        if whole is None or trained is None:
            missed = share.batches - done
            return f"{lost}: {missed} of its {share.batches} minibatches of that epoch were not trained on", 0
        return f"{lost}: {whole - trained} of its {whole} samples of that epoch were not trained on", whole - trained
