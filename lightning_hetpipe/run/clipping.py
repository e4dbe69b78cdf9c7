"""Clipping by norm of gradients that lie on several devices, to the very result of a run on one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_hetpipe.redirect import Redirect
from lightning_hetpipe.torch_private.tensors import foreach_norm


def clip_by_norm(redirect: Redirect, optimizer: torch.optim.Optimizer, most: float | int) -> None:
    """Clips the gradients of ``optimizer``'s parameters, in place of a precision plugin's ``clip_grad_by_norm``."""
    parameters = list(redirect.owner.main_params(optimizer))
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if len({gradient.device for gradient in gradients}) < 2:
        redirect.original(optimizer, most)
    else:
        torch.nn.utils.clip_grads_with_norm_(parameters, most, total_norm(gradients))


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The 2-norm of all ``gradients``, on the first one's device, by their own norms in order, computed where they lie.

    ``torch.nn.utils.get_total_norm`` puts the norms of one device after those of another, and so rounds otherwise.
    """
    norms: dict[int, Tensor] = {}
    for device in dict.fromkeys(gradient.device for gradient in gradients):
        places = [place for place, gradient in enumerate(gradients) if gradient.device == device]
        norms.update(zip(places, foreach_norm([gradients[place] for place in places]), strict=True))
    first = gradients[0].device
    total: Tensor = torch.linalg.vector_norm(torch.stack([norms[place].to(first) for place in range(len(norms))]))
    return total
