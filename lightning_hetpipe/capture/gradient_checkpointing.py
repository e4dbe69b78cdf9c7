"""Gradient checkpointing as Hugging Face's models have it: stages compute such layers again in their backward instead.

``gradient_checkpointing_enable()`` sets two attributes of each part, and a hook that lets frozen embeddings take part.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_hetpipe.torch_private.modules import without_checkpoint_hooks

_ENABLED = "gradient_checkpointing"
_FUNCTION = "_gradient_checkpointing_func"
_SETTINGS = {"preserve_rng_state"} | {
    name
    for name, parameter in inspect.signature(checkpoint).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
}
"""Keywords of ``torch.utils.checkpoint.checkpoint`` itself."""


def is_checkpointed(module: nn.Module) -> bool:
    """Tell whether ``module``, or a part of it, is to be computed again in its backward."""
    return any(_FUNCTION in vars(part) and getattr(part, _ENABLED, False) for part in module.modules())


@contextmanager
def without_checkpoints(module: nn.Module) -> Iterator[None]:
    """Within it, the parts of ``module`` run as if gradient checkpointing was off."""
    with ExitStack() as stack:
        for part in module.modules():
            if (function := vars(part).get(_FUNCTION)) is not None:
                stack.enter_context(without_checkpoint_hooks(part))
                stack.callback(vars(part).__setitem__, _FUNCTION, function)
                vars(part)[_FUNCTION] = _call
            elif isinstance(part, nn.Embedding):
                stack.enter_context(without_checkpoint_hooks(part))
        yield


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **{name: value for name, value in kwargs.items() if name not in _SETTINGS})
