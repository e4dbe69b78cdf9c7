"""Finds races between streams, without a GPU: by streams that note who has seen what, and a mode that sees operators.

On a real device a stream computes what its thread has given it later, in order; other streams come before or after only
as events say. Here all is computed at once, but each stream has a vector clock: an operator may read what another
stream wrote, and write what another stream read, only if it has seen that moment by way of events. What it reads or
writes of memory that another stream has made must have been named in ``join``, too: as soon as nobody holds it any
more, it would else be given away. What was made unseen is that of user code and Lightning's thread, as layers' copies
are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_hetpipe.pipeline.streams import Stream, StreamEvent, Streams, UserStream
from lightning_hetpipe.pipeline.user.minibatch import Minibatch, current
from lightning_hetpipe.torch_private.graphs import arguments_of
from lightning_hetpipe.torch_private.modes import ThreadDispatchMode
from lightning_hetpipe.torch_private.tensors import pytree

Moments = dict[int, int]
"""For each stream, how many of its operators were seen."""


class StreamRaces:
    """The streams of one engine, and the races between them.

    Args:
        broken: What joins leave out: "events" or "tensors", of those whose ``what`` it says yes to.
        host_inputs: Pieces are given what lies on the host, so that no stream's event comes with it.
        slow: Nothing is computed when somebody asks.

    Attributes:
        waits: How often a thread waited for an event.
    """

    def __init__(
        self,
        broken: Callable[[str, FakeStream], bool] = lambda what, stream: False,
        host_inputs: bool = False,
        slow: bool = False,
    ) -> None:
        self.host_inputs, self.slow = host_inputs, slow
        self.waits = 0
        self.called: set[Minibatch] = set()
        self.races: list[str] = []
        self.broken = broken
        self.lock = threading.Lock()
        self.outside = FakeStream(self, 0)
        self._streams = [self.outside]
        self._made: dict[int, int] = {}  # by which stream
        self._written: dict[int, tuple[int, int]] = {}
        self._read: dict[int, Moments] = {}
        self._kept: list[torch.UntypedStorage] = []  # so that no memory is used twice
        self._thread = threading.local()

    def streams(self) -> Streams:
        return Streams(self._on, self.outside)

    def _on(self, device: torch.device) -> FakeStream:
        stream = FakeStream(self, len(self._streams))
        self._streams.append(stream)
        return stream

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within it, what this thread computes is looked at."""
        with _Mode(self):
            yield

    @property
    def here(self) -> FakeStream:
        stream: FakeStream = getattr(self._thread, "stream", self.outside)
        return stream

    def enter(self, stream: FakeStream) -> None:
        self._thread.stream = stream
        _Mode(self).__enter__()

    def computed(self, name: str, read: Iterable[Tensor], written: Iterable[Tensor], made: Iterable[Tensor]) -> None:
        """This thread has run an operator."""
        with self.lock:
            stream = self.here
            stream.seen[stream.number] = now = stream.seen[stream.number] + 1
            for tensor in read:
                self._check(stream, name, tensor, "reads", [self._written.get(_key(tensor))])
                self._read.setdefault(_key(tensor), {})[stream.number] = now
            for tensor in written:
                key = _key(tensor)
                self._check(stream, name, tensor, "writes", [self._written.get(key), *self._read.get(key, {}).items()])
            for tensor in made:
                self._made[_key(tensor)] = stream.number
            for tensor in [*written, *made]:
                self._kept.append(tensor.untyped_storage())
                self._written[_key(tensor)] = stream.number, now
                self._read.pop(_key(tensor), None)

    def _check(
        self, stream: FakeStream, name: str, tensor: Tensor, does: str, moments: list[tuple[int, int] | None]
    ) -> None:
        for moment in moments:
            if moment is None or moment[0] == stream.number:
                continue
            if stream.seen.get(moment[0], 0) < moment[1]:
                self.races.append(f"{name} of stream {stream.number} {does} what stream {moment[0]} may still compute")
        owner = self._made.get(_key(tensor), 0)
        if owner != stream.number and _key(tensor) not in stream.named:
            self.races.append(
                f"{name} of stream {stream.number} {does} memory of stream {owner} that may be given away"
            )


class FakeStream(Stream, UserStream):
    """Stream ``number`` of ``streams``; 0 is that of user code and Lightning's thread."""

    def __init__(self, streams: StreamRaces, number: int) -> None:
        self.number = number
        self.seen: Moments = {number: 0}
        self.named: set[int] = set()
        self._streams = streams
        self._busy = 0.0

    def enter(self) -> None:
        self._streams.enter(self)

    def record(self, devices: Iterable[torch.device] = ()) -> FakeEvent | None:
        if not (self.number or list(devices)):  # user code has streams on several devices
            return None
        flight = current()
        if self._streams.host_inputs and flight is not None and flight not in self._streams.called:
            self._streams.called.add(flight)
            return None
        with self._streams.lock:
            return FakeEvent(self._streams, dict(self.seen))

    def join(
        self, event: StreamEvent | None, tensors: Iterable[Tensor] = (), devices: Iterable[torch.device] = ()
    ) -> None:
        if not self._streams.broken("tensors", self):
            self.named |= {_key(tensor) for tensor in tensors}
        if isinstance(event, FakeEvent) and not self._streams.broken("events", self):
            self.see(event.moments)

    def see(self, moments: Moments) -> None:
        with self._streams.lock:
            for stream, moment in moments.items():
                self.seen[stream] = max(moment, self.seen.get(stream, 0))

    def now(self) -> None:
        return None

    def spent(self, since: object) -> None:
        self._busy += 1

    def busy_seconds(self) -> float:
        return self._busy

    def synchronize(self) -> None:
        self._streams.here.see(self.seen)


class FakeEvent:
    """Work that a stream had seen at ``moments``."""

    def __init__(self, streams: StreamRaces, moments: Moments) -> None:
        self.moments = moments
        self._streams = streams

    def query(self) -> bool:
        return not self._streams.slow

    def synchronize(self) -> None:
        """Whoever waits here gives its stream what follows only afterwards."""
        self._streams.waits += 1
        self._streams.here.see(self.moments)


class _Mode(ThreadDispatchMode):
    def __init__(self, streams: StreamRaces) -> None:
        super().__init__()
        self._streams = streams

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = _tensors((args, kwargs))
        changes = [value for (name, _, changed), value in zip(arguments_of(func), args, strict=False) if changed] + [
            kwargs[name] for name, _, changed in arguments_of(func) if changed and name in kwargs
        ]
        written = _tensors(changes)
        made = [tensor for tensor in _tensors(result) if not any(_key(tensor) == _key(other) for other in given)]
        is_view = bool(_tensors(result)) and not made and not written
        read = [] if is_view else [tensor for tensor in given if not any(tensor is other for other in written)]
        self._streams.computed(str(func), read, written, made)
        return result


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.numel()]


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
