"""A pipeline of forwards only, for evaluation: on the live layers, without gradients.

Weights do not change while it runs, so there are no versions and no copies. User code may call a piece as often as it
likes, in any order: each call goes through the piece's stages once, and comes back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_hetpipe.errors import Discarded
from lightning_hetpipe.pipeline.autocast import Autocast
from lightning_hetpipe.pipeline.chance import Chance, attached
from lightning_hetpipe.pipeline.creation import creating
from lightning_hetpipe.pipeline.crew import Crew
from lightning_hetpipe.pipeline.flight import Flight, running
from lightning_hetpipe.pipeline.lanes import WaitingLane, move
from lightning_hetpipe.pipeline.quiet import Quiet
from lightning_hetpipe.pipeline.stage import Layer, Pass, StageSettings
from lightning_hetpipe.pipeline.stretch import Stretch
from lightning_hetpipe.pipeline.threads import Worker
from lightning_hetpipe.private import pytree
from lightning_hetpipe.rules.schedule import Segment, segments


@dataclass(frozen=True)
class Forward:
    """One call of a piece, on its way through the stages.

    Attributes:
        flight: Who called.
        segment: Where it is.
        value: What the segment is given.
        autocast: What autocast did where the piece was called.
        inference: Whether that was in ``torch.inference_mode``.
    """

    flight: EvaluationFlight
    segment: Segment
    value: Any
    autocast: Autocast
    inference: bool


class EvaluationFlight(Flight):
    """A batch that is evaluated, by ``run``, within ``context``."""

    def __init__(
        self,
        evaluator: Evaluator,
        number: int,
        run: Callable[[], Any],
        context: Callable[[], AbstractContextManager[Any]],
        stretch: Stretch | None,
    ) -> None:
        super().__init__(evaluator, number, stretch)
        self._evaluator = evaluator
        self._run = run
        self._around = context
        self._inference = torch.is_inference_mode_enabled()  # in Lightning's thread, which submits it
        self._gradients = torch.is_grad_enabled()

    def call(self, piece: int, name: str, value: Any) -> Any:
        """Runs piece number ``piece`` in the pipeline on ``value``; called where user code calls the module."""
        self._check_cancelled()
        try:
            output = self._through_pipeline(
                lambda: self._evaluator.forward(self, piece, value), f"the output of '{name}'"
            )
        except Exception:
            self.failure = None  # user code may catch it
            raise
        return output

    def _fly(self) -> None:
        with (
            running(self),
            torch.inference_mode(self._inference),
            torch.set_grad_enabled(self._gradients),
            self._around(),
        ):
            self.output = self._run()

    def _landed(self, failure: BaseException | None) -> None:
        self.end(failure)


class Evaluator(Crew[EvaluationFlight]):
    """One virtual worker's evaluation.

    Args:
        pieces: For each piece its name and its live layers.
        cuts: The first layer of each stage.
        devices: The device of each stage, on which its layers are.
        settings: What all stages share.
        timeout: Seconds after which a wait in which nothing moves ends with an explanation.
        tag: Names this evaluation among those of the run, for its random numbers.
    """

    doing = "the evaluation of batch"
    stages: list[ForwardStage]

    def __init__(
        self,
        pieces: Sequence[tuple[str, Sequence[Layer]]],
        cuts: Sequence[int],
        devices: Sequence[torch.device],
        settings: StageSettings,
        timeout: float,
        tag: str,
    ) -> None:
        super().__init__("hetpipe-evaluation", settings.in_flight, settings.torch_threads, timeout)
        self._layers = [layer for _, own in pieces for layer in own]
        self._attached = ExitStack()
        parts = segments([len(own) for _, own in pieces], cuts)
        self._parts = [[part for part in parts if part.piece == piece] for piece in range(len(pieces))]
        self.stages = [
            ForwardStage(index, device, WaitingLane(device, devices), settings, self.quiet, self._done, tag)
            for index, device in enumerate(devices)
        ]

    def start(self) -> None:
        calls = self._attached.enter_context(attached({layer.name: layer.module for layer in self._layers}))
        for stage in self.stages:
            stage.calls = list(calls.items())
        super().start()

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._attached.close()

    def submit(
        self,
        number: int,
        run: Callable[[], Any],
        context: Callable[[], AbstractContextManager[Any]],
        stretch: Stretch | None,
    ) -> None:
        """Starts batch ``number``, the next one: ``run`` is the user's step for it."""
        self.launch(EvaluationFlight(self, number, run, context, stretch))

    def forward(self, flight: EvaluationFlight, piece: int, value: Any) -> None:
        """Sends ``value`` into ``piece``; its outputs will be delivered to ``flight``."""
        first = self._parts[piece][0]
        self._send(Forward(flight, first, value, Autocast.current(), torch.is_inference_mode_enabled()))

    def _send(self, task: Forward) -> None:
        self.stages[task.segment.stage].put(task)

    def _done(self, task: Forward, value: Any) -> None:
        own = self._parts[task.segment.piece]
        following = own[own.index(task.segment) + 1 :]
        self.patience.moved()
        if following:
            self._send(Forward(task.flight, following[0], value, task.autocast, task.inference))
        else:
            task.flight.deliver(moved(value, self.stages[-1].device))


class ForwardStage:
    """A thread that runs forwards of its segments, first in, first out."""

    def __init__(
        self,
        index: int,
        device: torch.device,
        lane: WaitingLane,
        settings: StageSettings,
        quiet: Quiet,
        done: Callable[[Forward, Any], None],
        tag: str,
    ) -> None:
        self.index = index
        self.device = device
        self.lane = lane
        self.calls: list[tuple[str, Callable[..., Any]]] = []
        """All layers' names, and what to call for each."""
        self._settings = settings
        self._quiet = quiet
        self._done = done
        self._tag = tag
        self._doing: tuple[Forward, float] | None = None
        self._worker: Worker[Forward] | None = None

    def start(self) -> None:
        name = f"hetpipe-evaluation-stage-{self.index}"
        self._worker = Worker(name, self._run, self._settings.torch_threads, self.lane.enter)

    def put(self, task: Forward) -> None:
        assert self._worker is not None
        self._worker.put(task)

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()

    def join(self, seconds: float) -> bool:
        return self._worker is None or self._worker.join(seconds)

    def describe(self) -> str:
        """What the stage does right now, for people."""
        doing = self._doing
        if doing is None:
            return f"stage {self.index} is idle"
        task, since = doing
        names = [self.calls[number][0] for number in task.segment.layers]
        return (
            f"stage {self.index} has evaluated batch {task.flight.number} (layers {names[0]} to {names[-1]}) for"
            f" {time.monotonic() - since:.1f} s"
        )

    def _run(self, task: Forward) -> None:
        if task.flight.cancelled:
            task.flight.deliver(Discarded())
            return
        self._doing = (task, time.monotonic())
        try:
            with Pass(self, self._quiet, self._settings.before_pass, "evaluate", task.flight.number):
                value = self._evaluate(task)
        except BaseException as error:
            self._doing = None
            task.flight.deliver(error)
            return
        self._doing = None
        self._done(task, value)

    def _evaluate(self, task: Forward) -> Any:
        with self._around(task):
            value = moved(task.value, self.device)
            for number in task.segment.layers:
                value = self.calls[number][1](value)
        return value

    @contextmanager
    def _around(self, task: Forward) -> Iterator[None]:
        chance: Chance = self._settings.chance
        with (
            torch.inference_mode(task.inference),
            torch.no_grad(),
            chance.minibatch(f"{self._tag} {task.flight.number}"),
            task.autocast.opened(alone=False),
            creating(self._settings.default_dtype),
        ):
            yield


def moved(value: Any, device: torch.device) -> Any:
    """``value`` with its tensors on ``device``."""
    return pytree.tree_map_only(Tensor, lambda tensor: move(tensor, device), value)
