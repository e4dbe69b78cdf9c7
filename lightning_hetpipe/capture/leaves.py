"""The leaves that a loss reaches: those that would get no gradient, or one of another version, are refused."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.private import graph_leaves


def refuse_leaves(
    root: nn.Module, allowed: Collection[int], loss: Tensor, seams: Mapping[Any, Sequence[Tensor]] | None = None
) -> None:
    """Refuses a leaf that ``loss`` reaches, in ``root`` or not, whose gradient would be of another version or lost.

    Args:
        root: The LightningModule, which names parameters.
        allowed: Leaves, by ``id``.
        loss: What is differentiated.
        seams: Nodes of the graph where pieces gave their outputs. The search goes on at what each piece was given.

    Raises:
        SettingError: which names the parameter.
    """
    reached = next((leaf for leaf in graph_leaves(loss, seams) if id(leaf) not in allowed), None)
    if reached is None:
        return
    name = next((name for name, parameter in root.named_parameters() if parameter is reached), None)
    if name is None:
        raise SettingError(
            f"the loss depends on a tensor of shape {tuple(reached.shape)} that requires a gradient and is no"
            f" parameter of {type(root).__name__}, and the pipeline would give it none; register a parameter in a"
            " module that training_step calls, and leave requires_grad_() of a batch out"
        )
    raise SettingError(
        f"training_step gives the parameter '{name}' to a torch.autograd.Function or a compiled function, where the"
        f" pipeline cannot put this minibatch's version in its place; give it {name}.clone(), or move what uses it into"
        " a module that training_step calls"
    )
