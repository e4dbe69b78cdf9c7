"""Gradients between the pipeline and the optimizer: handed to the live parameters, and clipped, as in a plain run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_hetpipe.redirect import Redirect
from lightning_hetpipe.torch_private.subclasses import address_of
from lightning_hetpipe.torch_private.tensors import foreach_norm, has_gradient_hooks


def deliver(gradients: Mapping[nn.Parameter, Tensor], factor: float = 1.0) -> None:
    """Add ``gradients``, times ``factor``, to ``.grad``, and run hooks of the parameters."""
    taken: set[int] = set()
    for parameter, gradient in gradients.items():
        if not parameter.requires_grad:  # a callback froze it meanwhile
            continue
        gradient = gradient.to(parameter.device)
        if factor != 1.0:
            gradient = gradient * factor  # not in place: autograd may use one tensor for several gradients
        if has_gradient_hooks(parameter):
            torch.autograd.backward(parameter, gradient)
        elif parameter.grad is None:
            parameter.grad = _own(gradient, parameter, taken)
        else:
            with torch.no_grad():
                parameter.grad += gradient


def _own(gradient: Tensor, parameter: nn.Parameter, taken: set[int]) -> Tensor:
    """Return ``gradient`` in its own memory, in the parameter's layout: autograd may use one tensor for several."""
    if gradient.layout is not torch.strided:
        return gradient
    memory = address_of(gradient)
    if memory in taken or gradient.stride() != parameter.stride():
        return torch.empty_like(parameter, requires_grad=False).copy_(gradient)
    if memory is not None:  # None at a host, which has seen to it
        taken.add(memory)
    # Not a view, as a linear layer's gradient is: `module.cpu()` would leave the base of the view on the device.
    return gradient.data


def clip_by_norm(redirect: Redirect, optimizer: torch.optim.Optimizer, most: float | int) -> None:
    """Clip the gradients of ``optimizer``'s parameters, in place of a precision plugin's ``clip_grad_by_norm``."""
    parameters = list(redirect.owner.main_params(optimizer))
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if len({gradient.device for gradient in gradients}) < 2:
        redirect.original(optimizer, most)
    else:
        torch.nn.utils.clip_grads_with_norm_(parameters, most, total_norm(gradients))


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of all ``gradients`` on the first one's device, from their own norms in order.
    ``torch.nn.utils.get_total_norm`` orders the norms by device, and so rounds differently."""
    norms: dict[int, Tensor] = {}
    for device in dict.fromkeys(gradient.device for gradient in gradients):
        places = [place for place, gradient in enumerate(gradients) if gradient.device == device]
        norms.update(zip(places, foreach_norm([gradients[place] for place in places]), strict=True))
    first = gradients[0].device
    total: Tensor = torch.linalg.vector_norm(torch.stack([norms[place].to(first) for place in range(len(norms))]))
    return total
