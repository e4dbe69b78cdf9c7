"""Counts where a thread would wait for a GPU, on a machine without one."""

from __future__ import annotations

from typing import Any

import torch

from lightning_hetpipe.torch_private.modes import ThreadDispatchMode


class Waits(ThreadDispatchMode):
    """Within it, how often this thread asks for the value of a tensor, or whether two are equal."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.equal.default, torch.ops.aten._local_scalar_dense.default)
        return func(*args, **(kwargs or {}))
