"""Prediction of weights: how the next optimizer step is expected to change each parameter.

A minibatch whose weights miss s optimizer steps computes on these weights moved on by s predicted steps. SpecTrain
(2018) predicts by SGD's momentum buffer, XPipe (2019) by Adam's moments, PipeOptim (2023) by the change of the last
step. For SGD with momentum at a constant rate, SpecTrain and PipeOptim agree but for rounding, weight decay included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.pipeline.stage_messages import Move
from lightning_hetpipe.pipeline.weight_stash import Moves
from lightning_hetpipe.run.around_step import AroundStep, check_hooks
from lightning_hetpipe.torch_private.tensors import foreach_copy_

Rule = Callable[[dict[str, Any], dict[str, Any]], Move | None]
"""Returns the expected change of a parameter from its group and its state, or None for no change."""


class Prediction(AroundStep):
    """Prediction from the state of ``optimizer``, read by the ``rule`` of ``policy``."""

    def __init__(self, optimizer: Optimizer, policy: str, rule: Rule) -> None:
        self._optimizer = optimizer
        self._policy = policy
        self._rule = rule

    def moves(self) -> Moves:
        """Return the expected change of each parameter by the next step. Frozen and never updated parameters have none.

        Raises:
            SettingError: if the optimizer's own step keeps another state than torch's.
        """
        try:
            return self._expected()
        except KeyError as missing:
            name = type(self._optimizer).__name__
            by = f"{missing} in the optimizer's state, and the step of {name} keeps none"
            raise _no_rule(self._policy, by) from None

    def _expected(self) -> Moves:
        found: dict[nn.Parameter, Move] = {}
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                state = self._optimizer.state.get(parameter)
                if parameter.requires_grad and state and (move := self._rule(group, state)) is not None:
                    found[parameter] = move
        return found

    def saved(self) -> Sequence[Tensor | None]:
        """Return the tensors, for each parameter, that a checkpoint must hold beside the optimizer's state."""
        return ()

    def restore(self, saved: Sequence[Tensor | None]) -> None:
        """Restore ``saved`` together with the optimizer's state. It is empty if another policy saved it."""


class LastStep(Prediction):
    """Prediction by the change of the last step of ``optimizer``. A skipped step changed nothing. A step also counts as
    skipped if the user's ``optimizer_step`` only called the closure. Lightning counts it among its ``steps``, but the
    optimizer was not asked for it."""

    def __init__(self, optimizer: Optimizer, steps: Callable[[], int] = lambda: 0) -> None:
        super().__init__(optimizer, "pipeoptim", lambda group, state: None)
        self._steps = steps
        self._changes: dict[nn.Parameter, Tensor] = {}
        self._room: dict[nn.Parameter, Tensor] = {}
        self._stepped = 0  # the count after the last step that was asked of the optimizer

    def moves(self) -> Moves:
        return {parameter: Move(change) for parameter, change in self._known() if parameter.requires_grad}

    def saved(self) -> Sequence[Tensor | None]:
        known = dict(self._known())
        return [known.get(parameter) for parameter in self._parameters()]

    def restore(self, saved: Sequence[Tensor | None]) -> None:
        self._stepped = self._steps()
        given = zip(self._parameters(), saved, strict=False)
        self._changes = self._room = {parameter: change for parameter, change in given if change is not None}

    def _known(self) -> Iterable[tuple[nn.Parameter, Tensor]]:
        if self._steps() > self._stepped:
            self.restore(())
        return self._changes.items()

    @contextmanager
    def asked(self) -> Iterator[None]:
        before, self._stepped = self._changes, self._steps() + 1
        yield
        if self._changes is before:
            self._changes = {}

    @contextmanager
    def stepping(self) -> Iterator[None]:
        room = {each: self._room_for(each) for each in self._parameters() if each.requires_grad}
        self._changes, self._room = {}, room  # nothing to predict by, should the step fail
        with torch.no_grad():
            foreach_copy_([*room.values()], [*room])
        yield
        with torch.no_grad():
            for parameter, before in room.items():
                torch.sub(parameter, before, out=before)
        self._changes = room

    def _room_for(self, parameter: nn.Parameter) -> Tensor:
        """Return kept memory for the change of ``parameter``: new memory costs more than the computation in it."""
        room = self._room.get(parameter)
        if room is None or (room.shape, room.dtype, room.device) != (
            parameter.shape,
            parameter.dtype,
            parameter.device,
        ):
            room = torch.empty_like(parameter, requires_grad=False)
        return room

    def _parameters(self) -> list[nn.Parameter]:
        return [each for group in self._optimizer.param_groups for each in group["params"]]


def prediction_of(policy: str, optimizer: Optimizer, steps: Callable[[], int] = lambda: 0) -> Prediction:
    """Return the prediction of a weight policy. ``steps`` returns Lightning's count of optimizer steps.

    Raises:
        SettingError: if the policy has no rule for the optimizer or its settings.
    """
    check_hooks(optimizer, f"weights='{policy}'")
    if (by := lacks(policy, optimizer)) is not None:
        raise _no_rule(policy, by)
    return Prediction(optimizer, policy, _RULES[policy][1]) if policy in _RULES else LastStep(optimizer, steps)


def lacks(policy: str, optimizer: Optimizer) -> str | None:
    """Describe what ``policy`` predicts by and ``optimizer`` lacks, or return None if the policy has a rule for it."""
    if policy not in _RULES:
        return None
    kinds, _, groups = _RULES[policy]
    name = type(optimizer).__name__
    if not isinstance(optimizer, kinds):
        known = " or ".join(f"torch.optim.{kind.__name__}" for kind in kinds)
        return f"the state of {known}, and the optimizer is {name}"
    for group in optimizer.param_groups:
        for key, is_right in groups.items():
            if not is_right(group[key]):
                return f"the momentum buffer of {name}, which says too little with {key}={group[key]!r}"
    return None


def _no_rule(policy: str, by: str) -> SettingError:
    return SettingError(f"weights='{policy}' predicts by {by}; set weights='pipeoptim', which suits any, or 'stash'")


PREFERRED = ("spectrain", "xpipe", "pipeoptim")
"""Predicting policies, in the order of preference. The last suits any optimizer, but copies weights once more."""


def _by_momentum(group: Mapping[str, Any], state: Mapping[str, Any]) -> Move | None:
    momentum: Tensor | None = state["momentum_buffer"]
    return None if momentum is None else Move(momentum, -float(group["lr"]))


def _by_moments(group: Mapping[str, Any], state: Mapping[str, Any]) -> Move | None:
    """Return Adam's step, with its bias corrections in the other order (Kingma and Ba, section 2)."""
    if not (steps := float(state["step"])):  # a fused step that a loss scaler has skipped has made a state
        return None
    beta, gamma = group["betas"]
    correction = math.sqrt(1 - gamma**steps)
    scale = -float(group["lr"]) * correction / (1 - beta**steps)
    second = state["max_exp_avg_sq"] if group["amsgrad"] else state["exp_avg_sq"]
    return Move(state["exp_avg"], scale, second, group["eps"] * correction)


_RULES: Mapping[str, tuple[tuple[type[Optimizer], ...], Rule, Mapping[str, Callable[[Any], bool]]]] = {
    "spectrain": (
        (SGD,),
        _by_momentum,
        {
            "momentum": lambda value: value != 0,
            "dampening": lambda value: value == 0,
            "nesterov": lambda value: not value,
        },
    ),
    "xpipe": ((Adam, AdamW), _by_moments, {}),
}
