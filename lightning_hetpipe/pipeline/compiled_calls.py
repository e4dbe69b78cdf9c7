"""Functions of torch that compile what they are given in each call, such as ``torch.cond`` and ``flex_attention``.

Dynamo cannot trace modes of ours, and what it makes of an attempt stays in the process. So ``torch.cond`` runs the
branch that it stands for, and what else torch compiles within a call runs without our modes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any

import torch

from lightning_hetpipe.errors import PipelineRefusal
from lightning_hetpipe.redirect import Redirect
from lightning_hetpipe.torch_private.compiler import CompilerError
from lightning_hetpipe.torch_private.modes import without_dispatch_modes


@contextmanager
def compiled_calls_apart() -> Iterator[None]:
    """Within it, models may call these functions in any thread, whatever modes of ours are on."""
    with ExitStack() as stack:
        stack.callback(Redirect(torch, "cond", _decided).remove)
        stack.callback(Redirect(torch, "compile", _apart).remove)
        yield


def _decided(redirect: Redirect, pred: Any, true_fn: Any, false_fn: Any, operands: Any = ()) -> Any:
    """Run one branch, as ``torch.cond`` is documented to; a graph of the module around it decides by its data."""
    if torch.compiler.is_dynamo_compiling():
        return redirect.original(pred, true_fn, false_fn, operands)
    return (true_fn if pred else false_fn)(*operands)


def _apart(redirect: Redirect, model: Any = None, **options: Any) -> Any:
    """Compile ``model``; what is compiled within a mode of ours runs without the mode."""
    if model is None:
        return functools.partial(_apart, redirect, **options)
    made: Callable[..., Any] = redirect.original(model, **options)
    if not isinstance(made, FunctionType):
        return made

    @functools.wraps(made)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            with without_dispatch_modes():
                return made(*args, **kwargs)
        except CompilerError as error:
            torch.compiler.reset()  # what was compiled half would fail in later runs of the process
            reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise PipelineRefusal(
                "torch could not compile what a function of its own, such as torch.cond, was given in a minibatch"
                f" ({reason.rstrip('.:')}); call torch.cond by that name, or write it with torch.where"
            ) from error

    return run
