"""The leaves that a loss reaches past all pieces: what the pipeline would leave without a gradient, refused by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.private import graph_leaves


def refuse_outside(
    root: nn.Module,
    inside: Collection[int],
    loss: Tensor,
    pieces: Collection[str] = (),
    seams: Mapping[Any, Sequence[Tensor]] | None = None,
) -> None:
    """Refuses a leaf that ``loss`` reaches, in ``root`` or not, whose gradient would be of another version or lost.

    Args:
        root: The LightningModule, which names parameters.
        inside: The leaves that are allowed, by ``id``.
        loss: What is differentiated.
        pieces: The names of the pieces: a parameter of theirs that the loss reaches is used beside their calls.
        seams: Nodes of the graph where pieces gave their outputs. The search goes on at what each piece was given.

    Raises:
        SettingError: which names the parameter.
    """
    reached = [leaf for leaf in graph_leaves(loss, seams) if id(leaf) not in inside]
    if not reached:
        return
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    for leaf in reached:
        name = names.get(id(leaf))
        if name is None:
            raise SettingError(
                f"the loss depends on a tensor of shape {tuple(leaf.shape)} that requires a gradient and is no"
                f" parameter of {type(root).__name__}, and the pipeline would give it none; register a parameter in a"
                " module that training_step calls, and leave requires_grad_() of a batch out"
            )
        if (piece := next((piece for piece in pieces if name.startswith(f"{piece}.")), None)) is not None:
            raise SettingError(
                f"training_step uses the parameter '{name}' directly, beside the pipelined call of '{piece}', and this"
                " release computes gradients of that call only; for an L2 term use the optimizer's weight_decay, else"
                " move what uses it into the module, or train with another strategy"
            )
        raise SettingError(
            f"the loss depends on the parameter '{name}' outside every pipelined module, and this release keeps"
            " versions of those only; use it in the forward of a module that training_step calls, freeze it, or for an"
            " L2 term use the optimizer's weight_decay"
        )
