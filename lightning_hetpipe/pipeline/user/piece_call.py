"""The boundary in the user's autograd graph where a piece ran in the pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from lightning_hetpipe.errors import PipelineRefusal
from lightning_hetpipe.pipeline.dtypes import Autocast
from lightning_hetpipe.pipeline.streams import Stream, StreamEvent, UserStream
from lightning_hetpipe.pipeline.values import Addends, Gradients, Value, added, addends, moved, run_backward
from lightning_hetpipe.rules.schedule import Call
from lightning_hetpipe.torch_private.modes import UntoldFunction
from lightning_hetpipe.torch_private.tensors import graph_nodes


class PieceCall:
    """One call of a piece in one minibatch: inputs, outputs, and the gradients of both.

    User code around the pieces is backpropagated in its own thread, piece by piece from the last to the first. The pass
    goes down to this piece's outputs (``output_gradients``). Then the pipeline computes ``input_gradients``, which the
    graph below hands on. The ``anchor`` is a leaf above only this call. If its gradient is asked for, autograd visits
    exactly the nodes between the loss and this piece.

    Uses of an input after the call go through the boundary as well, because ``later_inputs`` replace the inputs there.
    So their gradient is there before the piece's own, which is added to it use by use, as in a plain backward.
    """

    def __init__(self, which: Call, inputs: Any, outside: UserStream | Stream) -> None:
        self.which = which
        self.inputs = Value.of(inputs)
        self.autocast = Autocast.current()
        self.inference = torch.is_inference_mode_enabled()
        self.anchor: Tensor
        self.outside = outside
        self.collecting = False
        self.collected: StreamEvent | None = None
        """Event behind the gradients of the outputs, which autograd computes in the stream of the call."""
        self.taken: StreamEvent | None = None
        """Event behind the gradients of the inputs."""
        self.outputs = 0
        self.later_inputs: list[tuple[Tensor, Tensor]] = []
        """Each input that requires a gradient, with its stand-in after the call."""
        self.given: list[GradientEdge | None] = []
        """Place in the user's graph of each input that requires a gradient."""
        self._node: Node | None = None
        self.output_gradients: Sequence[Tensor | None] | None = None
        self.later_gradients: Sequence[Tensor | None] = ()
        """Gradients of the uses after the call, for each input that requires a gradient, or empty until known."""
        self.input_gradients: Sequence[Tensor | None] | None = None

    def leads_to(self, tensor: Tensor) -> bool:
        """Return True if ``tensor`` was computed from the outputs."""
        return self._node is not None and self._node in set(graph_nodes([tensor.grad_fn], []))

    @property
    def needs_input_gradients(self) -> bool:
        """True if the graph goes on below the call."""
        return any(edge is not None for edge in self.given)

    def has_later_uses(self) -> bool:
        """Return True if inputs were used after the call. The call's own uses of them are then added one by one."""
        return any(gradient is not None for gradient in self.later_gradients)

    def connect(self, inputs: list[Tensor], outputs: Value) -> Any:
        """Join the call into the user's graph. Return the outputs as part of the graph that leads to ``inputs``."""
        self.outputs = len(outputs.tensors)
        self.anchor = _ZERO.detach().requires_grad_()  # cheaper than a new tensor
        # Edges and not tensors, because a later in-place change moves a tensor to another place in the graph.
        self.given = [get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in inputs]
        below = [tensor for tensor in inputs if tensor.requires_grad]
        join: Any = _PieceBoundary.apply  # torch has no types here
        joined = join(self, outputs.requires_grad, self.anchor, *below, *outputs.tensors)
        self._node = next((tensor.grad_fn for tensor in joined if tensor.requires_grad), None)
        if any(outputs.requires_grad):
            self.later_inputs = [*zip(below, joined[self.outputs :], strict=True)]
        return outputs.tree(joined[: self.outputs])

    def take_input_gradients(self, gradients: Gradients) -> None:
        """Move the pipeline's gradients from their stages' devices to the devices of the inputs."""
        found = iter(self.later_gradients)
        later = [None if edge is None else next(found, None) for edge in self.given]
        if used := [gradient for gradient in later if gradient is not None]:
            self.outside.join(self.collected, used)
        self.input_gradients = []
        for tensor, after, gradient in zip(self.inputs.tensors, later, gradients, strict=True):
            parts = Addends(addends(moved(after, tensor.device))) + tuple(addends(moved(gradient, tensor.device)))
            self.input_gradients.append(added(Addends(parts)) if parts else None)
        self.taken = self.outside.record(tensor.device for tensor in self.inputs.tensors)

    def close(self) -> None:
        """Release tensors and graph after the last differentiation. The call and its node hold each other, so Python
        would release them only at a garbage collection."""
        self.inputs = replace(self.inputs, tensors=())
        self.output_gradients = self.input_gradients = self._node = None
        self.later_gradients, self.later_inputs, self.given = (), [], []


def gradients_below(
    total: Tensor,
    above: PieceCall | None,
    leaves: Sequence[Tensor],
    later: Sequence[tuple[Tensor, Tensor]],
    within: AbstractContextManager[Any],
    *,
    keep_graph: bool,
    call: PieceCall | None = None,
) -> Sequence[Tensor | None]:
    """Return the gradients of the loss ``total`` with respect to ``leaves``.

    User code used the leaves before the call ``above``, which is None for the last call. The pass ends at the ``call``
    below it, if any, and sets the ``output_gradients`` of that. ``within`` is opened around the pass, for the user's
    hooks and recomputed checkpoints.

    Gradients are added, one by one, to the gradients in ``later``: pairs of a leaf, or its copy on another device, and
    the gradient of its later uses. If ``total`` depends on the leaves (or on ``call``) past ``above``, the graph above
    it is gone through again. Otherwise the user's tensor hooks there run once, as in a plain backward. Edges are
    passed, because with tensors torch would suspend the minibatch's view of its parameters, which hooks and recomputed
    checkpoints use.
    """
    edges = [get_gradient_edge(leaf) for leaf in (leaves if call is None else (call.anchor, *leaves))]
    starts, gradients = [get_gradient_edge(total)], [torch.ones_like(total)]
    if above is not None and above.input_gradients is not None:
        wanted = {None if call is None else call._node, *(edge.node for edge in edges if edge.node is not None)}
        if not any(node in wanted for node in graph_nodes([total.grad_fn], [above._node])):
            pairs = zip(above.given, above.input_gradients, strict=True)
            reached = [(edge, gradient) for edge, gradient in pairs if edge is not None and gradient is not None]
            starts, gradients = [edge for edge, _ in reached], [gradient for _, gradient in reached]
    for seen, gradient in later:  # autograd adds the gradient of a start before all else
        starts.append(get_gradient_edge(seen))
        gradients.append(gradient)
    found: Sequence[Tensor | None] = [None] * len(edges)
    if call is not None:
        call.collecting = True
    if starts:
        with within:
            found = run_backward(starts, gradients, edges, keep_graph)
    if call is None:
        return found
    call.collecting = False
    return found[1:]


class _PieceBoundary(UntoldFunction):
    """A function from the inputs that require a gradient to the outputs and to the inputs' stand-ins after the call."""

    @staticmethod
    def forward(
        ctx: Any, call: PieceCall, wanted: tuple[bool, ...], anchor: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        inputs = len(tensors) - len(wanted)
        outputs = [tensor.detach() for tensor in tensors[inputs:]]
        ctx.call, ctx.inputs, ctx.outputs = call, inputs, len(outputs)
        ctx.set_materialize_grads(False)
        if not all(wanted):
            ctx.mark_non_differentiable(*(o for o, w in zip(outputs, wanted, strict=True) if not w))
        return (*outputs, *(tensor.detach() for tensor in tensors[:inputs]))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        call: PieceCall = ctx.call
        if call.collecting:
            call.output_gradients, call.later_gradients = gradients[: ctx.outputs], gradients[ctx.outputs :]
            call.collected = call.outside.record(gradient.device for gradient in gradients if gradient is not None)
            into: Sequence[Tensor | None] = [None] * ctx.inputs
        elif call.input_gradients is None and not any(gradient is not None for gradient in gradients[: ctx.outputs]):
            into = gradients[ctx.outputs :]  # user code asks for a gradient of uses after the call
        elif call.input_gradients is not None:
            pairs = zip(call.given, call.input_gradients, strict=True)
            into = [gradient for edge, gradient in pairs if edge is not None]
            call.outside.join(call.taken, [gradient for gradient in into if gradient is not None])
        else:
            raise PipelineRefusal(
                "a gradient through a pipelined module was asked for inside training_step (torch.autograd.grad or"
                " .backward()), and the pipeline computes gradients once, of the loss that training_step returns; leave"
                " gradients with respect to inputs out"
            )
        return (None, None, None, *into, *([None] * ctx.outputs))


_ZERO = torch.zeros(())
