"""Prediction of weights: how the next optimizer step is expected to change each parameter.

A minibatch whose weights miss s optimizer steps then computes on these weights moved on by s such steps. SpecTrain
(2018) takes SGD's momentum buffer for it, XPipe (2019) Adam's moments, PipeOptim (2023) what the last step has done;
for SGD with momentum at a constant rate the first and the last are the same, but for weight decay's newest part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.pipeline.live import Moves
from lightning_hetpipe.run.around_step import AroundStep, check_hooks

Rule = Callable[[dict[str, Any], dict[str, Any]], Tensor | None]
"""Gives the expected change of a parameter, by its group and its state; None for no change."""


class Prediction(AroundStep):
    """Prediction by the state of ``optimizer``, as a ``rule`` reads it."""

    def __init__(self, optimizer: Optimizer, rule: Rule) -> None:
        self._optimizer = optimizer
        self._rule = rule

    def moves(self) -> Moves:
        """Expected change of each parameter by the next step; of none before the first one."""
        found: dict[nn.Parameter, Tensor] = {}
        with torch.no_grad():
            for group in self._optimizer.param_groups:
                for parameter in group["params"]:
                    state = self._optimizer.state.get(parameter)
                    if state and (move := self._rule(group, state)) is not None:
                        found[parameter] = move
        return found

    def saved(self) -> Sequence[Tensor | None]:
        """Tensors that a checkpoint has to hold beside the optimizer's state, for each of its parameters."""
        return ()


class LastStep(Prediction):
    """Prediction by what the last step of ``optimizer`` has changed; a step that was skipped has changed nothing.

    Args:
        optimizer: The optimizer.
        moves: What the last step before a checkpoint has changed, of a run that is resumed there.
    """

    def __init__(self, optimizer: Optimizer, moves: Sequence[Tensor | None] = ()) -> None:
        super().__init__(optimizer, lambda group, state: None)
        given = zip(self._parameters(), moves, strict=False)
        self._moves: Moves = {parameter: move for parameter, move in given if move is not None}

    def moves(self) -> Moves:
        return self._moves

    def saved(self) -> Sequence[Tensor | None]:
        return [self._moves.get(parameter) for parameter in self._parameters()] if self._moves else ()

    @contextmanager
    def asked(self) -> Iterator[None]:
        before = self._moves
        yield
        if self._moves is before:
            self._moves = {}

    @contextmanager
    def stepping(self) -> Iterator[None]:
        parameters = self._parameters()
        before = [each.detach().clone() for each in parameters]
        yield
        for parameter, tensor in zip(parameters, before, strict=True):
            tensor.neg_().add_(parameter.detach())
        self._moves = dict(zip(parameters, before, strict=True))

    def _parameters(self) -> list[nn.Parameter]:
        return [each for group in self._optimizer.param_groups for each in group["params"]]


def prediction_of(policy: str, optimizer: Optimizer, moves: Sequence[Tensor | None] = ()) -> Prediction:
    """The prediction of the weight policy of that name; ``moves`` are those of a checkpoint.

    Raises:
        SettingError: for an optimizer, or a setting of it, that the policy has no rule for.
    """
    check_hooks(optimizer, f"weights='{policy}'")
    if policy == "pipeoptim":
        return LastStep(optimizer, moves)
    kinds, rule, groups = _RULES[policy]
    name = type(optimizer).__name__
    if not isinstance(optimizer, kinds):
        known = " or ".join(f"torch.optim.{kind.__name__}" for kind in kinds)
        raise SettingError(
            f"weights='{policy}' predicts by the state of {known}, and the optimizer is {name}; set"
            " weights='pipeoptim', which suits any, or 'stash'"
        )
    for group in optimizer.param_groups:
        if wrong := {key: group[key] for key, is_right in groups.items() if not is_right(group[key])}:
            key, value = next(iter(wrong.items()))
            raise SettingError(
                f"weights='{policy}' predicts by the momentum buffer of {name}, which says too little with"
                f" {key}={value!r}; set weights='pipeoptim', which suits any, or 'stash'"
            )
    return Prediction(optimizer, rule)


def _by_momentum(group: Mapping[str, Any], state: Mapping[str, Any]) -> Tensor | None:
    momentum: Tensor | None = state.get("momentum_buffer")
    return None if momentum is None else momentum * -group["lr"]


def _by_moments(group: Mapping[str, Any], state: Mapping[str, Any]) -> Tensor | None:
    if "step" not in state:
        return None
    (beta, gamma), steps = group["betas"], float(state["step"])
    second: Tensor = state["max_exp_avg_sq"] if group["amsgrad"] else state["exp_avg_sq"]
    spread = (second / (1 - gamma**steps)).sqrt() + group["eps"]
    move: Tensor = state["exp_avg"] / spread * (-group["lr"] / (1 - beta**steps))
    return move


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
