"""Training in the order of an emulated run, by plain loops: for searching learning rates, as nothing is waited for.

The simulation of the cluster says when each virtual worker has which version, and so in which order updates come to the
servers; gradients are computed in this order, one after the other. With D = 0 the emulated run computes the same, to
rounding; with D > 0 its order differs a little, as real processes are late now and then.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.headline_cluster import Lab, Method, batches, ddp_seconds, in_flight, plans, simulated, waves
from benchmarks.headline_task import BATCH, batch, network
from lightning_hetpipe.rules.waves import dealt_samples


@dataclass(frozen=True)
class Rate:
    """SGD's learning rate and momentum."""

    lr: float
    momentum: float

    def optimizer(self, net: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(net.parameters(), lr=self.lr, momentum=self.momentum)


def loss(net: nn.Module, samples: Sequence[int], seed: int) -> Tensor:
    """Mean cross-entropy of a minibatch."""
    images, labels = batch(samples, seed)
    return F.cross_entropy(net(images), labels)


Point = tuple[float, int, nn.Module]
"""Seconds, samples that all have trained on, and the net."""


def trained(lab: Lab, method: Method, rate: Rate, seed: int, samples: int) -> Iterator[Point]:
    """Train on so many samples; yields at each step of DDP, or end of a wave of virtual worker 0."""
    run = _by_ddp if method.clock_distance is None else _by_waves
    yield from run(lab, method, rate, seed, samples)


def _by_ddp(lab: Lab, method: Method, rate: Rate, seed: int, samples: int) -> Iterator[Point]:
    net, sizes, took = network(seed), batches(lab, method), ddp_seconds(lab, method)
    others = [network(seed) for _ in sizes[1:]]  # with buffers of their own
    optimizer = rate.optimizer(net)
    total = sum(sizes)
    for step in range(samples // total):
        optimizer.zero_grad()
        first = step * total
        for each, size in zip((net, *others), sizes, strict=True):
            for own, shared in zip(each.parameters(), net.parameters(), strict=True):
                own.data = shared.data
            part = loss(each.train(), range(first, first + size), seed) * (size / total)
            gradients = torch.autograd.grad(part, list(each.parameters()))
            for parameter, gradient in zip(net.parameters(), gradients, strict=True):
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
            first += size
        optimizer.step()
        yield (step + 1) * took, first, net


class _Worker:
    """A virtual worker: live weights, those of versions in use, and what it has last synchronised."""

    def __init__(self, rate: Rate, seed: int, samples: Iterator[range], in_flight: int) -> None:
        self.net = network(seed)
        self.weights = list(self.net.parameters())
        self.versions = deque([self.copy()], in_flight)
        self.last = self.copy()
        self.samples = itertools.chain.from_iterable(
            (wave[at : at + BATCH] for at in range(0, len(wave), BATCH)) for wave in samples
        )
        self._optimizer = rate.optimizer(self.net)

    def copy(self) -> list[Tensor]:
        return [weight.detach().clone() for weight in self.weights]

    def step(self, seed: int) -> None:
        """Compute a minibatch's gradient on the version that it uses, and step on the live weights."""
        live = [weight.data for weight in self.weights]
        for weight, value in zip(self.weights, self.versions[0], strict=True):
            weight.data = value
        gradients = torch.autograd.grad(loss(self.net.train(), next(self.samples), seed), self.weights)
        for weight, value, gradient in zip(self.weights, live, gradients, strict=True):
            weight.data, weight.grad = value, gradient
        self._optimizer.step()

    def update(self) -> list[Tensor]:
        return [weight.detach() - last for weight, last in zip(self.weights, self.last, strict=True)]

    def take(self, weights: Sequence[Tensor]) -> None:
        for weight, value in zip(self.weights, weights, strict=True):
            weight.data.copy_(value)
        self.last = self.copy()


def _by_waves(lab: Lab, method: Method, rate: Rate, seed: int, samples: int) -> Iterator[Point]:
    lengths, nm = waves(lab, method), in_flight(lab)
    workers = [
        _Worker(rate, seed, dealt_samples(samples, BATCH, lengths, vw, drop_last=True), nm)
        for vw in range(len(lengths))
    ]
    weights, done = workers[0].copy(), 0
    for seconds, act, vw in order(lab, method, samples // (BATCH * sum(lengths))):
        worker = workers[vw]
        if act != "pull":
            worker.step(seed)
            done += BATCH
        if act == "push":
            for weight, update in zip(weights, worker.update(), strict=True):
                weight += update
            continue
        if act == "pull":
            worker.take(weights)
        worker.versions.append(worker.copy())
        if act == "pull" and vw == 0:
            yield seconds, done, worker.net


def order(lab: Lab, method: Method, count: int) -> Iterator[tuple[float, str, int]]:
    """Events of ``count`` waves in their order, as (seconds, kind, virtual worker).

    "step" is a minibatch and its version; "push" a wave's last one, whose version is there with the "pull".
    """
    lengths, distance = waves(lab, method), method.clock_distance or 0
    run = simulated(lab, method, count)
    published = [worker.published for worker in run.workers]
    events: list[tuple[float, int, int, str]] = []
    for vw, (times, length) in enumerate(zip(published, lengths, strict=True)):
        for index, seconds in enumerate(times):
            wave, place = divmod(index, length)
            if place < length - 1:
                events.append((seconds, 2, vw, "step"))
                continue
            # The simulation does not tell when an update is pushed: one stage time after the minibatch before, but
            # before anybody pulls who waits for it. With D = 0 servers add in the order of virtual workers.
            waiting = [
                own[(wave + distance + 1) * of - 1]
                for own, of in zip(published, lengths, strict=True)
                if wave + distance < count
            ]
            due = times[index - 1] + plans(lab)[vw].bottleneck if distance else seconds
            pushed = min([due, seconds, *waiting]) - 1e-9 * (len(lengths) - vw)
            events.append((pushed, 0, vw, "push"))
            events.append((seconds, 1, vw, "pull"))
    heapq.heapify(events)
    while events:
        seconds, _, vw, act = heapq.heappop(events)
        yield seconds, act, vw
