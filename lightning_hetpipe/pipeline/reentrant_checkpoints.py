"""Refusal of checkpoints whose own backward sets gradients of weights, so that they run in no backward of a part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils.checkpoint import CheckpointFunction

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.torch_private import autograd


def is_reentrant_checkpoint(node: Any) -> bool:
    """Tell whether ``node``, of autograd's graph, is one."""
    return bool(node.name() == f"{CheckpointFunction.__name__}Backward")


def reentrant_checkpoint() -> SettingError:
    """The model has one."""
    return SettingError(
        "the model calls torch.utils.checkpoint with use_reentrant=True, which runs in no backward pass of a part of a"
        " model, as stages and the code around them have it; give it use_reentrant=False, which computes the same"
        " gradients, or set in_flight=1"
    )


def run_backward(outputs: Sequence[Tensor | GradientEdge], *arguments: Any) -> Sequence[Tensor | None]:
    """Compute gradients, as :func:`torch_private.autograd.run_backward` does.

    Raises:
        SettingError: if the pass fails and there is a reentrant checkpoint on its way.
    """
    try:
        return autograd.run_backward(outputs, *arguments)
    except RuntimeError as error:
        starts = [each.grad_fn if isinstance(each, Tensor) else each.node for each in outputs]
        is_reentrant = any(map(is_reentrant_checkpoint, autograd.graph_nodes(starts, [])))
        if is_reentrant and not isinstance(error, torch.OutOfMemoryError):
            raise reentrant_checkpoint() from error
        raise
