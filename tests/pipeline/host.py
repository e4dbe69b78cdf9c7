"""A stage in another process: its layers are decoded, and every message to and from it is bytes.

Frames of bytes come from standard input and go to standard output, each behind its length. The first one is the stage;
every other is a list of what is meant and its arguments. What asks for an answer gets a list of it, in order; results
of tasks come in between.
"""

from __future__ import annotations

import os
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import torch

from lightning_hetpipe.pipeline.graph_code import decode_layers
from lightning_hetpipe.pipeline.message_code import decode, encode
from lightning_hetpipe.pipeline.random.generators import RandomGenerators
from lightning_hetpipe.pipeline.readers_writer_lock import ReadersWriterLock
from lightning_hetpipe.pipeline.stage import Stage, StageSettings
from lightning_hetpipe.pipeline.stage_messages import Failure, Result
from lightning_hetpipe.pipeline.stage_thread import Parcel
from lightning_hetpipe.pipeline.streams import StreamEvent, Streams
from lightning_hetpipe.pipeline.threads import Watchdog
from lightning_hetpipe.rules.schedule import Segment

_LENGTH = struct.Struct(">Q")


class Wire:
    """Frames over two pipes; any thread may send."""

    def __init__(self, source: BinaryIO, target: BinaryIO) -> None:
        self._source = source
        self._target = target
        self._lock = threading.Lock()

    def send(self, frame: bytes) -> None:
        with self._lock:
            self._target.write(_LENGTH.pack(len(frame)) + frame)
            self._target.flush()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._source.close()
        self._target.close()

    def frames(self) -> Iterator[bytes]:
        while head := self._source.read(_LENGTH.size):
            yield self._source.read(*_LENGTH.unpack(head))


def main(wire: Wire) -> None:
    frames = wire.frames()
    index, segments, count, run_seed, virtual_worker, in_flight, threads, recompute = decode(next(frames))
    layers: list[Any] = [None] * count
    own = iter(decode_layers(next(frames)))
    parts = [Segment(*each) for each in segments]
    for part in parts:
        for number in part.layers:
            layers[number] = next(own)
    settings = StageSettings(RandomGenerators(run_seed, virtual_worker), in_flight, threads, None, recompute=recompute)
    watchdog = Watchdog(60.0, lambda: False, lambda: "a stage in a process of its own")

    @contextmanager
    def exclusively(number: int, who: str) -> Iterator[None]:
        yield

    def done(result: Result, event: StreamEvent | None) -> None:
        try:
            frame = encode(result)
        except Exception as error:  # it would end the stage's thread
            frame = encode(Failure(result.minibatch, error))
        wire.send(frame)

    device = torch.device("cpu")
    compute_lock = ReadersWriterLock(watchdog)
    stage = Stage(index, device, parts, layers, settings, watchdog, compute_lock, exclusively, done, Streams())
    stage.start()
    for frame in frames:
        what, *given = decode(frame)
        if what == "put":
            stage.put(Parcel(*given))
        elif what == "begin":
            stage.begin(*given)
        elif what == "publish":
            stage.publish(*given)
        else:
            found: Any = stage.take(*given).gradients if what == "take" else stage.state(*given)
            wire.send(encode([found]))
    stage.close()
    stage.join(60.0)


if __name__ == "__main__":
    output = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what anybody prints is no frame
    main(Wire(sys.stdin.buffer, output))
