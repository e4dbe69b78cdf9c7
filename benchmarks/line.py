"""An engine without Lightning, driven as the strategy drives it: for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hetpipe.pipeline.engine import Engine
from lightning_hetpipe.pipeline.memory import PlannedMemory
from lightning_hetpipe.pipeline.random.generators import RandomGenerators
from lightning_hetpipe.pipeline.stage import BeforePass, Layer, StageSettings
from lightning_hetpipe.pipeline.streams import Streams
from lightning_hetpipe.pipeline.user.minibatch import Minibatch, Step, current
from lightning_hetpipe.pipeline.user.user_section import UserSection

CPU = torch.device("cpu")
Check = Callable[[Tensor, Collection[int]], None]


class Line:
    """An engine over the layers of ``pieces``, each stage on the same device.

    Args:
        pieces: Each pipelined module, called "piece0", "piece1", and so on.
        cuts: The first layer of each stage.
        in_flight: Nm.
        timeout: Seconds until a wait in which nothing moves ends.
        before_pass: As ``StageSettings.before_pass``.
        default_dtype: As ``StageSettings.default_dtype``.
        recompute: As ``StageSettings.recompute``.
        device: Of all stages.
        streams: As an engine's.
        called: As an engine's.
        rooms: Bytes that activations and waiting gradients of each stage may take; by default no limit.
    """

    def __init__(
        self,
        *pieces: nn.Sequential,
        cuts: Sequence[int] = (0,),
        in_flight: int = 2,
        timeout: float = 60.0,
        before_pass: BeforePass | None = None,
        default_dtype: torch.dtype | None = None,
        recompute: bool = False,
        device: torch.device = CPU,
        streams: Streams | None = None,
        called: Sequence[int] | None = None,
        rooms: Sequence[int] = (),
    ) -> None:
        self.pieces = list(pieces)
        named = [(f"piece{index}", layers_of(piece, f"piece{index}")) for index, piece in enumerate(pieces)]
        settings = StageSettings(RandomGenerators(0), in_flight, 1, default_dtype, before_pass, recompute)
        planned = [PlannedMemory(room, room, room) for room in rooms]
        devices = [device] * len(cuts)
        self.engine = Engine(named, cuts, devices, settings, timeout, streams=streams, called=called, planned=planned)

    def call(self, value: Any, piece: int = 0) -> Any:
        """Run a pipelined module as its call in ``training_step`` does."""
        minibatch = current()
        assert minibatch is not None
        return minibatch.call(piece, f"piece{piece}", value, lambda given: given)

    def step(
        self, run: Callable[[], Tensor], check: Check = lambda total, ours: None, section: UserSection | None = None
    ) -> Step:
        """A step whose loss ``run`` computes."""

        def both() -> tuple[Any, Tensor]:
            loss = run()
            return {"loss": loss.detach()}, loss

        return Step(both, nullcontext, section or UserSection(), check)

    @contextmanager
    def running(self, version: int = 0) -> Iterator[Engine]:
        """Started, begun at ``version``, and closed in the end."""
        self.engine.start()
        try:
            self.engine.begin(version)
            yield self.engine
        finally:
            self.engine.close()

    def train(self, minibatches: int, step: Callable[[int], Step]) -> Iterator[Minibatch]:
        """Runs minibatches 1, 2, ... of :meth:`running`, Nm at once, and yields each that is done.

        What the caller does before it takes the next one is Lightning's step: hooks, optimizer, callbacks.
        """
        engine, submitted = self.engine, 0
        for number in range(1, minibatches + 1):
            while submitted < min(minibatches, number - 1 + engine.in_flight):
                submitted += 1
                engine.submit(submitted, step(submitted))
            minibatch = engine.finish(number)
            engine.show(minibatch)
            yield minibatch
            engine.publish(number)


def layers_of(piece: nn.Sequential, name: str) -> list[Layer]:
    """The children of ``piece``, which is called ``name``; one that is used twice is two layers."""
    return [
        Layer(f"{name}.{own}", child, getattr(child, "inplace", False))
        for own, child in piece.named_modules(remove_duplicate=False)
        if own and "." not in own
    ]
