"""Hands a minibatch's gradients to the live parameters, as a plain backward pass would leave them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lightning_hetpipe.torch_private.subclasses import address_of
from lightning_hetpipe.torch_private.tensors import has_gradient_hooks


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
