"""Streams: the order in which an accelerator does the work of several threads.

A thread that runs an operator on an accelerator goes on long before it is computed. Work that one thread gives the
device in sequence is a *stream*. Each stage has a stream of its own, so that several stages overlap on one device, and
copies overlap with computing. User code and Lightning's thread share the device's default stream, as in a plain run.

If a tensor goes from one stream to another, the first leaves a :class:`StreamEvent`, for which the other stream waits.
A device waits, not a thread. So threads run ahead of their devices, by at most Nm + 1 minibatches: when Lightning's
thread finishes minibatch p, it waits for minibatch p - 1. Events stand:

- at a piece's inputs and outputs, and the gradients of both: from user code to a stage, from stage to stage, and back,
- at a version that Lightning's thread has published, for the stage that reads it,
- at the end of each backward, for Lightning's thread.

Work on the host has no stream. A stage on the CPU waits for an accelerator's values. Copies between the host and an
accelerator go through pinned memory, which the device reads and writes while threads go on.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from lightning_hetpipe.accelerator import accelerates
from lightning_hetpipe.pipeline.threads import ReadersWriterLock
from lightning_hetpipe.torch_private.tensors import strided_parts

if TYPE_CHECKING:
    from lightning_hetpipe.pipeline.stage import BeforePass, Stage


class StreamEvent(Protocol):
    """A place in some streams, behind work that was given to the devices."""

    def query(self) -> bool:
        """Return True if this work is computed."""

    def synchronize(self) -> None:
        """Wait until this work is computed."""


class Stream:
    """Stream of a stage on a CPU, where a returned operator is computed, and base of the streams of all stages."""

    def __init__(self) -> None:
        self._busy = 0.0
        self._copy_streams = _CopyStreams()

    def enter(self) -> None:
        """Enter the stream. Called first in the stage's thread."""

    def record(self, devices: Iterable[torch.device] = ()) -> StreamEvent | None:
        """Return an event behind all work that this thread has given to its own device and to ``devices``, or None if
        it is computed."""
        streams = self._copy_streams.on(devices)
        return DeviceEvents(streams) if streams else None

    def join(
        self, event: StreamEvent | None, tensors: Iterable[Tensor] = (), devices: Iterable[torch.device] = ()
    ) -> None:
        """Order all later work, which uses ``tensors`` of another stream, after ``event``. User code's streams on
        ``devices`` wait for it as well."""
        if event is not None:
            event.synchronize()
            self._copy_streams.of(tensors)

    def now(self) -> Any:
        """Return a moment in this thread's work for the device, for :meth:`spent`. User code may ask as well."""
        return time.perf_counter()

    def spent(self, since: Any) -> None:
        """Count the time after ``since`` as busy."""
        self._busy += time.perf_counter() - since

    def busy_seconds(self) -> float:
        """Return the busy seconds known so far."""
        return self._busy

    def mirror(self, busy: float) -> None:
        """Show the ``busy`` seconds of a stage that computes elsewhere."""
        self._busy = busy

    def synchronize(self) -> None:
        """Wait until all work given to the device is computed."""


def shared_streams(devices: Sequence[torch.device]) -> Callable[[], None]:
    """Return a function by which another thread enters this thread's streams on ``devices``. They are mostly the
    default streams, but user code may call ``fit`` in another stream. The thread's device is the last accelerator."""
    streams = [torch.accelerator.current_stream(device) for device in dict.fromkeys(devices) if accelerates(device)]

    def enter() -> None:
        for stream in streams:
            torch.accelerator.set_stream(stream)

    return enter


class _CopyStreams:
    """A thread's own streams on devices from which it copies: torch copies in the thread's stream there."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.Stream] = {}

    def on(self, devices: Iterable[torch.device]) -> list[torch.Stream]:
        """Return the present streams on ``devices``."""
        return [self._streams[device] for device in set(devices) if device in self._streams]

    def of(self, tensors: Iterable[Tensor], own: torch.Stream | None = None) -> set[torch.Stream]:
        """Return the streams that copy ``tensors``. ``own`` is the thread's stream on its device, and remains it."""
        found = set()
        for tensor in tensors:
            device = tensor.device
            if not accelerates(device) or (own is not None and device == own.device):
                continue
            if device not in self._streams:
                self._streams[device] = torch.Stream(device)
                torch.accelerator.set_stream(self._streams[device])
                if own is not None:
                    torch.accelerator.set_stream(own)
            found.add(self._streams[device])
            _used(tensor, self._streams[device])
        return found


def _used(tensor: Tensor, stream: torch.Stream) -> None:
    """Record that ``stream`` uses ``tensor``, so that its memory is not reused before the stream is done."""
    for part in strided_parts(tensor):
        part.record_stream(stream)


class DeviceEvents:
    """Events, one for each stream."""

    def __init__(self, streams: Sequence[torch.Stream]) -> None:
        self.events = [stream.record_event() for stream in streams]

    def query(self) -> bool:
        return all(event.query() for event in self.events)

    def synchronize(self) -> None:
        for event in self.events:
            event.synchronize()


class DeviceStream(Stream):
    """Stream of a stage on an accelerator: its own there, and one on each device from which it copies."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._stream = torch.Stream(device)
        self._pending: deque[tuple[torch.Event, torch.Event]] = deque()
        self._lock = threading.Lock()

    def enter(self) -> None:
        torch.accelerator.set_stream(self._stream)  # and with it this thread's device

    def record(self, devices: Iterable[torch.device] = ()) -> DeviceEvents:
        return DeviceEvents([self._stream, *self._copy_streams.on(devices)])

    def join(
        self, event: StreamEvent | None, tensors: Iterable[Tensor] = (), devices: Iterable[torch.device] = ()
    ) -> None:
        tensors = list(tensors)
        streams = {self._stream, *self._copy_streams.of(tensors, self._stream)}
        for tensor in tensors:
            if tensor.device == self._stream.device:
                _used(tensor, self._stream)
        _wait(streams, event)

    def now(self) -> torch.Event:
        event = torch.Event(self._stream.device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._stream.device))
        return event

    def spent(self, since: torch.Event) -> None:
        with self._lock:
            self._pending.append((since, self.now()))
            self._settle()  # nobody may ever ask, and a device has room for so many events only

    def busy_seconds(self) -> float:
        with self._lock:
            self._settle()
            return self._busy

    def _settle(self) -> None:
        while self._pending and all(event.query() for event in self._pending[0]):  # of two streams of user code, maybe
            began, ended = self._pending.popleft()
            self._busy += began.elapsed_time(ended) / 1000

    def synchronize(self) -> None:
        self._stream.synchronize()


class UserStream:
    """Stream of user code and Lightning's thread, which never run at once: the threads' present streams."""

    def record(self, devices: Iterable[torch.device] = ()) -> StreamEvent | None:
        streams = [torch.accelerator.current_stream(device) for device in set(devices) if accelerates(device)]
        return DeviceEvents(streams) if streams else None

    def join(
        self, event: StreamEvent | None, tensors: Iterable[Tensor] = (), devices: Iterable[torch.device] = ()
    ) -> None:
        streams = {torch.accelerator.current_stream(device) for device in devices if accelerates(device)}
        for tensor in tensors:
            if accelerates(tensor.device):
                stream = torch.accelerator.current_stream(tensor.device)
                streams.add(stream)
                _used(tensor, stream)
        _wait(streams, event)


def _wait(streams: Iterable[torch.Stream], event: StreamEvent | None) -> None:
    if isinstance(event, DeviceEvents):
        for stream in streams:
            for each in event.events:
                stream.wait_event(each)


def stream_on(device: torch.device) -> Stream:
    """Make the stream of a stage on ``device``."""
    return DeviceStream(device) if accelerates(device) else Stream()


@dataclass(frozen=True)
class Streams:
    """Factory of streams: one for each stage's device, and one of user code and Lightning's thread."""

    on: Callable[[torch.device], Stream] = stream_on
    user: UserStream | Stream = field(default_factory=UserStream)


class Timed:
    """One computation of a stage, timed from here to :meth:`end`.

    The loss of a minibatch is user code between the forward and the backward of the last stage, and begins in the
    minibatch's thread. Other computations are a :class:`Pass`.
    """

    def __init__(self, stage: Stage, before: BeforePass | None, work: str, minibatch: int) -> None:
        self._stream = stage.stream
        self._since = self._stream.now()
        self._after = None if before is None else before(stage.index, work, minibatch)

    def end(self, work: StreamEvent | Stream | None) -> None:
        """End it: ``work`` is all of its work on the device. Emulated slowness sleeps here."""
        if self._after is not None:  # who looks at a clock wants to know when it is computed
            if work is not None:
                work.synchronize()
            self._after()
        self._stream.spent(self._since)


class Pass:
    """Context manager around one timed computation of a stage. A generator would cost as much as a small layer. It
    waits while a thread holds exclusive access to ``compute_lock``."""

    def __init__(
        self, stage: Stage, compute_lock: ReadersWriterLock, before: BeforePass | None, work: str, minibatch: int
    ) -> None:
        self._what = stage, before, work, minibatch
        self._compute_lock = compute_lock

    def __enter__(self) -> None:
        self._compute_lock.begin()
        try:
            self._timed = Timed(*self._what)
        except BaseException:
            self._compute_lock.end()
            raise

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._timed.end(self._what[0].stream)
        finally:
            self._compute_lock.end()


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """Return ``tensor`` on ``device``, in this thread's streams. A tensor on the host is there on return."""
    if tensor.device == device:  # as most often on one host; asking torch costs ten times as much
        return tensor
    if accelerates(device):
        on_host = tensor.device.type == "cpu" and tensor.layout is torch.strided
        return (tensor.pin_memory() if on_host else tensor).to(device, non_blocking=True)
    if accelerates(tensor.device) and tensor.layout is torch.strided:
        pinned = torch.empty_like(tensor, device=device, pin_memory=True)
        pinned.copy_(tensor, non_blocking=True)
        torch.accelerator.current_stream(tensor.device).synchronize()
        return pinned
    return tensor.to(device)
