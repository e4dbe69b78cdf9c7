"""Sequentials: modules that only call their children in order, so that their layers can be seen without a graph.

A child that is itself such an ``nn.Sequential`` is taken apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from lightning_hetpipe.capture.plain_attributes import plain_attributes
from lightning_hetpipe.pipeline.random.generators import may_draw
from lightning_hetpipe.torch_private.modules import has_hooks


def is_plain_sequential(module: nn.Module) -> bool:
    """Tell whether ``module`` calls its children in order, as ``nn.Sequential`` does, and these can be copied.

    They cannot where one holds a module that it is not made of, such as the LightningModule.
    """
    if not isinstance(module, nn.Sequential) or type(module).forward is not nn.Sequential.forward:
        return False
    parts = set(module.modules())
    held = (value for part in parts for value in plain_attributes(part).values())
    if any(isinstance(item, nn.Module) and item not in parts for value in held for item in _items(value)):
        return False
    forward = plain_attributes(module).get("forward")
    # A deep copy made while a Redirect stood there has the class's own method instead.
    own = getattr(forward, "__self__", None) is module and getattr(forward, "__func__", None) is type(module).forward
    return forward is None or own


def _items(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | set) else (value,)


def layers_of(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The layers of ``module`` at ``name``, with their paths: itself, if it is no plain ``nn.Sequential``."""
    if not is_plain_sequential(module):
        yield name, module
        return
    # named_children() would leave out a child that stands in a second position.
    for own, child in module.named_modules(remove_duplicate=False):
        if not own or "." in own:
            continue
        if is_plain_sequential(child) and not has_hooks(child):
            yield from layers_of(f"{name}.{own}", child)
        else:
            yield f"{name}.{own}", child


def is_torchs_own(module: nn.Module) -> bool:
    """Tell whether ``module``, and all in it, are torch.nn's own: it runs no code of the user's."""
    return all(type(part).__module__.startswith("torch.nn.") for part in module.modules())


def has_users_layers(module: nn.Module) -> bool:
    """Tell whether a layer of the Sequential ``module`` runs the user's code, which a graph can stand for."""
    return not all(is_torchs_own(layer) for _, layer in layers_of("", module))


def shares_draws(module: nn.Module) -> bool:
    """Tell whether a module that may draw random numbers is in several layers of the Sequential ``module``.

    Its draws are named by the layer (law L7), and in a graph they would be named by the module.
    """
    seen, shared = set[nn.Module](), set[nn.Module]()
    for _, layer in layers_of("", module):
        parts = set(layer.modules())
        shared |= seen & parts
        seen |= parts
    return any(map(may_draw, shared))
