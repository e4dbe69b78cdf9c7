"""Finds the pieces of a LightningModule and their layers, by watching one ordinary ``training_step``.

A *piece* is an ``nn.Sequential`` that holds trainable parameters and is called in ``training_step`` from outside every
other such Sequential. Its *layers* are its children; a child that is itself a plain ``nn.Sequential`` is taken apart.
The watched step runs as it would without us, so nothing is guessed: which modules are called, in which order, with what
inputs, and whether a layer changes its input in place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hetpipe.capture.redirect import Redirect
from lightning_hetpipe.errors import SettingError, nearest
from lightning_hetpipe.pipeline.chance import Chance
from lightning_hetpipe.pipeline.stage import Layer
from lightning_hetpipe.pipeline.values import Value, tensors_of
from lightning_hetpipe.private import graph_leaves, has_hooks, version_counter


@dataclass
class Piece:
    """One pipelined module.

    Attributes:
        name: Its path in the LightningModule.
        module: The ``nn.Sequential``.
        layers: Its layers, in order.
        inputs: What each layer was given in the watched step, detached.
    """

    name: str
    module: nn.Sequential
    layers: list[Layer] = field(default_factory=list)
    inputs: list[Value] = field(default_factory=list)


def named_pieces(root: nn.Module, setting: str | Sequence[str] | None) -> list[str] | None:
    """The names in the ``module`` setting, checked; None where pieces are to be found.

    Raises:
        SettingError: for a name that is no module of ``root``, or no plain ``nn.Sequential``.
    """
    if setting is None:
        return None
    names = [setting] if isinstance(setting, str) else list(setting)
    modules = {name: module for name, module in root.named_modules(remove_duplicate=False) if name}
    first_names = {id(module): name for name, module in root.named_modules()}
    for name in names:
        if name not in modules:
            raise SettingError(
                f"module={name!r} is not a module of {type(root).__name__}"
                f"{nearest(name, modules) or '; its modules are ' + ', '.join(n for n, _ in root.named_children())}"
            )
        if not is_plain_sequential(modules[name]):
            raise SettingError(
                f"module={name!r} is a {type(modules[name]).__name__}, and this release pipelines nn.Sequential only;"
                " write its layers as an nn.Sequential, or name one"
            )
    return [first_names[id(modules[name])] for name in names]


def is_plain_sequential(module: nn.Module) -> bool:
    """Whether ``module`` does what ``nn.Sequential`` does: call its children in order."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


class Watch:
    """Watches one ``training_step`` of ``root``.

    Args:
        root: The LightningModule.
        names: The pieces to pipeline; None for all.
        chance: The run's random numbers; layers draw from them in the watched step too.
        minibatch: The number of the watched minibatch.
    """

    def __init__(self, root: nn.Module, names: Collection[str] | None, chance: Chance, minibatch: int) -> None:
        self.pieces: list[Piece] = []
        self._root = root
        self._names = names
        self._chance = chance
        self._minibatch = minibatch
        self._inside = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within it, calls of Sequentials are seen. Nothing of it remains in the modules afterwards."""
        redirects: dict[str, Redirect] = {}
        for name, module in self._root.named_modules():
            if module is not self._root and is_plain_sequential(module) and "forward" not in vars(module):
                redirects[name] = Redirect(module, "forward", partial(self._run, name, module))
        try:
            yield
        finally:
            for redirect in redirects.values():
                redirect.remove()

    def check(self, loss: Tensor) -> None:
        """Refuses what cannot be pipelined, after the watched step has given ``loss``."""
        if not self.pieces:
            asked = f" ({', '.join(self._names)})" if self._names else ""
            raise SettingError(
                f"training_step called no nn.Sequential with trainable parameters{asked}, and this release pipelines"
                " nn.Sequential only; write your network as one, or use another strategy"
            )
        refuse_outside(self._root, {id(p) for piece in self.pieces for p in piece.module.parameters()}, loss)

    def _run(self, name: str, module: nn.Sequential, redirect: Redirect, value: Any) -> Any:
        """The redirected ``forward`` of the Sequential ``name``."""
        wanted = self._names is None or name in self._names
        if self._inside or not wanted or not any(p.requires_grad for p in module.parameters()):
            return redirect.original(value)
        if any(piece.module is module for piece in self.pieces):
            raise SettingError(
                f"the pipelined module '{name}' was called twice in one training_step; call it once, on inputs joined"
                " with torch.cat, or use another strategy"
            )
        piece = Piece(name, module)
        self.pieces.append(piece)
        self._inside = True
        try:
            return self._run_layers(piece, value)
        finally:
            self._inside = False

    def _run_layers(self, piece: Piece, value: Any) -> Any:
        found = list(_layers(piece.name, piece.module))
        with self._chance.watch(dict(found), self._minibatch) as calls:
            for name, module in found:
                if hooked := next((m for m in module.modules() if has_hooks(m)), None):
                    raise SettingError(
                        f"layer '{name}' has a hook (on {type(hooked).__name__}), which a stage would run at the same"
                        " time as other user code; remove it, or put it on the pipelined module itself"
                    )
                if owner := next((m for m in module.modules() if _holds_generator(m)), None):
                    raise SettingError(
                        f"layer '{name}' keeps a torch.Generator of its own (in {type(owner).__name__}), which the"
                        " copies of the layer would not share; draw without it, then every minibatch has its own"
                        " random numbers"
                    )
                piece.inputs.append(Value.of(value))
                given = tensors_of(value)
                before = [version_counter(tensor) for tensor in given]
                weights = [version_counter(parameter) for parameter in module.parameters()]
                output = calls[name](value)
                if weights != [version_counter(parameter) for parameter in module.parameters()]:
                    raise SettingError(
                        f"layer '{name}' changes its own weights in forward (as nn.Embedding(max_norm=...) does), which"
                        " only its copies would see; change them in a callback, after the optimizer's step"
                    )
                mutates = before != [version_counter(tensor) for tensor in given]
                if mutates and not piece.layers:
                    raise SettingError(
                        f"the first layer of the pipelined module '{piece.name}' changes its input in place, which"
                        " training_step could not see; make it work out of place (inplace=False)"
                    )
                piece.layers.append(Layer(name, module, mutates))
                value = output
        return value


def refuse_outside(root: nn.Module, inside: Collection[int], loss: Tensor) -> None:
    """Refuses, by name, a trainable parameter that ``loss`` reaches and that is not one of ``inside`` (by ``id``).

    Raises:
        SettingError: because its gradient would belong to another version than its minibatch's.
    """
    reached = [leaf for leaf in graph_leaves(loss) if id(leaf) not in inside]
    if not reached:
        return
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    for leaf in reached:
        if id(leaf) in names:
            raise SettingError(
                f"the loss depends on the parameter '{names[id(leaf)]}' outside every pipelined nn.Sequential, and this"
                " release keeps versions of those only; move the module that uses it into the nn.Sequential, freeze it,"
                " or for an L2 term use the optimizer's weight_decay"
            )


def _holds_generator(module: nn.Module) -> bool:
    return any(isinstance(value, torch.Generator) for value in vars(module).values())


def _layers(name: str, sequential: nn.Sequential) -> Iterator[tuple[str, nn.Module]]:
    # named_children() would leave out a child that stands in a second position.
    for own, child in sequential.named_modules(remove_duplicate=False):
        if not own or "." in own:
            continue
        if is_plain_sequential(child) and not has_hooks(child):
            yield from _layers(f"{name}.{own}", child)
        else:
            yield f"{name}.{own}", child
