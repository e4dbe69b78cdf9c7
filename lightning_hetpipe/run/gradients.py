"""Gradients between the pipeline and the optimizer: handed to the live parameters, and clipped, as in a plain run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_hetpipe.redirect import Redirect
from lightning_hetpipe.torch_private.subclasses import address_of
from lightning_hetpipe.torch_private.tensors import foreach_norm, has_gradient_hooks


def deliver(gradients: Mapping[nn.Parameter, Tensor], factor: float = 1.0) -> None:
    """Adds ``gradients``, times ``factor``, to ``.grad``, and runs hooks that were put on the parameters."""
    taken: set[int] = set()
    for parameter, gradient in gradients.items():
        if not parameter.requires_grad:  # a callback froze it meanwhile
            continue
        gradient = gradient.to(parameter.device)
        if factor != 1.0:
            gradient = gradient * factor  # not in place: autograd may have given one tensor to several
        if has_gradient_hooks(parameter):
            torch.autograd.backward(parameter, gradient)
        elif parameter.grad is None:
            parameter.grad = _own(gradient, parameter, taken)
        else:
            with torch.no_grad():
                parameter.grad += gradient


def _own(gradient: Tensor, parameter: nn.Parameter, taken: set[int]) -> Tensor:
    """``gradient`` with memory of its own, laid out as the parameter: autograd may give one tensor to several."""
    if gradient.layout is not torch.strided:
        return gradient
    memory = address_of(gradient)
    if memory in taken or gradient.stride() != parameter.stride():
        return torch.empty_like(parameter, requires_grad=False).copy_(gradient)
    if memory is not None:  # else it is at a host, which has seen to it
        taken.add(memory)
    # Not as a view, as a linear layer's is: `module.cpu()` would leave the tensor that it is a view of on the device.
    return gradient.data


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
