"""The optimizer's step by stages: each stage steps its own weights, in its thread and stream.

Lightning, hooks, schedulers and a loss scaler see one step of the user's optimizer. Within it, for each stage, the
optimizer's class steps a clone, whose groups are cut to the stage's weights and which has the optimizer's own state.
Then the user's optimizer itself steps the weights of no stage. Each weight's bits are those of a whole step.

Stages wait for each other at the end of a step. So a step by stages gains if its operators take long (SOAP, Muon), and
loses if Python takes longest. Both ways are timed at the start of training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hetpipe.hosts.remote_stage import RemoteStage
from lightning_hetpipe.pipeline.engine import Engine
from lightning_hetpipe.pipeline.stage import Stage
from lightning_hetpipe.pipeline.streams import StreamEvent
from lightning_hetpipe.run.around_step import AroundStep
from lightning_hetpipe.torch_private.tensors import pytree

TIMED = 10
"""Steps for which each way is timed, twice by turns: by default a whole period of SOAP's preconditioning."""

GAIN = 0.9
"""Largest ratio of times, by stages over whole, at which stages step."""

_STEPS_BY_WEIGHT: Mapping[str, str] = {
    "torch.optim": (
        "ASGD, Adadelta, Adafactor, Adagrad, Adam, AdamW, Adamax, Muon, NAdam, RAdam, RMSprop, Rprop, SGD, SparseAdam"
    ),
    "pytorch_optimizer.optimizer": "Lion, Muon, SOAP, ScheduleFreeAdamW, ScheduleFreeRAdam, ScheduleFreeSGD",
}
"""Names of optimizers, by package, that were tested to step each weight by itself. Some optimizers mix weights, count
their calls, or wrap another optimizer."""


def steps_by_weight(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if ``optimizer`` is known to step each weight by itself, and nobody has changed its methods."""
    kind = type(optimizer)
    packages = [package for package, names in _STEPS_BY_WEIGHT.items() if kind.__name__ in names.split(", ")]
    known = any(f"{kind.__module__}.".startswith(f"{package}.") for package in packages)
    changed = [name for name, value in vars(optimizer).items() if callable(value) and name != "step"]
    own = vars(optimizer).get("step")
    of_scheduler = own is None or getattr(own, "__wrapped__", None) is kind.step
    return known and not changed and of_scheduler and hasattr(kind.step, "__wrapped__")


@dataclass(eq=False)
class StageSteps(AroundStep):
    """Steps of ``optimizer`` by the stages of ``engine``. Other user code runs meanwhile, unless a context in
    ``around`` is secret."""

    engine: Engine
    optimizer: torch.optim.Optimizer
    around: Sequence[AroundStep]

    def __post_init__(self) -> None:
        self._may_divide = steps_by_weight(self.optimizer)
        self._steps = -1  # the first step makes states, and is not timed
        self._seconds = [0.0, 0.0]  # whole, by stages

    @contextmanager
    def stepping(self) -> Iterator[None]:
        if any(each.is_secret for each in self.around):
            yield
            return
        owners = self._owners() if self.divides() else {}
        started = perf_counter()
        with self._stepped(owners), self.engine.computing():
            yield
        if 0 <= self._steps < 4 * TIMED:
            self._seconds[self._steps // TIMED % 2] += perf_counter() - started
        self._steps += 1

    def divides(self) -> bool:
        """Return True if stages are to step now."""
        if not self._may_divide or self._steps < 0:
            return False
        if self._steps < 4 * TIMED:
            return self._steps // TIMED % 2 == 1
        whole, by_stages = self._seconds
        return by_stages < GAIN * whole

    def _owners(self) -> Mapping[nn.Parameter, Stage]:
        """Return the stage of this process that steps each weight. A weight on two stages is stepped by the first."""
        stages = [stage for stage in self.engine.stages if not isinstance(stage, RemoteStage)]
        owners: dict[nn.Parameter, Stage] = {}
        for stage in stages:
            for weight in stage.live.parameters:
                if weight.grad is not None:
                    owners.setdefault(weight, stage)
        return owners if len(set(owners.values())) > 1 else {}

    @contextmanager
    def _stepped(self, owners: Mapping[nn.Parameter, Stage]) -> Iterator[None]:
        """Context manager in which the weights of ``owners`` are stepped already, and the optimizer has the others."""
        groups = self.optimizer.param_groups
        whole = [group["params"] for group in groups]
        stages = dict.fromkeys(owners.values())
        self._step_apart({stage: [[w for w in own if owners.get(w) is stage] for own in whole] for stage in stages})
        try:
            for group, weights in zip(groups, whole, strict=True):
                group["params"] = [each for each in weights if each not in owners]
            yield
        finally:
            for group, weights in zip(groups, whole, strict=True):
                group["params"] = weights

    def _step_apart(self, cuts: Mapping[Stage, Sequence[Sequence[nn.Parameter]]]) -> None:
        """Let each stage step its own weights, given by group, and wait for all stages."""
        if not cuts:
            return
        state, found = self.optimizer.state, list[Future[StreamEvent | None]]()
        for stage, groups in cuts.items():
            weights = [weight for group in groups for weight in group]
            used = [each for weight in weights for each in (weight, weight.grad) if each is not None]
            found.append(stage.compute(partial(self._step, groups), used))
        with self.engine.main.unlocked():
            self.engine.watchdog.wait(
                lambda seconds: not wait(found, seconds).not_done,
                "Lightning's thread for the optimizer's step of stages",
            )
        for (stage, groups), future in zip(cuts.items(), found, strict=True):
            if (event := future.result()) is not None:
                made = pytree.tree_leaves([state[weight] for group in groups for weight in group])
                tensors = [each for each in made if isinstance(each, Tensor)]
                self.engine.streams.user.join(event, tensors, [stage.device])

    def _step(self, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        """Step ``groups`` of weights by the class's own step, without hooks and schedulers' wrappers."""
        kind: Any = type(self.optimizer)
        clone = object.__new__(kind)
        cut = [{**group, "params": own} for group, own in zip(self.optimizer.param_groups, groups, strict=True)]
        vars(clone).update(vars(self.optimizer), param_groups=cut)
        kind.step.__wrapped__(clone)
