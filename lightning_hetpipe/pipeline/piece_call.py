"""The seam in the user's autograd graph where a piece ran in the pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from lightning_hetpipe.pipeline.autocast import Autocast
from lightning_hetpipe.pipeline.values import Gradients, Value
from lightning_hetpipe.private import graph_nodes


class PieceCall:
    """One call of a piece in one minibatch: what went in, what came out, and the gradients of both.

    User code around the pieces is backpropagated in its own thread, piece by piece from the last to the first: first
    down to this piece's outputs (``output_gradients``), then the pipeline computes ``input_gradients``, which the graph
    below hands on. The ``anchor`` is a leaf above nothing but this call, so that asking for its gradient makes autograd
    visit exactly what lies between the loss and this piece.
    """

    def __init__(self, piece: int, inputs: Value, autocast: Autocast) -> None:
        self.piece = piece
        self.inputs = inputs
        self.autocast = autocast
        self.anchor = torch.zeros((), requires_grad=True)
        self.collecting = False
        self.outputs = 0
        self._given: list[GradientEdge | None] = []
        self._node: Node | None = None
        self.output_gradients: Gradients | None = None
        self.input_gradients: Gradients | None = None
        self.also_gradients: Sequence[Tensor | None] = ()

    @property
    def needs_input_gradients(self) -> bool:
        """Whether the graph goes on below the call."""
        return any(edge is not None for edge in self._given)

    def connect(self, inputs: list[Tensor], outputs: Value) -> Any:
        """The outputs as the user sees them: part of the graph that leads to ``inputs``."""
        self.outputs = len(outputs.tensors)
        # Edges and not tensors: one that user code changes in place later has another place in the graph.
        self._given = [get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in inputs]
        join: Any = _Seam.apply  # torch has no types here
        joined = join(self, outputs.requires_grad, self.anchor, len(inputs), *inputs, *outputs.tensors)
        self._node = next((tensor.grad_fn for tensor in joined if tensor.requires_grad), None)
        return outputs.tree(joined)

    def collect(
        self, total: Tensor, above: PieceCall | None, keep_graph: bool, also: Sequence[Tensor] = ()
    ) -> Gradients:
        """Gradients of ``total`` with respect to this call's outputs; ``also_gradients`` are those of ``also``.

        What lies above the call ``above``, whose input gradients are there, is gone through again only where ``total``
        depends on these outputs also past it; otherwise the user's tensor hooks there run once, as in a plain backward.
        """
        self.collecting = True
        if above is None or above.input_gradients is None or _reaches(total.grad_fn, self._node, above._node):
            wanted = (self.anchor, *also)
            self.also_gradients = torch.autograd.grad(total, wanted, retain_graph=keep_graph, allow_unused=True)[1:]
        else:
            pairs = zip(above._given, above.input_gradients, strict=True)
            reached = [(edge, gradient) for edge, gradient in pairs if edge is not None and gradient is not None]
            if reached:
                edges, gradients = zip(*reached, strict=True)
                torch.autograd.grad(
                    edges, self.anchor, grad_outputs=gradients, retain_graph=keep_graph, allow_unused=True
                )
        self.collecting = False
        return self.output_gradients or [None] * self.outputs


def _reaches(start: Node | None, target: Node | None, barred: Node | None) -> bool:
    """Whether the graph of ``start`` leads to ``target`` on a way that does not go through ``barred``."""
    return any(node is target for node in graph_nodes([start], [barred]))


class _Seam(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: PieceCall, wanted: tuple[bool, ...], anchor: Tensor, inputs: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        outputs = tuple(tensor.detach() for tensor in tensors[inputs:])
        ctx.call, ctx.inputs, ctx.outputs = call, inputs, len(outputs)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(o for o, w in zip(outputs, wanted, strict=True) if not w))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        call: PieceCall = ctx.call
        if call.collecting:
            call.output_gradients = list(gradients)
            into: Gradients = [None] * ctx.inputs
        elif call.input_gradients is not None:
            into = call.input_gradients
        else:
            raise RuntimeError(
                "a gradient through a pipelined module was asked for inside training_step (torch.autograd.grad or"
                " .backward()); the pipeline computes gradients once, of the loss that training_step returns, so leave"
                " gradients with respect to inputs out, or train without HetPipeStrategy"
            )
        return (None, None, None, None, *into, *([None] * ctx.outputs))
