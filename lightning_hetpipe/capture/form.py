"""What the live layers are, beside their weights and buffers: stages hold copies, which must not fall behind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from lightning_hetpipe.capture.attributes import changed_attribute, plain_attributes
from lightning_hetpipe.capture.pieces import Piece, layers_of, refuse_hooks
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.private import has_hooks


class Form:
    """The form of ``pieces`` when last taken: their modules, parameters, buffers, hooks and plain attributes."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = pieces
        self.names = [piece.name for piece in pieces]
        self.take()

    def take(self) -> None:
        """The layers are as they should be now."""
        self._seen = list(self._now())
        self._parameters = [_parameters(piece) for piece in self.pieces]

    def with_own_parameters(self, piece: int) -> bool:
        """Whether piece number ``piece`` holds its own parameters now, and not some that stand in for them."""
        return _parameters(self.pieces[piece]) == self._parameters[piece]

    def changed(self) -> str | None:
        """The name of what has changed since :meth:`take`; None if nothing has."""
        now = list(self._now())
        for (path, *parts, attributes), (_, *parts_before, attributes_before) in zip(now, self._seen, strict=False):
            if parts != parts_before:
                return str(path)
            if name := changed_attribute(attributes_before, attributes):
                return f"{path}.{name}"
        return None if len(now) == len(self._seen) else self.pieces[-1].name

    def follow(self) -> None:
        """Captures graphs anew, and refuses changes that copying the layers anew does not answer.

        Raises:
            SettingError: for layers that were replaced, and for hooks.
        """
        for piece in self.pieces:
            if piece.captured is not None:
                refuse_hooks(piece.name, piece.module)
                piece.captured.capture_again()
                continue
            assert isinstance(piece.module, nn.Sequential)
            now = list(layers_of(piece.name, piece.module))
            for name, module in now:
                refuse_hooks(name, module)
            if [module for _, module in now] != [layer.module for layer in piece.layers]:
                raise SettingError(
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
                yield path, id(module), parameters, buffers, hooks, graph, plain_attributes(module)


def _parameters(piece: Piece) -> list[int]:
    return [id(parameter) for parameter in piece.module.parameters()]
