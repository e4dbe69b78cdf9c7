"""The seam in the user's autograd graph where a piece ran in the pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from lightning_hetpipe.pipeline.autocast import Autocast
from lightning_hetpipe.pipeline.lanes import Mark, Outside, move
from lightning_hetpipe.pipeline.values import Gradients, Value
from lightning_hetpipe.private import graph_nodes, run_backward


class PieceCall:
    """One call of a piece in one minibatch: what went in, what came out, and the gradients of both.

    User code around the pieces is backpropagated in its own thread, piece by piece from the last to the first: first
    down to this piece's outputs (``output_gradients``), then the pipeline computes ``input_gradients``, which the graph
    below hands on. The ``anchor`` is a leaf above nothing but this call, so that asking for its gradient makes autograd
    visit exactly what lies between the loss and this piece.
    """

    def __init__(self, piece: int, inputs: Value, autocast: Autocast, outside: Outside) -> None:
        self.piece = piece
        self.inputs = inputs
        self.autocast = autocast
        self.anchor = torch.zeros((), requires_grad=True)
        self.outside = outside
        self.collecting = False
        self.collected: Mark | None = None
        """Behind the gradients of the outputs: autograd finds them in the stream in which user code made the call."""
        self.taken: Mark | None = None
        """Behind the gradients of the inputs."""
        self.outputs = 0
        self._given: list[GradientEdge | None] = []
        self._node: Node | None = None
        self.output_gradients: Gradients | None = None
        self.input_gradients: Gradients | None = None

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

    def take_input_gradients(self, gradients: Gradients) -> None:
        """The pipeline has computed them, each on the device of its stage: the graph below wants it on its input's."""
        pairs = zip(gradients, self.inputs.tensors, strict=True)
        self.input_gradients = [None if g is None else move(g, tensor.device) for g, tensor in pairs]
        self.taken = self.outside.mark(tensor.device for tensor in self.inputs.tensors)

    def close(self) -> None:
        """Lets go of tensors and graph, as nothing is differentiated any more.

        The call and its node hold each other, so that they would stay until Python collects garbage.
        """
        self.inputs = replace(self.inputs, tensors=())
        self.output_gradients = self.input_gradients = self._node = None
        self._given = []

    def collect(
        self,
        total: Tensor,
        above: PieceCall | None,
        leaves: Sequence[Tensor],
        within: AbstractContextManager[Any],
        keep_graph: bool,
    ) -> tuple[Gradients, Sequence[Tensor | None]]:
        """Gradients of ``total`` with respect to this call's outputs, and to ``leaves`` that came after it.

        Args:
            total: What is differentiated.
            above: The next call, whose input gradients are there; None for the last one.
            leaves: Used by user code between this call and ``above``.
            within: Opened around the pass, for the user's hooks and what is computed again.
            keep_graph: Whether the graph is gone through again, further down.
        """
        self.collecting = True
        targets = [self.anchor, *leaves]
        _, *found = below(total, above, targets, within, keep_graph, self._node)
        self.collecting = False
        return self.output_gradients or [None] * self.outputs, found


def below(
    total: Tensor,
    above: PieceCall | None,
    leaves: Sequence[Tensor],
    within: AbstractContextManager[Any],
    keep_graph: bool,
    call: Node | None = None,
) -> Sequence[Tensor | None]:
    """Gradients of ``total`` with respect to ``leaves``, which user code has used before the call ``above``.

    What lies above that call, whose input gradients are there, is gone through again only where ``total`` depends on
    the leaves (or on the node ``call``) also past it; otherwise the user's tensor hooks there run once, as in a plain
    backward. All is given as edges: with tensors, torch would put the minibatch's view of its parameters aside, which
    hooks and recomputed checkpoints need.
    """
    targets = [get_gradient_edge(leaf) for leaf in leaves]
    starts, gradients = [get_gradient_edge(total)], [torch.ones_like(total)]
    if above is not None and above.input_gradients is not None:
        wanted = {call, *(target.node for target in targets if target.node is not None)}
        if not any(node in wanted for node in graph_nodes([total.grad_fn], [above._node])):
            pairs = zip(above._given, above.input_gradients, strict=True)
            reached = [(edge, gradient) for edge, gradient in pairs if edge is not None and gradient is not None]
            if not reached:
                return [None] * len(leaves)
            starts, gradients = [edge for edge, _ in reached], [gradient for _, gradient in reached]
    with within:
        return run_backward(starts, gradients, targets, keep_graph)


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
            call.collected = call.outside.mark(gradient.device for gradient in gradients if gradient is not None)
            into: Gradients = [None] * ctx.inputs
        elif call.input_gradients is not None:
            into = call.input_gradients
            call.outside.join(call.taken, [gradient for gradient in into if gradient is not None])
        else:
            raise RuntimeError(
                "a gradient through a pipelined module was asked for inside training_step (torch.autograd.grad or"
                " .backward()); the pipeline computes gradients once, of the loss that training_step returns, so leave"
                " gradients with respect to inputs out, or train without HetPipeStrategy"
            )
        return (None, None, None, None, *into, *([None] * ctx.outputs))
