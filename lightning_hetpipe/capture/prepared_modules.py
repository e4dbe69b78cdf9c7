"""Modules that the user has prepared for another way to run: compiled, scripted, or with gradient checkpointing.

- torch.compile: such modules are looked through, because stages run their own layers.
- torch.jit: such modules run unchanged, and are refused if stages would have to run them.
- Gradient checkpointing of Hugging Face's models: stages recompute such layers in their backward.
  gradient_checkpointing_enable() sets two attributes of each part, and a hook that lets frozen embeddings take part.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_hetpipe.errors import PipelineRefusal, SettingError
from lightning_hetpipe.redirect import Redirect
from lightning_hetpipe.torch_private.modules import (
    COMPILED_CALL,
    behind_compile,
    call_uncompiled,
    without_checkpoint_hooks,
)


def look_through(root: nn.Module, *, stages_compile: bool) -> ExitStack:
    """Make compiled modules in ``root`` run uncompiled until the returned stack is closed, and warn about it.

    If ``stages_compile``, the warning says that stages compile the layers. Frozen modules stay compiled.
    """
    found = {name: module for name, module in root.named_modules() if name and is_looked_through(module)}
    if found:
        instead = (
            "stages compile its layers themselves, as compile says, and evaluation runs them as they were written"
            if stages_compile
            else "its layers run as they were written, not compiled, unless you set compile=True"
        )
        warnings.warn(
            f"'{next(iter(found))}' is compiled by torch.compile; while HetPipeStrategy trains, {instead}", stacklevel=2
        )
    undo = ExitStack()
    for module in found.values():
        name = COMPILED_CALL if behind_compile(module) is None else "forward"
        undo.callback(Redirect(module, name, _run_uncompiled).remove)
    return undo


def is_compiled(module: nn.Module) -> bool:
    """Return True if ``torch.compile`` made the module, or it was compiled in place."""
    return behind_compile(module) is not None or vars(module).get(COMPILED_CALL) is not None


def is_looked_through(module: nn.Module) -> bool:
    return is_compiled(module) and any(p.requires_grad for p in module.parameters())


def refuse_compiled(name: str, layer: nn.Module) -> None:
    """Refuse a compiled module inside layer ``name`` of an ``nn.Sequential``, of which stages run copies."""
    if any(behind_compile(module) is not None for module in layer.modules()):
        raise PipelineRefusal(
            f"layer '{name}' holds a module that is compiled by torch.compile, whose copies in stages would be compiled"
            " again; compile the whole nn.Sequential, which is looked through, or none of it"
        )


def is_scripted(module: nn.Module) -> bool:
    """Return True if ``torch.jit.script``, ``trace`` or ``load`` made the module."""
    return isinstance(module, torch.jit.ScriptModule)


def refuse_scripted(name: str, module: nn.Module) -> None:
    """Refuse TorchScript in module ``name`` that stages would run, or that has trained parameters.

    Copies do not share its attributes and parameters, and changes of them cannot be seen.
    """
    for path, part in module.named_modules(prefix=name):
        if is_scripted(part):
            inside = f" inside the pipelined module '{name}'" if path != name else " that is trained"
            raise SettingError(
                f"'{path}' is a TorchScript module (of torch.jit){inside}, of which a pipeline can keep no versions;"
                " use the nn.Module that it was made from, let training_step itself call it with its parameters"
                " frozen, or set in_flight=1"
            )


def _run_uncompiled(redirect: Redirect, *args: Any, **kwargs: Any) -> Any:
    behind = behind_compile(redirect.owner)
    return call_uncompiled(redirect.owner, *args, **kwargs) if behind is None else behind(*args, **kwargs)


_ENABLED = "gradient_checkpointing"
_FUNCTION = "_gradient_checkpointing_func"
_SETTINGS = {"preserve_rng_state"} | {
    name
    for name, parameter in inspect.signature(checkpoint).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
}
"""Keywords of ``torch.utils.checkpoint.checkpoint`` itself."""


def is_checkpointed(module: nn.Module) -> bool:
    """Return True if ``module``, or a part of it, is recomputed in its backward."""
    return any(_FUNCTION in vars(part) and getattr(part, _ENABLED, False) for part in module.modules())


@contextmanager
def without_checkpoints(module: nn.Module) -> Iterator[None]:
    """Context manager in which the parts of ``module`` run without gradient checkpointing."""
    with ExitStack() as stack:
        for part in module.modules():
            if (function := vars(part).get(_FUNCTION)) is not None:
                stack.enter_context(without_checkpoint_hooks(part))
                stack.callback(vars(part).__setitem__, _FUNCTION, function)
                vars(part)[_FUNCTION] = _call_directly
            elif isinstance(part, nn.Embedding):
                stack.enter_context(without_checkpoint_hooks(part))
        yield


def _call_directly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **{name: value for name, value in kwargs.items() if name not in _SETTINGS})
