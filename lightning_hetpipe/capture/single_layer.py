"""A piece that is one of torch.nn's own layers, such as an LSTM or a Linear: a stage runs it as it is."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_hetpipe.torch_private import has_any_hooks


def is_single(module: nn.Module) -> bool:
    """Whether ``module`` is one layer of torch.nn's own, with nothing around it that a graph would have to show."""
    if not type(module).__module__.startswith("torch.nn.modules.") or has_any_hooks(module):
        return False
    return not any(True for child in module.children() for _ in child.parameters())


class SingleLayer(nn.Module):
    """Calls ``module`` with the arguments that it is given as one value.

    Not through ``__call__``: the user's call of the piece has been through that.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, value: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        args, kwargs = value
        return self.module.forward(*args, **kwargs)
