"""The optimizer's step by stages: each stage steps its own weights, in its thread and stream.

Lightning, hooks, schedulers and a loss scaler see one step of the user's optimizer. Within it, for each stage, the
optimizer's class steps a clone, whose groups are cut to the stage's weights and which has the optimizer's own state.
Meanwhile a clone here steps the weights of no stage. At last the user's optimizer itself steps empty groups. Each
weight has the bits of a whole step.

Stages wait for each other at the end of a step. So a step by stages gains if its operators take long (SOAP, Muon), and
loses if Python takes longest. Both ways are timed at the start of training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hetpipe.accelerator import accelerates
from lightning_hetpipe.hosts.remote_stage import RemoteStage
from lightning_hetpipe.pipeline.engine import Engine
from lightning_hetpipe.pipeline.stage import Stage
from lightning_hetpipe.pipeline.user.minibatch import UNWINDING
from lightning_hetpipe.run.around_step import AroundStep
from lightning_hetpipe.torch_private.tensors import pytree

TIMED = 10
"""Steps for which each way is timed, twice by turns: by default a whole period of SOAP's preconditioning."""

GAIN = 0.9
"""Largest ratio of times, by stages over whole, at which stages step."""

Cuts = Mapping[Stage | None, Sequence[Sequence[nn.Parameter]]]

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
    kind, groups = type(optimizer), optimizer.param_groups
    packages = [package for package, names in _STEPS_BY_WEIGHT.items() if kind.__name__ in names.split(", ")]
    if not any(f"{kind.__module__}.".startswith(f"{package}.") for package in packages):
        return False
    if kind.__name__ == "Muon" and any(group.get("foreach", False) is not False for group in groups):
        return False  # it multiplies stacks of matrices, whose bits depend on all of them
    own = vars(optimizer).get("step")
    if own is not None and getattr(own, "__wrapped__", None) is not kind.step:  # as schedulers wrap it
        return False
    given = [*vars(optimizer).items(), *(each for group in groups for each in group.items() if each[0] != "params")]
    # Tensors, such as a rate or a loss scaler's, lie on one device.
    return not any(isinstance(value, Tensor) or (callable(value) and name != "step") for name, value in given)


@dataclass(eq=False)
class StageSteps(AroundStep):
    """Steps of ``optimizer`` by the stages of ``engine``. Other user code runs meanwhile, unless a context in
    ``around`` is secret."""

    engine: Engine
    optimizer: torch.optim.Optimizer
    around: Sequence[AroundStep]

    def __post_init__(self) -> None:
        self._steps = -1  # the first step makes states, and is not timed
        self._seconds = [0.0, 0.0]  # whole, by stages

    @contextmanager
    def stepping(self) -> Iterator[None]:
        if any(each.is_secret for each in self.around):
            yield
            return
        cuts = self._cuts() if self.divides() else {}
        started = perf_counter()
        with self._stepped(cuts) if cuts else self.engine.computing():
            yield
        if 0 <= self._steps < 4 * TIMED:
            self._seconds[self._steps // TIMED % 2] += perf_counter() - started
        self._steps += 1

    def divides(self) -> bool:
        """Return True if stages are to step now."""
        whole, by_stages = self._seconds
        is_turn = self._steps // TIMED % 2 == 1 if self._steps < 4 * TIMED else by_stages < GAIN * whole
        return self._steps >= 0 and is_turn and steps_by_weight(self.optimizer)

    def _cuts(self) -> Cuts:
        """Return the weights with gradients, by group, of each stage of this process that has their memory. None has
        the weights of no stage. Return nothing if fewer than two stages have weights, or if weights are of kinds that
        optimizers step in other ways together."""
        whole = [group["params"] for group in self.optimizer.param_groups]
        weights = [weight for own in whole for weight in own if weight.grad is not None]
        kinds = {(weight.device.type, weight.grad.layout) for weight in weights}
        owners: dict[nn.Parameter, Stage] = {}
        for stage in self.engine.stages:
            if not isinstance(stage, RemoteStage):
                here = [weight for weight in stage.live.parameters if weight.device == stage.device]
                owners.update((weight, stage) for weight in here if weight not in owners)
        stages = dict.fromkeys(owners[weight] for weight in weights if weight in owners)
        if len(kinds) > 1 or len(stages) < 2:
            return {}
        return {stage: [[w for w in own if owners.get(w) is stage] for own in whole] for stage in [*stages, None]}

    @contextmanager
    def _stepped(self, cuts: Cuts) -> Iterator[None]:
        """Context manager in which all weights are stepped already, and the optimizer's groups are empty."""
        groups = self.optimizer.param_groups
        whole = [group["params"] for group in groups]
        self._step_apart(cuts)
        # With the lock over user code, which would see empty groups.
        with self.engine.compute_lock.shared():
            try:
                for group in groups:
                    group["params"] = []
                yield
            finally:
                for group, weights in zip(groups, whole, strict=True):
                    group["params"] = weights

    def _step_apart(self, cuts: Cuts) -> None:
        """Let each stage step its own weights, step the weights of no stage here, and wait for all stages."""
        found = {
            stage: stage.compute(partial(self._step, own), self._used(own)) for stage, own in cuts.items() if stage
        }
        try:
            if any(cuts[None]):
                with self.engine.computing():
                    self._step(cuts[None])
        finally:
            with self.engine.main.unlocked():
                try:
                    self.engine.watchdog.wait(
                        lambda seconds: not wait(found.values(), seconds).not_done,
                        "Lightning's thread for the step of stages",
                    )
                except BaseException:  # an interrupt: what comes next reads weights
                    wait(found.values(), UNWINDING)
                    raise
            for stage, future in found.items():
                if (event := None if future.exception() else future.result()) is not None:
                    self.engine.streams.user.join(event, self._used(cuts[stage]), [stage.device])
        for future in found.values():
            future.result()

    def _used(self, groups: Sequence[Sequence[nn.Parameter]]) -> Sequence[Tensor]:
        """Return the tensors that a step of ``groups`` of weights uses on accelerators."""
        weights = [weight for group in groups for weight in group if accelerates(weight.device)]
        states = pytree.tree_leaves([self.optimizer.state[each] for each in weights if each in self.optimizer.state])
        return [each for each in (*weights, *(weight.grad for weight in weights), *states) if isinstance(each, Tensor)]

    def _step(self, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        """Step ``groups`` of weights by the class's own step, without hooks and schedulers' wrappers."""
        kind: Any = type(self.optimizer)
        clone = object.__new__(kind)
        cut = [{**group, "params": own} for group, own in zip(self.optimizer.param_groups, groups, strict=True)]
        vars(clone).update(vars(self.optimizer), param_groups=cut)
        kind.step.__wrapped__(clone)
