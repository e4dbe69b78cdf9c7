"""A stage in another process gets layers as data and messages as bytes, and computes the oracle's bits."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch

from lightning_hetpipe.pipeline.graph_code import encode_layers
from lightning_hetpipe.pipeline.message_code import RemoteFailure, decode, encode
from lightning_hetpipe.pipeline.stage import FoundGradients, Stage
from lightning_hetpipe.pipeline.stage_messages import Cancel, Failure, StageState, Version
from lightning_hetpipe.pipeline.stage_thread import Parcel
from tests.exact.pipelines import even
from tests.exact.running import assert_equal, expect, fit
from tests.exact.test_captured import CASES, made
from tests.pipeline.host import Wire, main
from tests.support.marks import slow_except
from tests.support.models import ADAMW, Learner


class Process:
    """A process of its own for a host."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.pipeline.host"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.input, self.output = cast(Any, self.process.stdin), cast(Any, self.process.stdout)

    def ended(self) -> bool:
        return self.process.wait(60) == 0

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


class Thread:
    """A thread for a host: it saves the imports of a process, and is given nothing but bytes, too."""

    def __init__(self) -> None:
        (source, its_output), (its_source, output) = os.pipe(), os.pipe()
        self.input, self.output = os.fdopen(output, "wb"), os.fdopen(source, "rb")
        own = Wire(os.fdopen(its_source, "rb"), os.fdopen(its_output, "wb"))
        self.thread = threading.Thread(target=self._run, args=(own,))
        self.failed = True
        self.thread.start()

    def _run(self, wire: Wire) -> None:
        torch.set_num_threads(1)
        with wire:
            main(wire)
        self.failed = False

    def ended(self) -> bool:
        self.thread.join(60)
        return not self.failed

    def end(self) -> None:
        self.input.close()
        self.thread.join(60)
        self.output.close()


class RemoteStage(Stage):
    """A stage whose tasks run at a host. What is inherited holds versions for user code only."""

    host: type[Process | Thread]

    def start(self) -> None:
        self.process = self.host()
        self.wire = Wire(self.process.output, self.process.input)
        self._reader = threading.Thread(target=self._read, name=f"hetpipe-remote-{self.index}", daemon=True)
        self._asked: set[int] = set()
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        chance, settings = self._settings.generators, self._settings
        segments = [(part.index, part.piece, part.stage, part.first, part.last) for part in self.segments]
        count = max(part.last for part in self.segments) + 1
        seeds = (chance.run_seed, chance.virtual_worker)
        self.wire.send(
            encode(
                (self.index, segments, count, *seeds, settings.in_flight, settings.torch_threads, settings.recompute)
            )
        )
        self.wire.send(encode_layers(self.layers))
        self._reader.start()

    def _read(self) -> None:
        torch.set_num_threads(1)
        for frame in self.wire.frames():
            found = decode(frame)
            if isinstance(found, list):
                self._answers.put(*found)
            else:
                self._watchdog.moved()
                self._asked.discard(found.minibatch)
                self._done(found, None)
        for number in [*self._asked]:
            self._done(Failure(number, RemoteFailure("the process of a stage has ended")), None)

    def put(self, parcel: Parcel) -> None:
        assert parcel.event is None
        if isinstance(parcel.message, Cancel) and self.process.input.closed:
            return
        if not isinstance(parcel.message, Cancel):
            self._asked.add(parcel.message.minibatch)
        self.wire.send(encode(["put", parcel.message]))

    def begin(self, version: Version, forwards: int) -> None:
        super().begin(version, forwards)
        self.wire.send(encode(["begin", version, forwards]))

    def publish(self, version: Version) -> None:
        self.stash.publish(version)
        self.wire.send(encode(["publish", version]))

    def take(self, minibatch: int) -> FoundGradients:
        self.wire.send(encode(["take", minibatch]))
        found = FoundGradients()
        found.gradients = self._answers.get(timeout=60)
        return found

    def state(self, minibatch: int) -> StageState:
        self.wire.send(encode(["state", minibatch]))
        found: StageState = self._answers.get(timeout=60)
        return found

    def close(self) -> None:
        self.process.input.close()

    def join(self, seconds: float) -> bool:
        self._reader.join(60)
        return self.process.ended()


Remote = Callable[[int, type[Process | Thread]], list[RemoteStage]]


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> Iterator[Remote]:
    """Lets a stage be at a host, and gives those that were made."""
    found: list[RemoteStage] = []

    def of(remote: int, host: type[Process | Thread]) -> list[RemoteStage]:
        monkeypatch.setattr(RemoteStage, "host", host, raising=False)

        def stage(index: int, *args: Any) -> Stage:
            if index != remote:
                return Stage(index, *args)
            found.append(RemoteStage(index, *args))
            return found[-1]

        monkeypatch.setattr("lightning_hetpipe.pipeline.engine.Stage", stage)
        return found

    yield of
    for each in found:
        each.process.end()


NAMES = ("views", "dropout", "unet", "resnet", "translator", "towers", "vae")


@pytest.mark.parametrize(
    ("name", "index", "host"),
    slow_except(
        [("views", 1, Thread), *((name, index, Process) for name in NAMES for index in (0, 1))], ("views", 1, Thread)
    ),
)
def test_a_stage_in_another_process(name: str, index: int, host: type[Process | Thread], remote: Remote) -> None:
    """Among them buffers, dropout, tied weights, several pieces and inputs, and modules that are called again."""
    _, loader, layers = CASES[name]
    expected = expect(made(name), loader, 2)
    made_remote = remote(index, host)
    assert_equal(expected, fit(made(name), loader, strategy=even(layers, 2, 2)))
    assert made_remote
    assert all(stage.process.ended() for stage in made_remote)


def test_weights_are_predicted_in_another_process(remote: Remote) -> None:
    _, loader, layers = CASES["views"]

    def adam() -> Learner:
        task = made("views")
        task.recipe = ADAMW
        return task

    expected = expect(adam(), loader, 3, weights="xpipe")
    made_remote = remote(1, Thread)
    assert_equal(expected, fit(adam(), loader, strategy=even(layers, 2, 3, weights="xpipe")))
    assert made_remote
