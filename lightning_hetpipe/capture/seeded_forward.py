"""Runs a module as it is, with its random operations drawing as those of stages do (law L7)."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_hetpipe.capture.pieces import is_plain_sequential, layers_of
from lightning_hetpipe.capture.single_layer import SingleLayer, is_single
from lightning_hetpipe.pipeline.random.generators import RandomGenerators


def run_drawing(
    name: str,
    module: nn.Module,
    chance: RandomGenerators,
    batch: int | str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """What ``module.forward(*args, **kwargs)`` gives, for ``batch``; hooks of ``module`` itself do not run.

    Draws are named as in stages: by the position of a layer in an ``nn.Sequential``.
    """
    if isinstance(module, nn.Sequential) and is_plain_sequential(module):
        (value,) = (*args, *kwargs.values())
        layers = list(layers_of(name, module))
        with chance.watch(dict(layers), batch) as calls:
            for path, _ in layers:
                value = calls[path](value)
        return value
    if is_single(module):
        with chance.watch({name: SingleLayer(module)}, batch) as calls:
            return calls[name]((args, kwargs))
    with chance.watch({name: module}, batch):
        return module.forward(*args, **kwargs)
