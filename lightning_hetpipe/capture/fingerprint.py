"""Fingerprint of the live layers beside their weights and buffers. Copies in stages must not fall behind them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_hetpipe.capture.contents import (
    attributes_with_contents,
    changed_attribute,
    plain_attributes,
    same_objects,
)
from lightning_hetpipe.capture.pieces import Piece, refuse_hooks
from lightning_hetpipe.capture.reached_values import ReachedValues
from lightning_hetpipe.errors import PipelineRefusal
from lightning_hetpipe.torch_private.modules import contents, has_hooks


class Fingerprint:
    """Modules, parameters, buffers, hooks and plain attributes of ``pieces`` at the last :meth:`take`."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = pieces
        self.take()

    def take(self) -> None:
        """Take the layers as they are now."""
        self._modules = [module for piece in self.pieces for module in piece.module.modules()]
        self._seen = self._now()
        self._contents = [*map(contents, self._modules)]
        self._beside = self._found_beside().now()
        self._parameters = [_parameters(piece) for piece in self.pieces]

    def with_own_parameters(self, piece: int) -> bool:
        """Return True if piece number ``piece`` holds its own parameters now, without replacements."""
        return _parameters(self.pieces[piece]) == self._parameters[piece]

    def changed(self) -> str | None:
        """Return the name of what has changed since :meth:`take`, or None."""
        if (difference := next(self._beside.differences(), None)) is not None:
            return difference.path
        held = [*map(contents, self._modules)]
        if all(map(same_objects, held, self._contents)):
            return None
        if (name := changed_attribute(self._seen, self._now())) is None:
            self._contents = held  # other objects, which are equal
        return name

    def _found_beside(self) -> ReachedValues:
        """Return tensors and objects (configurations) in plain attributes, which may be changed in place."""
        found = ReachedValues((), (), most=sys.maxsize)
        for path, _, module in self._parts():
            for attribute, value in plain_attributes(module).items():
                if isinstance(value, Tensor):
                    found.value(f"{path}.{attribute}", value)
                elif _is_plain_object(value):
                    found.attributes(f"{path}.{attribute}", value)
        found.follow()
        return found

    def modes(self) -> list[bool]:
        """Return the modes of all modules: True for training."""
        return [module.training for module in self._modules]

    def other_mode(self, modes: list[bool]) -> str | None:
        """Return the name of a module whose mode differs from ``modes``, or None."""
        for module, training in zip(self._modules, modes, strict=True):
            if module.training is not training:
                return next(path for path, _, part in self._parts() if part is module)
        return None

    def follow(self) -> None:
        """Capture graphs anew, and refuse changes that new copies of the layers would not follow.

        Raises:
            SettingError: for layers that were replaced, and for hooks.
        """
        for piece in self.pieces:
            if piece.captured is not None:
                refuse_hooks(piece.name, piece.module)
                piece.captured.capture_again()
                continue
            now = piece.modules_of_layers()
            for name, module in now:
                refuse_hooks(name, module)
            if [module for _, module in now] != [layer.module for layer in piece.layers]:
                raise PipelineRefusal(
                    f"layers of '{piece.name}' were added, removed or replaced after the first minibatch, which has"
                    " shown the pipeline what there is; do it before fit, or in setup or configure_model"
                )

    def _parts(self) -> Iterator[tuple[str, Piece, nn.Module]]:
        """Yield the path of each module, its piece, and the module."""
        for piece in self.pieces:
            for path, module in piece.module.named_modules(prefix=piece.name, remove_duplicate=False):
                yield path, piece, module

    def _now(self) -> dict[str, Any]:
        """Return the present form of each module, and its plain attributes, by their paths."""
        found: dict[str, Any] = {}
        for path, piece, module in self._parts():
            parameters = [(key, id(value)) for key, value in module.named_parameters(recurse=False)]
            buffers = [key for key, _ in module.named_buffers(recurse=False)]  # exchanged ones are read anew
            graph: tuple[Any, ...] = ()
            if piece.captured is not None:  # which holds these tensors, and has been made for this mode
                graph = (module.training, *map(id, module.buffers(recurse=False)))
            hooks = module is not piece.module and has_hooks(module)
            found[path] = (id(module), *parameters, *buffers, hooks, *graph)
            found |= {f"{path}.{name}": value for name, value in attributes_with_contents(module).items()}
        return found


def _is_plain_object(value: Any) -> bool:
    """Return True if ``value`` is a user's object with settings: no module, function, class or library's object."""
    kind = type(value)
    if isinstance(value, nn.Module | type) or callable(value) or not hasattr(value, "__dict__"):
        return False
    return kind.__module__.partition(".")[0] not in ("torch", "builtins", "lightning", "lightning_hetpipe", "enum")


def _parameters(piece: Piece) -> list[int]:
    return [id(parameter) for parameter in piece.module.parameters()]
