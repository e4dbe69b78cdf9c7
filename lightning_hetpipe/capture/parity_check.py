"""Captures a piece, and compares its graph with the module itself: both must give the very same values.

They are compared on the call that was watched, and again wherever a graph may have fallen behind: when Python values
that it has frozen have changed, when a graph was made for inputs of another kind, at minibatches 2, 4, 8, and so on,
and at the first of each epoch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_hetpipe.accelerator import accelerates
from lightning_hetpipe.capture.call_tree import WatchedCall
from lightning_hetpipe.capture.captured import Captured, graph_layer
from lightning_hetpipe.capture.contents import PLAIN
from lightning_hetpipe.capture.effects import put_back, refuse_noticed, untouched
from lightning_hetpipe.capture.export import decides
from lightning_hetpipe.capture.gradient_check import alike, refuse_other_gradients, tolerance_of
from lightning_hetpipe.capture.gradient_checkpointing import without_checkpoints
from lightning_hetpipe.capture.noticed_calls import HOOK, INFERENCE, JOINT_HOOK, OUTPUT, SEED, STATE
from lightning_hetpipe.capture.opaque_containers import without_opaque
from lightning_hetpipe.capture.pieces import Piece
from lightning_hetpipe.capture.plain_attributes import sets_attribute
from lightning_hetpipe.capture.variant import AutogradNodes
from lightning_hetpipe.errors import PipelineRefusal
from lightning_hetpipe.pipeline.autocast import Autocast
from lightning_hetpipe.pipeline.graph_layer import GraphLayer
from lightning_hetpipe.pipeline.operands import across_devices_of
from lightning_hetpipe.pipeline.random.generators import RandomGenerators
from lightning_hetpipe.pipeline.user.user_section import states_of_torch
from lightning_hetpipe.pipeline.values import Value, all_equal, equal
from lightning_hetpipe.pipeline.weight_stash import copy_of

RUNS = 3
"""Repetitions of a graph on an accelerator, that show whether its last bits vary."""

MOST_NEEDLESS = 20
"""Comparisons caused by changed values and without a difference, after which a warning says so."""


def capture(piece: Piece, calls: Sequence[WatchedCall], generators: RandomGenerators, minibatch: int) -> None:
    """Give ``piece`` its layers, and the input of each of them in each of the watched ``calls``.

    Raises:
        SettingError: if it cannot be captured, or if its graph gives other values than the module itself; for one that
            need not have a graph also if that is for some values of its data only.
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
            found, inputs = _run_graph(piece, value, call.buffers, generators, minibatch, ordinal)
        piece.inputs.append(inputs)
        if call.was_changed:  # what it was given or gave is not there any more: the next minibatch compares them
            continue
        run = partial(_run_graph, piece, value, call.buffers, generators, minibatch, ordinal)
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
    minibatch: int | str,
    call: int = 0,
) -> None:
    """Compare the graph of ``piece`` with the module itself, on the live weights and on scratch buffers.

    Args:
        piece: A captured one.
        given: What the module is given: (args, kwargs).
        value: What its first layer is given for it.
        generators: The run's random numbers.
        minibatch: The minibatch, whose random numbers both draw; the name of an evaluation's batch.
        call: Number of calls of the piece that come before this one in it.

    Raises:
        SettingError: if they give other values, and the module gives the same when it is run twice.
    """
    captured, module = piece.captured, piece.module
    assert captured is not None
    changed = captured.changed(value)
    inputs = Value.of(given)
    # A layer may make tensors on a device on which it has none, as all of its weights are another stage's.
    others = [graph_layer(layer).device for layer in piece.layers] + [tensor.device for tensor in inputs.tensors]
    with captured.exclusive(), untouched(module, captured.frozen) as before_run, across_devices_of(module, others):
        buffers = {path: buffer.clone() for path, buffer in module.named_buffers()}

        def run() -> tuple[Value, AutogradNodes]:
            args, kwargs = inputs.tree(inputs.leaves())
            try:
                with (
                    generators.watch({piece.name: module}, minibatch, call),
                    captured.frozen.noted(),
                    without_checkpoints(module),
                ):
                    gave = module.forward(*args, **kwargs)  # not through __call__, whose hooks run around it
            finally:
                put_back((buffer, buffers[path]) for path, buffer in module.named_buffers())
            gave = without_opaque(piece.name, gave)
            return Value.of(gave), AutogradNodes.of(inputs, gave)

        gave, autograd = run()
        if (set_one := before_run.changed_attribute()) is not None:
            raise sets_attribute(piece.name, *set_one, captured.frozen.line_of(set_one[1]))
        refuse_noticed(piece.name, captured.frozen, HOOK, JOINT_HOOK, INFERENCE, OUTPUT, SEED, STATE)
        graph = partial(_run_graph, piece, value, buffers, generators, minibatch, call)
        found, _ = graph()
        is_same = equal_outputs(found, gave) or _varies(graph, found, gave, Autocast.current())
        other = None if is_same else "values"
        if other is None and changed is not None and autograd.differs(captured.autograd(value)):
            other = "gradients"
        if other is not None and _equal((gave, autograd), run()):
            batch = f"minibatch {minibatch}" if isinstance(minibatch, int) else "an evaluation"
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


def _varies(run: Callable[[], tuple[Value, list[Value]]], found: Value, gave: Value, autocast: Autocast) -> bool:
    """Tell whether the values that a graph ``found`` are what its module ``gave``, but for last bits that vary.

    Some kernels of accelerators add in an order that is left to chance, so that ``run`` finds others each time.
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
        one.shape == other.shape
        and (alike(one, other, tolerance_of(autocast, one)) if one.is_floating_point() else _same(one, other))
        for one, other in pairs
    )


def _equal(one: tuple[Value, AutogradNodes], other: tuple[Value, AutogradNodes]) -> bool:
    return equal_outputs(one[0], other[0]) and one[1] == other[1]


def _run_graph(
    piece: Piece, value: Any, buffers: dict[str, Tensor], generators: RandomGenerators, minibatch: int | str, call: int
) -> tuple[Value, list[Value]]:
    """Run the layers of ``piece`` on ``value``, starting from ``buffers``; also return the input of each."""
    inputs: list[Value] = []
    with generators.minibatch(minibatch, call):
        for layer in piece.layers:
            # With a graph, since some operators compute otherwise without; one layer at a time, to spare memory.
            with torch.enable_grad():
                scratch = _scratch(graph_layer(layer), buffers)
                inputs.append(Value.of(value))
                found = Value.of(scratch(inputs[-1].tree(inputs[-1].leaves())))
                del scratch
            value = found.tree(found.leaves())
    return found, inputs


def equal_outputs(found: Value, gave: Value) -> bool:
    """Tell whether tensors, numbers and text in both are the same."""
    tensors = len(found.tensors) == len(gave.tensors) and all(map(_same, found.tensors, gave.tensors))
    return tensors and len(found.others) == len(gave.others) and all(map(_alike, found.others, gave.others))


def _alike(one: Any, other: Any) -> bool:
    """Tell whether two parts of an output are the same numbers or text; tensors are not looked at."""
    if not isinstance(one, PLAIN) and not isinstance(other, PLAIN):
        return True
    return type(one) is type(other) and bool(one == other or one != one)


def _scratch(layer: GraphLayer, buffers: dict[str, Tensor]) -> GraphLayer:
    """A copy of ``layer`` with these ``buffers``."""
    scratch = copy_of(layer, None)
    with torch.no_grad():
        for path, buffer in buffers.items():
            held = scratch.held(path)
            if held is not None and held.shape == buffer.shape:  # else a later variant has a longer one of its own
                held.copy_(buffer)
    return scratch


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and equal(one, other.to(one.device))
