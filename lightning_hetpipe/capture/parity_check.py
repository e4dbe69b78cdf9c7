"""Capture of a piece, and comparison of its graph with the module itself: both must give the very same values.

They are compared on the watched call. They are compared again when a graph may have fallen behind: after a change of
frozen Python values, and for a new graph. They are also compared at minibatches 2, 4, 8, and so on, and at each epoch's
first minibatch.

Values do not show what acts only in the backward pass. So gradients of the watched call are also compared, for equal
gradients of the outputs. The module's gradients come from the call's autograd graph, which its loss keeps, so the
module does not run again. The graph's gradients are computed from the last layer to the first, so one layer's
activations are held at a time.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from lightning_hetpipe.accelerator import accelerates
from lightning_hetpipe.capture.captured import Captured, graph_layer
from lightning_hetpipe.capture.contents import PLAIN, sets_attribute, without_opaque
from lightning_hetpipe.capture.effects import refuse_noticed, untouched
from lightning_hetpipe.capture.export import decides
from lightning_hetpipe.capture.noticed_calls import IN_NO_GRAPH, NOWHERE
from lightning_hetpipe.capture.observation import WatchedCall
from lightning_hetpipe.capture.pieces import Piece
from lightning_hetpipe.capture.prepared_modules import without_checkpoints
from lightning_hetpipe.capture.variant import AutogradNodes
from lightning_hetpipe.errors import PipelineRefusal
from lightning_hetpipe.pipeline.dtypes import Autocast
from lightning_hetpipe.pipeline.graph_layer import GraphLayer, own_path
from lightning_hetpipe.pipeline.operands import across_devices_of
from lightning_hetpipe.pipeline.random.generators import RandomGenerators
from lightning_hetpipe.pipeline.user.user_section import states_of_torch
from lightning_hetpipe.pipeline.values import Value, all_equal, equal, tensors_of
from lightning_hetpipe.pipeline.weight_stash import copy_of
from lightning_hetpipe.torch_private.tensors import (
    address_of,
    following_nodes,
    graph_leaves,
    graph_nodes,
    without_gradient_hooks,
)

RUNS = 3
"""Repetitions of a graph on an accelerator that show whether its last bits vary."""

MOST_NEEDLESS = 20
"""Number of comparisons after changed values without a difference at which a warning is given."""


def capture(piece: Piece, calls: Sequence[WatchedCall], generators: RandomGenerators, minibatch: int) -> None:
    """Give ``piece`` its layers, and the input of each layer in each of the watched ``calls``.

    Raises:
        SettingError: if it cannot be captured, or if its graph gives other values than the module. A piece that needs
            no graph is also refused if its graph depends on values of data.
    """
    for ordinal, call in enumerate(calls):
        args, kwargs = call.given.tree(call.given.tensors)
        with call.autocast.opened():
            if piece.captured is None:
                piece.captured = Captured(piece.name, piece.module, args, kwargs, call.frozen)
                piece.layers = piece.captured.layers
            value = piece.value(*call.given.tree(call.given.leaves()))  # which want gradients, if those did
            if piece.captured.decides is not None and not piece.needs_graph():
                raise decides(piece.name, f" at {piece.captured.decides}")
            run = partial(_run_graph, piece, value, call.buffers, partial(generators.minibatch, minibatch, ordinal))
            found, inputs = run()
        piece.inputs.append(inputs)
        if call.was_changed:  # what it was given or gave is not there any more: the next minibatch compares them
            continue
        gave = call.gave
        if gave is None or not (equal_outputs(found, gave) or _varies(run, found, gave, call.autocast)):
            raise PipelineRefusal(
                f"the graph that torch.export makes of '{piece.name}' gives other values than the module itself, so"
                " that the module depends on something that the graph does not see, such as an attribute that forward"
                " reads and others set; make it a buffer or an argument, or call the module's parts from training_step"
            )
        if not call.frozen.checkpoints:  # they would compute the module again for it
            with generators.minibatch(minibatch, ordinal), call.autocast.opened():
                refuse_other_gradients(piece, call, inputs, partial(_scratch, buffers=call.buffers))
        piece.captured.take_equal(value)


def compare(
    piece: Piece,
    given: tuple[tuple[Any, ...], dict[str, Any]],
    value: Any,
    generators: RandomGenerators,
    minibatch: int,
    call: int = 0,
) -> None:
    """Compare the graph of ``piece`` with the module itself, on the live weights and on scratch buffers.

    Args:
        given: Arguments of the module: (args, kwargs).
        value: Input of the first layer for these arguments.
        minibatch: The minibatch whose random numbers both draw.
        call: Number of earlier calls of the piece in the minibatch.

    Raises:
        SettingError: if the values differ, while two runs of the module agree.
    """
    captured, module = piece.captured, piece.module
    assert captured is not None
    changed = captured.changed(value)
    inputs = Value.of(given)
    # A layer may make tensors on a device without weights of its own, if all these weights belong to other stages.
    others = [graph_layer(layer).device for layer in piece.layers] + [tensor.device for tensor in inputs.tensors]
    with (
        captured.exclusive(),
        untouched(module, captured.frozen, runs=True) as before_run,
        across_devices_of(module, others),
    ):

        def run() -> tuple[Value, AutogradNodes]:
            args, kwargs = inputs.tree(inputs.leaves())
            try:
                with (
                    generators.watch({piece.name: module}, minibatch, call),
                    captured.frozen.noted(),
                    without_checkpoints(module),
                ):
                    gave = module.forward(*args, **kwargs)  # not through __call__, whose hooks run around it
                gave = without_opaque(piece.name, gave)
                return _copied(Value.of(gave), module.buffers()), AutogradNodes.of(inputs, gave)
            finally:
                before_run.undo_buffers()

        gave, autograd = run()
        if (set_one := before_run.attributes.changed()) is not None:
            raise sets_attribute(piece.name, *set_one, captured.frozen.line_of(set_one[1]))
        refuse_noticed(piece.name, captured.frozen, *IN_NO_GRAPH, *NOWHERE)
        graph = partial(_run_graph, piece, value, before_run.buffers, partial(generators.minibatch, minibatch, call))
        found, _ = graph()
        is_same = equal_outputs(found, gave) or _varies(graph, found, gave, Autocast.current())
        other = None if is_same else "values"
        if other is None and changed is not None and autograd.differs(captured.autograd(value)):
            other = "gradients"
        again, nodes = (gave, autograd) if other is None else run()
        if other is not None and equal_outputs(gave, again) and autograd == nodes:
            batch = "an evaluation" if generators.evaluation else f"minibatch {minibatch}"
            raise PipelineRefusal(
                f"'{piece.name}' computes other {other} in {batch} than its graph, which has frozen what"
                f" forward reads from Python outside the module: {changed or 'something'} changed after it was"
                " captured; give it to the module as a tensor argument, or keep it in a buffer of the module's"
            )
    captured.take_equal(value, autograd)
    captured.needless_comparisons += changed is not None
    if changed is not None and captured.needless_comparisons == MOST_NEEDLESS:
        warnings.warn(
            f"{MOST_NEEDLESS} times Python values changed that the forward of '{piece.name}' may read, last {changed},"
            " and the module computed what its graph computes; each time the pipeline stops to compare both, which is"
            " slow; let forward read no values that change all the time, or set them less often",
            stacklevel=2,
        )


def _copied(value: Value, buffers: Iterable[Tensor]) -> Value:
    """Copy the tensors in ``value`` that share memory with ``buffers``, which are about to change."""
    changing = {address_of(buffer) for buffer in buffers} - {None}
    return replace(value, tensors=tuple(t.clone() if address_of(t) in changing else t for t in value.tensors))


def _varies(run: Callable[[], tuple[Value, list[Value]]], found: Value, gave: Value, autocast: Autocast) -> bool:
    """Return True if the graph's values ``found`` equal the module's ``gave`` except for last bits that vary.

    Some kernels of accelerators add in a random order, so each ``run`` may find other bits.
    """
    pairs = [*zip(found.tensors, gave.tensors, strict=False)]
    if len(found.tensors) != len(gave.tensors) or not any(accelerates(tensor.device) for tensor in found.tensors):
        return False
    before = states_of_torch()
    with autocast.opened():
        repeats = all(equal_outputs(found, run()[0]) for _ in range(RUNS))
    if repeats or not all_equal(zip(before, states_of_torch(), strict=True)):  # what default generators draw
        return False
    return all(
        one.shape == other.shape and (alike(one, other, autocast) if one.is_floating_point() else _same(one, other))
        for one, other in pairs
    )


def _run_graph(
    piece: Piece, value: Any, buffers: dict[str, Tensor], drawing: Callable[[], AbstractContextManager[None]]
) -> tuple[Value, list[Value]]:
    """Run the layers of ``piece`` on ``value`` while ``drawing``, from ``buffers``. Return also each layer's input."""
    inputs: list[Value] = []
    with drawing():
        for layer in piece.layers:
            # With autograd, since some operators compute differently without it. One layer at a time saves memory.
            with torch.enable_grad():
                scratch = _scratch(graph_layer(layer), buffers)
                inputs.append(Value.of(value))
                found = Value.of(scratch(inputs[-1].tree(inputs[-1].leaves())))
                del scratch
            value = found.tree(found.leaves())
    return found, inputs


def equal_outputs(found: Value, gave: Value) -> bool:
    """Return True if tensors, numbers and text in both are equal."""
    tensors = len(found.tensors) == len(gave.tensors) and all(map(_same, found.tensors, gave.tensors))
    return tensors and len(found.others) == len(gave.others) and all(map(_alike, found.others, gave.others))


def _alike(one: Any, other: Any) -> bool:
    """Return True if two parts of an output are equal numbers or text. Tensors are not compared."""
    if not isinstance(one, PLAIN) and not isinstance(other, PLAIN):
        return True
    return type(one) is type(other) and bool(one == other or one != one)


def _scratch(layer: GraphLayer, buffers: dict[str, Tensor]) -> GraphLayer:
    scratch = copy_of(layer, None)
    with torch.no_grad():
        for path, buffer in buffers.items():
            held = scratch.held(path)
            if held is not None and held.shape == buffer.shape:  # else a later variant has a longer one of its own
                held.copy_(buffer)
    return scratch


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and equal(one, other.to(one.device))


@dataclass(frozen=True)
class Tolerance:
    """Allowed difference of two gradients.

    ``part`` is a fraction of a gradient, since sums associate differently. ``negligible`` is a fraction of the piece's
    largest gradient, for rounding errors.
    """

    part: float
    negligible: float


EXACT, ROUGH = Tolerance(1e-3, 1e-5), Tolerance(0.1, 1e-2)
"""Tolerances for gradients in 32 bits or more, and for gradients in fewer bits, as under autocast."""


def refuse_other_gradients(
    piece: Piece, call: WatchedCall, inputs: Sequence[Value], copied: Callable[[GraphLayer], GraphLayer]
) -> None:
    """Compare gradients of the graph of ``piece`` and of the module's watched ``call``, before the loss's backward.

    ``inputs`` has the input of each layer. ``copied`` copies a layer, with the buffers from before the call. A
    :class:`PipelineRefusal` names the first input or weight with another gradient.
    """
    outputs = [tensor for tensor in call.outputs if tensor.requires_grad]
    if not outputs:
        return
    trained = {f"input {n}": tensor for n, tensor in enumerate(call.inputs) if tensor.requires_grad}
    behind = {*graph_nodes(following_nodes(trained.values()), ())}
    earlier = {id(leaf) for leaf in graph_leaves(behind)}
    # Their gradients come also from earlier calls, or by way of another input.
    names = {n: each for n, each in trained.items() if each.grad_fn not in behind and id(each) not in earlier}
    earlier |= {*map(id, trained.values())}
    names |= {f"'{name}'": each for name, each in piece.module.named_parameters() if id(each) not in earlier}
    wanted = {name: tensor for name, tensor in names.items() if tensor.requires_grad}
    if not wanted:
        return
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(each.shape, generator=generator).to(each.device, each.dtype) for each in outputs]
    with without_gradient_hooks([*outputs, *wanted.values()]):
        of_module = torch.autograd.grad(outputs, [*wanted.values()], given, retain_graph=True, allow_unused=True)
    of_graph = _of_graph(piece, call, inputs, given, copied)
    found = [of_graph.get(id(tensor)) for tensor in wanted.values()]
    largest = max((_norm(gradient) for gradient in of_module if gradient is not None), default=0.0)
    for name, one, other in zip(wanted, of_module, found, strict=True):
        if not alike(one, other, call.autocast, largest):
            raise PipelineRefusal(
                f"the graph that torch.export makes of '{piece.name}' gives other gradients than the module itself, of"
                f" {name} first, so that the module does something in its backward that the graph does not see; do"
                " that in training_step"
            )


def _of_graph(
    piece: Piece,
    call: WatchedCall,
    inputs: Sequence[Value],
    given: Sequence[Tensor],
    copied: Callable[[GraphLayer], GraphLayer],
) -> dict[int, Tensor]:
    """Compute the graph's gradients, by the ``id`` of the module's own inputs and weights."""
    live = dict(piece.module.named_parameters(remove_duplicate=False))
    found: dict[int, Tensor] = {}
    wants = [tensor.requires_grad for tensor in call.outputs]
    left = iter(given)
    after: list[Tensor | None] = [next(left) if wanted else None for wanted in wants]
    for layer, value in zip(reversed(piece.layers), reversed(inputs), strict=True):
        copy, leaves = copied(graph_layer(layer)), value.leaves()
        with torch.enable_grad():
            made = tensors_of(copy(value.tree(leaves)))
        pairs = [(one, each) for one, each in zip(made, after, strict=True) if each is not None and one.requires_grad]
        weights = [(live.get(own_path(name)), each) for name, each in copy.named_parameters()]
        trained = [(own, each) for own, each in weights if own is not None and each.requires_grad]
        targets = [*compress(leaves, value.requires_grad), *(each for _, each in trained)]
        gradients: Sequence[Tensor | None] = [None] * len(targets)
        if pairs and targets:
            ones, others = zip(*pairs, strict=True)
            gradients = torch.autograd.grad(ones, targets, others, allow_unused=True)
        rest = iter(gradients)
        after = [next(rest) if wanted else None for wanted in value.requires_grad]
        for (own, _), gradient in zip(trained, rest, strict=True):
            if gradient is not None:
                before = found.get(id(own))
                found[id(own)] = gradient if before is None else before + gradient.to(before.device)
    # The first layer takes the number of a variant, then each distinct tensor of the call once, in order.
    for tensor, gradient in zip(call.inputs, after, strict=True):
        if gradient is not None:
            found[id(tensor)] = gradient
    return found


def alike(one: Tensor | None, other: Tensor | None, autocast: Autocast, largest: float = 0.0) -> bool:
    """Return True if two tensors of one shape, computed under ``autocast``, differ by rounding, or by little next to a
    tensor of norm ``largest``."""
    if one is None or other is None:
        return one is other
    low = one.element_size() < 4 or any(dtype is not None for _, dtype in autocast.dtypes)
    tolerance = ROUGH if low else EXACT
    size, difference = _norm(one), _norm(one - other.to(one.device))
    if difference != difference:  # both may have infinite entries, from the made-up gradients of outputs
        return not bool(torch.isfinite(one).all()) and not bool(torch.isfinite(other).all())
    return difference <= max(tolerance.part * size, tolerance.negligible * largest)


def _norm(tensor: Tensor) -> float:
    dense = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    return float(torch.linalg.vector_norm(dense.to(torch.promote_types(dense.dtype, torch.float32))))
