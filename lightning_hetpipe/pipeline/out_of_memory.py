"""Notes on errors for want of memory: who had asked for it, what was held there, and what helps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_hetpipe.accelerator import accelerates
from lightning_hetpipe.planning.model.units import in_bytes
from lightning_hetpipe.torch_private.tensors import pytree, strided_parts

_BEGIN = "HetPipeStrategy: "


def explain(error: torch.OutOfMemoryError, text: str) -> None:
    """Add a note with ``text`` to ``error``, unless it has such a note already."""
    if not any(note.startswith(_BEGIN) for note in getattr(error, "__notes__", ())):
        error.add_note(f"{_BEGIN}{text}")


def less(in_flight: int, recompute: bool) -> str:
    """Say how stages take less memory, as the end of a sentence.

    Args:
        in_flight: Nm of the run.
        recompute: Whether forwards are computed again for their backwards already.
    """
    ways = [f"in_flight below {in_flight}"] if in_flight > 1 else []
    ways += [] if recompute else ["recompute=True"]
    ways.append("smaller batches" if not ways else "or smaller batches")
    return f"set {', '.join(ways)}, or give more devices, or ones with more memory"


def held(
    module: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    stages: Sequence[torch.device],
    planned: Mapping[torch.device, str],
) -> str:
    """Say what each device of ``stages`` holds, a line for each; nothing for a CPU.

    Args:
        module: The whole model.
        optimizers: With their states.
        stages: The device of each stage.
        planned: What a plan, or the limit of a device, has for it.
    """
    states = pytree.tree_leaves([each for optimizer in optimizers for each in optimizer.state.values()])
    parts = {
        "weights": [*module.parameters(), *module.buffers()],
        "gradients": [each.grad for each in module.parameters() if each.grad is not None],
        "optimizer state": [each for each in states if isinstance(each, Tensor)],
    }
    lines = []
    for device in dict.fromkeys(each for each in stages if accelerates(each)):
        numbers = [str(number) for number, each in enumerate(stages) if each == device]
        here = {part: [t for t in tensors if t.device == device] for part, tensors in parts.items()}
        own = {part: sum(each.nbytes for t in tensors for each in strided_parts(t)) for part, tensors in here.items()}
        sizes = [f"{in_bytes(size)} of {part}" for part, size in own.items()]
        lines.append(
            f"  stage{'s' if len(numbers) > 1 else ''} {' and '.join(numbers)} on {device}: {', '.join(sizes)}, and"
            f" {in_bytes(torch.accelerator.memory_allocated(device))} with all else"
            f"{f'; {planned[device]}' if device in planned else ''}"
        )
    return "\n".join(["; devices hold", *lines]) if lines else ""
