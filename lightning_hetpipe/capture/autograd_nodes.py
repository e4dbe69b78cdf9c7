"""Autograd nodes of one call of a module, by which two calls of equal values are told apart."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from lightning_hetpipe.pipeline.values import Value, tensors_of
from lightning_hetpipe.torch_private.autograd import graph_nodes


@dataclass(frozen=True)
class AutogradNodes:
    """Autograd nodes of one call of a module: a ``detach()`` or ``no_grad()`` in it changes nothing else.

    Attributes:
        inputs: The shape of each input, and whether it requires a gradient.
        nodes: How many nodes of each kind autograd goes through. (Casts are left out, as autocast remembers some.)
    """

    inputs: tuple[tuple[torch.Size, bool], ...]
    nodes: Counter[str]

    @staticmethod
    def of(inputs: Value, output: Any) -> AutogradNodes:
        nodes = graph_nodes([tensor.grad_fn for tensor in tensors_of(output)], [])
        shapes = [tensor.shape for tensor in inputs.tensors]
        return AutogradNodes(
            tuple(zip(shapes, inputs.requires_grad, strict=True)),
            Counter(name for name in (node.name() for node in nodes) if not name.startswith("ToCopy")),
        )

    def differs(self, before: AutogradNodes | None) -> bool:
        """Tell whether it goes through other nodes than ``before``, for inputs of the same shapes."""
        return before is not None and self.inputs == before.inputs and self.nodes != before.nodes
