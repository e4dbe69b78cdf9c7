"""A stage in another process gets layers as data and messages as bytes, and computes the oracle's bits."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

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
from tests.pipeline.host import Wire
from tests.support.marks import slow_except


class RemoteStage(Stage):
    """A stage whose tasks run in another process. What is inherited holds versions for user code only."""

    def start(self) -> None:
        command = [sys.executable, "-m", "tests.pipeline.host"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.wire = Wire(self.process.stdout, self.process.stdin)  # type: ignore[arg-type]
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
        if isinstance(parcel.message, Cancel) and self.process.stdin.closed:  # type: ignore[union-attr]
            return
        if not isinstance(parcel.message, Cancel):
            self._asked.add(parcel.message.minibatch)
        self.wire.send(encode(["put", parcel.message]))

    def begin(self, version: Version, forwards: int) -> None:
        super().begin(version, forwards)
        self.wire.send(encode(["begin", version, forwards]))

    def publish(self, version: Version) -> None:
        self.stash.publish(version.number, version.parameters, version.flags)
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
        self.process.stdin.close()  # type: ignore[union-attr]

    def join(self, seconds: float) -> bool:
        self._reader.join(60)
        return self.process.wait(60) == 0


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], list[RemoteStage]]]:
    """Lets a stage be in another process, and gives those that were made."""
    found: list[RemoteStage] = []

    def of(remote: int) -> list[RemoteStage]:
        def stage(index: int, *args: Any) -> Stage:
            if index != remote:
                return Stage(index, *args)
            found.append(RemoteStage(index, *args))
            return found[-1]

        monkeypatch.setattr("lightning_hetpipe.pipeline.engine.Stage", stage)
        return found

    yield of
    for each in found:
        if each.process.poll() is None:
            each.process.kill()
            each.process.wait()


@pytest.mark.parametrize("index", slow_except([0, 1], 1))
@pytest.mark.parametrize(
    "name",
    [
        "views",
        *(
            pytest.param(n, marks=pytest.mark.slow)
            for n in ("dropout", "unet", "resnet", "translator", "towers", "vae")
        ),
    ],
)
def test_a_stage_in_another_process(name: str, index: int, remote: Callable[[int], list[RemoteStage]]) -> None:
    """Among them buffers, dropout, tied weights, several pieces and inputs, and modules that are called again."""
    _, loader, layers = CASES[name]
    expected = expect(made(name), loader, 2)
    made_remote = remote(index)
    assert_equal(expected, fit(made(name), loader, strategy=even(layers, 2, 2)))
    assert made_remote
    assert all(stage.process.returncode == 0 for stage in made_remote)
