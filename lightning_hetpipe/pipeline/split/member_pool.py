"""Threads of a group: each member's part of a region runs in its own thread, on its own device and stream.

The calling thread runs the home member's part. It waits for all other members, whatever fails.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_hetpipe.pipeline.graph_layer import set_here
from lightning_hetpipe.pipeline.streams import Stream, StreamEvent, Streams
from lightning_hetpipe.pipeline.threads import Worker
from lightning_hetpipe.pipeline.values import nested_tensors
from lightning_hetpipe.rules.channel_layouts import ChannelCounts

Job = Callable[[], Any]


@dataclass(frozen=True)
class DeviceGroup:
    """The ``devices`` of a stage, one for each member. ``home`` is the member that holds the unsplit weights. The
    stage's own thread is its thread. ``names`` are the devices' names for messages, by default torch's."""

    devices: Sequence[torch.device]
    counts: ChannelCounts
    home: int = 0
    names: Sequence[str] = ()

    def __str__(self) -> str:
        total, names = sum(self.counts.shares), self.names or self.devices
        each = [f"{name} {share / total:.0%}" for name, share in zip(names, self.counts.shares, strict=True)]
        return f"{', '.join(each)}, and its weights are on the {_ORDINALS.get(self.home, f'{self.home + 1}th')}"


_ORDINALS = {0: "first", 1: "second", 2: "third"}

_Posted = tuple[Job, StreamEvent | None, Sequence[Tensor]]
"""A job for a member, the event behind which its arguments are computed, and their tensors of other streams."""


class MemberPool:
    """The members of ``group``, from :meth:`start` to :meth:`close`. Each member has one of ``streams``, but the home
    has the stage's. With ``in_turn``, members run one after the other, because they may compile."""

    def __init__(
        self,
        name: str,
        group: DeviceGroup,
        torch_threads: int,
        streams: Streams | None = None,
        home_stream: Stream | None = None,
    ) -> None:
        self.group = group
        self.in_turn = False
        self._name, self._torch_threads, self._streams = name, torch_threads, streams or Streams()
        self._home_stream = home_stream or Stream()
        self._results: list[queue.SimpleQueue[tuple[Any, BaseException | None, StreamEvent | None]]] = []
        self._workers: list[Worker[_Posted] | None] = []

    def start(self) -> None:
        for member, device in enumerate(self.group.devices):
            self._results.append(queue.SimpleQueue())
            self._workers.append(None)
            if member != self.group.home:
                stream, name = self._streams.on(device), f"{self._name}-member-{member}"
                entering = partial(_enter, stream, device)
                self._workers[member] = Worker(name, self._handler(member, stream), self._torch_threads, entering)

    def run(self, jobs: Sequence[Job | None], uses: Iterable[Tensor] = ()) -> list[Any]:
        """Run the job of each member, or none, concurrently, and return their results. Jobs use the tensors ``uses`` of
        this thread's stream. If members fail, the first one's error is raised after all ended."""
        uses, home = [*uses], self.group.home
        event = self._home_stream.record() if uses else None
        found: list[Any] = [None] * len(jobs)
        errors: list[BaseException | None] = [None] * len(jobs)
        asked = {member: job for member, job in enumerate(jobs) if job is not None}
        for together in [[member] for member in asked] if self.in_turn else [[*asked]]:
            for member in together:
                if (worker := self._workers[member]) is not None:
                    worker.put((asked[member], event, uses))
            if home in together:
                try:
                    found[home] = asked[home]()
                except BaseException as error:
                    errors[home] = error
            for member in together:
                if member != home:
                    found[member], errors[member], after = self._results[member].get()
                    self._home_stream.join(after, nested_tensors(found[member]))
        if (first := next((error for error in errors if error is not None), None)) is not None:
            raise first
        return found

    def close(self) -> None:
        for worker in self._workers:
            if worker is not None:
                worker.close()

    def join(self, seconds: float) -> bool:
        """Wait for the end of the threads. Return False if a thread has not ended within ``seconds``."""
        return all(worker.join(seconds) for worker in self._workers if worker is not None)

    def _handler(self, member: int, stream: Stream) -> Callable[[_Posted], None]:
        results = self._results[member]

        def handle(posted: _Posted) -> None:
            try:
                job, event, uses = posted
                stream.join(event, uses)
                results.put((job(), None, stream.record()))
            except BaseException as error:
                results.put((None, error, None))

        return handle


def _enter(stream: Stream, device: torch.device) -> None:
    stream.enter()
    set_here(device)
