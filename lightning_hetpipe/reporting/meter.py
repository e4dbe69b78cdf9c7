"""Counts samples and training time, for metrics and reports."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter  # our own name, as suites script what `time.perf_counter` gives to Lightning

from torch import Tensor

from lightning_hetpipe.torch_private.tensors import pytree


class Meter:
    """Samples, minibatches and seconds of training. Time counts between :meth:`start` and :meth:`stop` only."""

    def __init__(self, stages: int) -> None:
        self.samples = 0
        self.minibatches = 0
        self._started: float | None = None
        self._before = 0.0  # seconds that counted before the last start
        self._until = 0.0  # seconds, samples and busy times at the last interval's end
        self._samples_until = 0
        self._busy_until = [0.0] * stages
        self._flown = 0.0  # seconds that the minibatches of this interval were in flight

    @property
    def seconds(self) -> float:
        running = 0.0 if self._started is None else perf_counter() - self._started
        return self._before + running

    def start(self) -> None:
        self._started = perf_counter()

    def stop(self) -> None:
        self._before, self._started = self.seconds, None

    def count(self, batch: object, seconds: float = 0.0) -> None:
        """A minibatch is done, which computed ``batch`` and was in flight for ``seconds``."""
        self.samples += batch_size(batch)
        self.minibatches += 1
        self._flown += seconds

    def interval(self, busy_seconds: Sequence[float]) -> dict[str, float]:
        """The metrics over the time since the last call, by their names on a logger.

        A minibatch counts where it ends, so that few of them make "in_flight", their mean number, a rough figure.

        Args:
            busy_seconds: For each stage, the seconds in which it has computed so far.
        """
        seconds = max(self.seconds - self._until, 1e-9)
        metrics = {"hetpipe/samples_per_second": (self.samples - self._samples_until) / seconds}
        for stage, (busy, before) in enumerate(zip(busy_seconds, self._busy_until, strict=True)):
            metrics[f"hetpipe/stage_{stage}/busy"] = min(1.0, (busy - before) / seconds)
        # Little's law: what arrives per second, times how long each stays, is how many are there.
        metrics["hetpipe/in_flight"] = self._flown / seconds
        self._until += seconds
        self._flown = 0.0
        self._samples_until, self._busy_until = self.samples, list(busy_seconds)
        return metrics


def batch_size(batch: object) -> int:
    """The first dimension of the first tensor in ``batch``; 1 where there is none."""
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.ndim:
            return leaf.shape[0]
    return 1
