"""Spreading a model over devices before its layers are known: by the bytes of its parameters and the devices' memory.

Where it is trained, frozen parameters count less, as no gradient and no optimizer state comes with them.

Modules that hold tensors are divided in the order in which they were registered, which is mostly the order of their
calls. What holds none, such as metrics with their states, lies on the root device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_hetpipe.planning.search.spread_plan import FROZEN, divided
from lightning_hetpipe.torch_private.modules import without_tensors


def spread(
    module: nn.Module, devices: Sequence[torch.device], room: Sequence[float], *, frozen: float = FROZEN
) -> None:
    """Moves ``module`` to ``devices``, each part of it with tensors of its own to one of them.

    Args:
        module: The whole model.
        devices: Of each stage, in order; the last one is the root device.
        room: Of each stage, in any unit: tensors are divided in these proportions, as far as parts can be.
        frozen: Part of its bytes by which a frozen parameter counts.
    """
    parts = list(_with_tensors(module))
    sizes = [
        sum(each.nbytes * (frozen if isinstance(each, nn.Parameter) and not each.requires_grad else 1) for each in own)
        for _, own in parts
    ]
    stages = divided(sizes, room)
    pairs = zip(parts, stages, strict=True)
    move_apart(module, {id(each): devices[stage] for (_, tensors), stage in pairs for each in tensors}, devices[-1])


def move_apart(module: nn.Module, places: Mapping[int, torch.device], root: torch.device) -> None:
    """Moves each tensor of ``module`` to its device in ``places``, found by its ``id``, and all else to ``root``.

    What leaves a device has left it before anything comes: no device ever holds more than before or after.
    """
    if all(device == root for device in places.values()):
        module.to(root)
        return
    parts = list(_with_tensors(module))
    with without_tensors([part for part, _ in parts]):
        module.to(root)  # which also tells a LightningModule and its metrics
    for target in (torch.device("cpu"), None):
        for _, tensors in parts:
            for tensor in tensors:
                device = places.get(id(tensor), root)
                if tensor.device != device:
                    move_live(tensor, target or device)


def move_live(tensor: Tensor, device: torch.device) -> None:
    """Moves ``tensor``, a parameter or buffer of the user's, to ``device`` as the same object, with its gradient."""
    if tensor.device == device:
        return
    gradient, tensor.grad = tensor.grad, None
    # In an evaluation the copy would be an inference tensor, and no graph could be made of what holds it.
    with torch.inference_mode(tensor.is_inference()):
        tensor.data = tensor.data.to(device)
    if gradient is not None:
        tensor.grad = gradient.to(device)


def _with_tensors(module: nn.Module) -> Iterator[tuple[nn.Module, list[Tensor]]]:
    """Parts of ``module`` with parameters and buffers of their own; a tied one is with its first owner."""
    seen: set[int] = set()
    for part in module.modules():
        own = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
        new = [tensor for tensor in own if id(tensor) not in seen]
        seen.update(map(id, new))
        if own:
            yield part, new
