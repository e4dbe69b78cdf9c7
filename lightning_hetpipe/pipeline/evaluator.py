"""A pipeline of forwards only, for evaluation: on the live layers, without gradients.

Weights do not change while it runs, so there are no versions and no copies. User code may call a piece as often as it
likes, in any order. Each call goes through the piece's stages once, and comes back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hetpipe.pipeline.autocast import Autocast
from lightning_hetpipe.pipeline.compile.compilation import names_of
from lightning_hetpipe.pipeline.creation import creating
from lightning_hetpipe.pipeline.operands import OperandsTogether
from lightning_hetpipe.pipeline.random.generators import attached
from lightning_hetpipe.pipeline.stage import Layer, StageSettings
from lightning_hetpipe.pipeline.stage_messages import Forward, Message, Output, Result
from lightning_hetpipe.pipeline.stage_thread import Parcel, Pass, StageThread
from lightning_hetpipe.pipeline.streams import StreamEvent, WaitingStream, move
from lightning_hetpipe.pipeline.user.batch_in_flight import BatchInFlight
from lightning_hetpipe.pipeline.user.runner_pool import RunnerPool
from lightning_hetpipe.pipeline.user.user_section import UserSection
from lightning_hetpipe.rules.schedule import Segment
from lightning_hetpipe.rules.versions import Reading
from lightning_hetpipe.torch_private.tensors import pytree

LIVE = Reading(0)
"""Weights of an evaluation."""


class EvaluationBatch(BatchInFlight):
    """A batch of an evaluation. ``run`` is the user's step for it, within ``context``."""

    def __init__(
        self,
        evaluator: Evaluator,
        number: int,
        run: Callable[[], Any],
        context: Callable[[], AbstractContextManager[Any]],
        section: UserSection,
    ) -> None:
        super().__init__(evaluator, number, section)
        self._evaluator = evaluator
        self._run = run
        self._around = context
        self._inference = torch.is_inference_mode_enabled()  # in Lightning's thread, which submits it
        self._gradients = torch.is_grad_enabled()
        self.called: Forward
        """The call in progress."""
        self.calls = Counter[int]()
        """Number of calls of each piece so far."""

    def call(self, piece: int, name: str, value: Any) -> Any:
        """Run piece number ``piece`` in the pipeline on ``value``, when user code calls the module."""
        self._check_cancelled()
        try:
            output = self._through_pipeline(
                lambda: self._evaluator.forward(self, piece, value), f"the output of '{name}'"
            )
        except Exception:
            self.failure = None  # user code may catch it
            raise
        finally:
            self.calls[piece] += 1
        return output

    def _run_step(self) -> None:
        with torch.inference_mode(self._inference), torch.set_grad_enabled(self._gradients), self._around():
            self.output = self._run()

    def _step_ended(self, failure: BaseException | None) -> None:
        self.end(failure)


class Evaluator(RunnerPool[EvaluationBatch]):
    """One virtual worker's evaluation, on live layers that lie on their stages' ``devices``. ``tag`` names it among the
    evaluations of the run, for random numbers."""

    doing = "the evaluation of batch"
    stages: list[ForwardStage]

    def __init__(
        self,
        pieces: Sequence[tuple[str, Sequence[Layer]]],
        split_points: Sequence[int],
        devices: Sequence[torch.device],
        settings: StageSettings,
        timeout: float,
        tag: str,
    ) -> None:
        super().__init__("hetpipe-evaluation", pieces, split_points, settings, timeout)
        self._attached = ExitStack()
        self.stages = [
            ForwardStage(self, index, devices, settings, [part.layers for part in self._segments], tag)
            for index in range(len(devices))
        ]

    def start(self) -> None:
        calls = self._attached.enter_context(attached({layer.name: layer.module for layer in self._layers}))
        for stage in self.stages:
            stage.begin(list(calls.items()), [layer.module for layer in self._layers])
        super().start()

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._attached.close()

    def forward(self, batch: EvaluationBatch, piece: int, value: Any) -> None:
        """Send ``value`` into ``piece``. The outputs will be delivered to ``batch``."""
        first, ordinal, inference = self._of_piece[piece][0], batch.calls[piece], torch.is_inference_mode_enabled()
        batch.called = Forward(
            batch.number, first.index, value, LIVE, Autocast.current(), call=ordinal, inference=inference
        )
        self._forward(batch, first, value, None)

    def _forward(self, batch: EvaluationBatch, segment: Segment, value: Any, event: StreamEvent | None) -> None:
        self.stages[segment.stage].put(Parcel(batch.called._replace(segment=segment.index, value=value)))

    def _done(self, result: Result, event: StreamEvent | None) -> None:
        if isinstance(result, Output) and self.following[result.segment] is None:
            result = result._replace(value=moved(result.value, self.stages[-1].device))
        super()._done(result, event)


class ForwardStage(StageThread):
    """A thread that runs forwards of its segments, first in, first out."""

    def __init__(
        self,
        evaluator: Evaluator,
        index: int,
        devices: Sequence[torch.device],
        settings: StageSettings,
        layers: Sequence[range],
        tag: str,
    ) -> None:
        name, stream = f"hetpipe-evaluation-stage-{index}", WaitingStream(devices[index], devices)
        watchdog, done = evaluator.watchdog, evaluator._done
        super().__init__(name, index, devices[index], stream, settings.torch_threads, watchdog=watchdog, done=done)
        self.calls: list[tuple[str, Callable[..., Any]]] = []
        """Name and callable of each layer of the model."""
        self._settings = settings
        self._compute_lock = evaluator.compute_lock
        self._layers = layers
        self._tag = tag
        self._devices: list[torch.device] = []

    def begin(self, calls: list[tuple[str, Callable[..., Any]]], layers: Sequence[nn.Module]) -> None:
        """Take ``calls`` of all stages' ``layers``, by name. A tied weight lies on only one of its stages' devices."""
        self.calls = calls
        own = nn.ModuleList([layers[number] for numbers in self._layers for number in numbers])
        self._devices = [self.device, *(tensor.device for tensor in (*own.parameters(), *own.buffers()))]

    def _told(self, message: Message) -> str:
        return f"has evaluated {self._work(message)}"

    def _lacking(self, message: Message) -> str:
        return (
            f"stage {self.index} ran out of memory on {self.place} while it evaluated {self._work(message)}; give this"
            " loop smaller batches, or set in_flight lower, or give more devices, or ones with more memory"
        )

    def _work(self, message: Message) -> str:
        assert isinstance(message, Forward)
        numbers = self._layers[message.segment]
        return f"batch {message.minibatch} ({names_of(self.calls[numbers[0]][0], self.calls[numbers[-1]][0])})"

    def _compute(self, parcel: Parcel) -> tuple[Result, StreamEvent | None]:
        task = parcel.message
        assert isinstance(task, Forward)
        with (
            Pass(self, self._compute_lock, self._settings.before_pass, "evaluate", task.minibatch),
            torch.inference_mode(task.inference),
            torch.no_grad(),
            self._settings.generators.minibatch(f"{self._tag} {task.minibatch}", task.call),
            task.autocast.opened(alone=False),
            creating(self._settings.default_dtype),
            OperandsTogether(self._devices),
        ):
            value = moved(task.value, self.device)
            for number in self._layers[task.segment]:
                value = self.calls[number][1](value)
        return Output(task.minibatch, task.segment, value), None


def moved(value: Any, device: torch.device) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: move(tensor, device), value)
