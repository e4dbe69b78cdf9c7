"""Fingerprint of the live layers beside their weights and buffers. Copies in stages must not fall behind them."""

from __future__ import annotations

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
from lightning_hetpipe.errors import PipelineRefusal
from lightning_hetpipe.torch_private.modules import contents, has_hooks
from lightning_hetpipe.torch_private.tensors import version_counter


class Fingerprint:
    """Modules, parameters, buffers, hooks and plain attributes of ``pieces`` at the last :meth:`take`."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = pieces
        self.take()

    def take(self) -> None:
        """Take the layers as they are now."""
        self._seen = list(self._now())
        self._modules = [module for piece in self.pieces for module in piece.module.modules()]
        self._beside = list(self._found_beside())
        self._contents = self._held()
        self._parameters = [_parameters(piece) for piece in self.pieces]

    def with_own_parameters(self, piece: int) -> bool:
        """Return True if piece number ``piece`` holds its own parameters now, without replacements."""
        return _parameters(self.pieces[piece]) == self._parameters[piece]

    def changed(self) -> str | None:
        """Return the name of what has changed since :meth:`take`, or None."""
        held = self._held()
        if all(map(same_objects, held, self._contents)):
            return None
        for (path, thing), one, other in zip(self._beside, held, self._contents, strict=False):
            if not same_objects(one, other):
                return path if isinstance(thing, Tensor) else f"{path}.{_different(thing, one, other)}"
        now = list(self._now())
        for (path, *parts, attributes), (_, *parts_before, attributes_before) in zip(now, self._seen, strict=False):
            if parts != parts_before:
                return str(path)
            if name := changed_attribute(attributes_before, attributes):
                return f"{path}.{name}"
        if len(now) != len(self._seen):
            return self.pieces[-1].name
        self._contents = held  # other objects, which are equal
        return None

    def _held(self) -> list[tuple[Any, ...]]:
        """Return objects that show a change and compare fast, first of things beside the modules, then of modules."""
        beside = [
            (_SMALL.setdefault(version_counter(thing), version_counter(thing)),)
            if isinstance(thing, Tensor)
            else (*vars(thing), *vars(thing).values())
            for _, thing in self._beside
        ]
        return beside + [contents(module) for module in self._modules]

    def _found_beside(self) -> Iterator[tuple[str, Any]]:
        """Yield tensors and objects (configurations) in plain attributes, which may be changed in place."""
        seen: set[int] = set()
        for piece in self.pieces:
            for name, module in piece.module.named_modules():
                for attribute, value in plain_attributes(module).items():
                    if id(value) not in seen and (isinstance(value, Tensor) or _is_plain_object(value)):
                        seen.add(id(value))
                        yield ".".join(part for part in (piece.name, name, attribute) if part), value

    def modes(self) -> list[bool]:
        """Return the modes of all modules: True for training."""
        return [module.training for module in self._modules]

    def other_mode(self, modes: list[bool]) -> str | None:
        """Return the name of a module whose mode differs from ``modes``, or None."""
        for module, training in zip(self._modules, modes, strict=True):
            if module.training is not training:
                return next(
                    f"{piece.name}.{name}" if name else piece.name
                    for piece in self.pieces
                    for name, part in piece.module.named_modules()
                    if part is module
                )
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

    def _now(self) -> Iterator[tuple[Any, ...]]:
        for piece in self.pieces:
            for name, module in piece.module.named_modules(remove_duplicate=False):
                parameters = [(key, id(value)) for key, value in module.named_parameters(recurse=False)]
                buffers = [key for key, _ in module.named_buffers(recurse=False)]  # exchanged ones are read anew
                graph = None
                if piece.captured is not None:  # which holds these tensors, and has been made for this mode
                    graph = (module.training, [id(buffer) for buffer in module.buffers(recurse=False)])
                hooks = module is not piece.module and has_hooks(module)
                path = f"{piece.name}.{name}" if name else piece.name
                yield path, id(module), parameters, buffers, hooks, graph, attributes_with_contents(module)


_SMALL: dict[int, int] = {}
"""One object for each number, so that counters can be compared by identity."""


def _is_plain_object(value: Any) -> bool:
    """Return True if ``value`` is a user's object with settings: no module, function, class or library's object."""
    kind = type(value)
    if isinstance(value, nn.Module | type) or callable(value) or not hasattr(value, "__dict__"):
        return False
    return kind.__module__.partition(".")[0] not in ("torch", "builtins", "lightning", "lightning_hetpipe", "enum")


def _different(thing: Any, one: tuple[Any, ...], other: tuple[Any, ...]) -> str:
    """Name the first attribute of ``thing`` in which two of its states differ."""
    now, before = (dict(zip(state[: len(state) // 2], state[len(state) // 2 :], strict=True)) for state in (one, other))
    return next((name for name in (*now, *before) if now.get(name, thing) is not before.get(name, thing)), "attributes")


def _parameters(piece: Piece) -> list[int]:
    return [id(parameter) for parameter in piece.module.parameters()]
