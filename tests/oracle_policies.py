"""Weight policies, and lower learning rates at the beginning, of the oracle: each formula of docs/staleness.md."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer


def version_of(policy: str, p: int, nm: int, begin: int, every: int) -> int:
    """The version that minibatch ``p`` uses, before v_e is considered, of an epoch that began at version ``begin``."""
    before = begin + (p - begin - 1) // every * every  # the version before its window
    return {"sync": before, "2bw": before - every * (nm > 1), "xpipe": before + 1 - nm}.get(policy, p - nm)


def missed(policy: str, nm: int, every: int) -> int:
    """The optimizer steps that a minibatch misses, in the long run."""
    return {"sync": 0, "2bw": int(nm > 1)}.get(policy, -(-(nm - 1) // every))


Predict = Callable[[Tensor, int], Tensor]
"""Gives weights, so many optimizer steps later, as a prediction has them."""


def spectrain(optimizer: Optimizer, group: dict[str, Any], weight: nn.Parameter) -> Predict | None:
    """By its momentum buffer (SpecTrain, 2018)."""
    momentum = optimizer.state[weight].get("momentum_buffer") if weight in optimizer.state else None
    if momentum is None:
        return None
    u, rate = momentum.clone(), group["lr"]
    return lambda w, s: w.add(u, alpha=s * -rate)


def xpipe(optimizer: Optimizer, group: dict[str, Any], weight: nn.Parameter) -> Predict | None:
    """By Adam's moments, bias-corrected (XPipe, 2019)."""
    if weight not in optimizer.state or not optimizer.state[weight]:
        return None
    state, (beta, gamma) = optimizer.state[weight], group["betas"]
    t = state["step"].item()
    correction = math.sqrt(1 - gamma**t)  # of sqrt(v), here multiplied with lr and eps
    rate, eps = float(group["lr"]) * correction / (1 - beta**t), group["eps"] * correction
    m, v = state["exp_avg"].clone(), state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"].clone()
    return lambda w, s: w.addcdiv(m, v.sqrt() + eps, value=s * -rate)


def pipeoptim(moved: Tensor, w: Tensor, s: int) -> Tensor:
    """By what the last step has changed (PipeOptim, 2023)."""
    return w.add(moved, alpha=s)


def predictions_of(policy: str, model: nn.Module, optimizer: Optimizer, moved: dict[str, Tensor]) -> dict[str, Predict]:
    """Prediction of each parameter, as of now; ``moved`` is what the last step has changed."""
    if policy == "pipeoptim":
        trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
        return {name: partial(pipeoptim, move) for name, move in moved.items() if name in trained}
    rule = {"spectrain": spectrain, "xpipe": xpipe}.get(policy)
    if rule is None:
        return {}
    names = {weight: name for name, weight in model.named_parameters()}
    pairs = [(group, each) for group in optimizer.param_groups for each in group["params"] if each.requires_grad]
    found = {names[each]: rule(optimizer, group, each) for group, each in pairs}
    return {name: predict for name, predict in found.items() if predict is not None}


@contextlib.contextmanager
def corrected(optimizer: Optimizer, t: int, correction: int | tuple[int, int] | None, steps: int) -> Iterator[None]:
    """Within, rates are those of update ``t``, of the first ones that have lower rates; minibatches miss ``steps``."""
    factor = 1.0
    if correction is not None and steps > 0:
        updates, least = correction if isinstance(correction, tuple) else (correction, 1)
        factor = max(1 + steps, least) ** -(1 - min(t / updates, 1.0))
    before = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * factor  # another one, should it be a tensor
    yield
    for group, rate in zip(optimizer.param_groups, before, strict=True):
        group["lr"] = rate


def global_staleness(in_flight: int, distance: int, wave: int | None = None) -> int:
    """s_global = (D + 1) W + s_local - 1 minibatches (HetPipe, section 5.2, where W = Nm = s_local + 1).

    Args:
        in_flight: Nm.
        distance: D.
        wave: W; by default Nm.
    """
    return (distance + 1) * (in_flight if wave is None else wave) + (in_flight - 1) - 1
