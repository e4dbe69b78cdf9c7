"""Private names of torch for modules: what they hold, their hooks, and what ``torch.compile`` makes of them.

If torch does not have a name:

- ``_has_any_global_hook``: this module cannot be imported.
- ``_forward_hooks``, ``_forward_pre_hooks``, ``_backward_hooks``, ``_backward_pre_hooks``: the first question for hooks
  of a module fails.
- ``_modules``: the first question for the parts of a module fails.
- ``_reset_parameters``: attention and transformers that are made on meta cannot get their first values.
- ``_parameters``, ``_buffers``, ``_flat_weights``, ``_flat_weight_refs``: if a model is spread over devices, all of
  these tensors are first moved to the root device, which may lack the memory. No error says so.
- ``_orig_mod``, ``_compiled_call_impl``: modules that are compiled by ``torch.compile`` are not known as such, and
  nothing looks through them. No error says so.
- ``_call_impl``: modules that are compiled in place fail when they are called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import _has_any_global_hook


def reset_of(module: nn.Module) -> Callable[[], object] | None:
    """Return the method of ``module`` that gives parameters and buffers their first values, or None."""
    if isinstance(module, nn.MultiheadAttention | nn.Transformer):
        return module._reset_parameters
    reset: Callable[[], object] | None = getattr(module, "reset_parameters", None)
    return reset if callable(reset) else None


def has_any_hooks(module: nn.Module) -> bool:
    """Return True if ``module`` has hooks, of a user or of torch."""
    return any(_hooks(module))


def has_hooks(module: nn.Module) -> bool:
    """Return True if a user has put hooks on ``module``. Hooks of ``torch.nn.utils`` (weight norm) do not count."""
    return any(_is_users(hook) for hooks in _hooks(module) for hook in hooks.values())


@contextmanager
def without_hooks(module: nn.Module) -> Iterator[None]:
    """Context manager that removes a user's hooks of ``module`` itself, and at its end those added within."""
    with _without(module, _is_users):
        yield


@contextmanager
def without_checkpoint_hooks(module: nn.Module) -> Iterator[None]:
    """Context manager that removes hooks by which Hugging Face lets checkpoints begin at frozen weights."""
    with _without(module, _is_for_checkpoints):
        yield


@contextmanager
def _without(module: nn.Module, is_meant: Callable[[Any], bool]) -> Iterator[None]:
    before = [(hooks, dict(hooks)) for hooks in _hooks(module)]
    for hooks, all_hooks in before:
        for key in [key for key, hook in all_hooks.items() if is_meant(hook)]:
            del hooks[key]
    try:
        yield
    finally:
        for hooks, all_hooks in before:
            hooks.clear()
            hooks.update(all_hooks)


def _hooks(module: nn.Module) -> list[dict[int, Any]]:
    return [module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks]


def _is_users(hook: Any) -> bool:
    return not _is_of_torch(hook) and not _is_for_checkpoints(hook)


def _is_of_torch(hook: Any) -> bool:
    return type(hook).__module__.startswith("torch.nn.utils")


def computing_hooks(module: nn.Module) -> list[Callable[[Any, Any], None]]:
    """Return the hooks of ``torch.nn.utils`` that compute weights of ``module`` before each forward."""
    return [hook for hook in module._forward_pre_hooks.values() if _is_of_torch(hook)]


def _is_for_checkpoints(hook: Any) -> bool:
    return getattr(hook, "__name__", None) in ("make_inputs_require_grads", "make_inputs_require_grad")


def has_global_hooks() -> bool:
    """Return True if a user has put hooks on all modules of the process."""
    has_any: Any = _has_any_global_hook  # torch has no types here
    return bool(has_any())


_TENSORS = ("_parameters", "_buffers", "_flat_weights", "_flat_weight_refs")
"""Attributes in which a module keeps its tensors. An RNN additionally has lists of its weights."""


@contextmanager
def without_tensors(parts: Sequence[nn.Module]) -> Iterator[None]:
    """Context manager in which ``parts`` seem to have no parameters and buffers, so that ``Module.to`` leaves these."""
    held = [(part, {name: vars(part)[name] for name in _TENSORS if name in vars(part)}) for part in parts]
    try:
        for part in parts:
            vars(part).update(_parameters={}, _buffers={})
        yield
    finally:
        for part, tensors in held:
            vars(part).update(tensors)


def children(module: nn.Module) -> Iterable[nn.Module | None]:
    """Return the modules that ``module`` itself holds. ``module.children()`` hashes each, slow for metrics."""
    return module._modules.values()


def behind_compile(module: nn.Module) -> nn.Module | None:
    """Return the module that ``torch.compile`` has wrapped as ``module``, or None."""
    children = vars(module).get("_modules")  # a traced module has none, and a scripted one another kind of mapping
    behind = children.get("_orig_mod") if isinstance(children, dict) else None
    return behind if isinstance(behind, nn.Module) else None


COMPILED_CALL = "_compiled_call_impl"
"""Attribute that ``module.compile()`` sets. It is called in place of the module's own hooks and ``forward``."""


def call_uncompiled(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call ``module``, with its hooks, as if it had not been compiled in place."""
    call: Any = module._call_impl  # torch has no types here
    return call(*args, **kwargs)
