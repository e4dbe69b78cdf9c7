"""Export of a module by ``torch.export``: its graph, or one sentence that explains why it has none.

If ``forward`` assigns buffers, or writes them by ``.data``, the graph writes their values into the buffers in place.
"""

from __future__ import annotations

import contextlib
import io
import logging
import random
import re
import sys
import traceback
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ShapesCollection, export
from torch.overrides import TorchFunctionMode

from lightning_hetpipe.capture.contents import SetsState, sets_attribute, unknown_in, without_opaque
from lightning_hetpipe.capture.effects import FrozenValues, SideEffect, refusing_changes, untouched
from lightning_hetpipe.capture.grouping import base_of, written_by
from lightning_hetpipe.capture.noticed_calls import is_users, line_for_people
from lightning_hetpipe.capture.prepared_modules import without_checkpoints
from lightning_hetpipe.capture.variant import Answers, DataChecks, Decisions, Undecidable
from lightning_hetpipe.errors import PipelineRefusal, SettingError, first_line
from lightning_hetpipe.torch_private.graphs import traced_as_called
from lightning_hetpipe.torch_private.modes import replaced
from lightning_hetpipe.torch_private.modules import without_hooks
from lightning_hetpipe.torch_private.tensors import pytree

_IS_NUMBER = re.compile(r"`.*(\bint\(|\.item\(\)|\.tolist\(\)|size).*`")
"""Pattern of code that turns data into a number, such as the size of an output."""

_Shapes: Any = ShapesCollection  # torch has no types here
_DATA: Any = Tensor.data  # torch has no types for the descriptor
_COPY = torch.ops.aten.copy_.default


def graph_of(
    name: str,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    frozen: FrozenValues | None = None,
    known: Answers = (),
    *,
    earlier: int = 2,
    numbers: Collection[int] = (),
) -> tuple[fx.GraphModule, DataChecks]:
    """Make the graph of ``module(*args, **kwargs)``, operators without Python, and the part for its decisions.

    ``earlier`` decides whether sizes of inputs may vary from call to call. The graph's inputs are the leaves of
    ``(args, kwargs)``, in order. The module is left unchanged. The graph must run under the present autocast: its
    operators cast accordingly, and dtypes that ``forward`` asked of tensors are fixed.

    Args:
        module: The live module, in the mode in which it is to run.
        args, kwargs: Arguments, of which only shapes, dtypes and devices of tensors matter.
        frozen: Python values that the module reads outside itself, and its decisions by values of data.
        known: Other answers to its first decisions.
        earlier: Number of the module's other graphs. The first graph is for these sizes only, because a graph for all
            sizes takes two to four times as long to make. In the second graph, sizes may vary, but of inputs with four
            and more dimensions only the first size. In later graphs, all sizes may vary, which takes minutes for models
            that cut images into windows.
        numbers: Places, among the inputs, of numbers that may vary between calls.

    Raises:
        SettingError: if it cannot be captured. If possible, the message names the user's line.
    """
    if (unknown := unknown_in((args, kwargs))) is not None:
        raise PipelineRefusal(
            f"'{name}' is given a {type(unknown).__name__}, of which torch.export makes no input of a graph; leave"
            " it out of the call, or give the tensors and numbers in it"
        )
    frozen = frozen or FrozenValues(module)
    traced = partial(_traced, name, module, (args, kwargs), frozen, known, earlier=earlier, numbers=numbers)
    try:
        return traced(as_called=True)
    except (SettingError, Undecidable) as refusal:
        with contextlib.suppress(SettingError, Undecidable):
            return traced(as_called=False)
        _refuse_cumulative_averages(name, module)
        if isinstance(refusal, Undecidable):
            raise decides(name, f" at {refusal}", kwargs) from None
        raise


def _refuse_cumulative_averages(name: str, module: nn.Module) -> None:
    """Refuse BatchNorm that counts its batches in Python, which torch's own error does not name."""
    for path, part in module.named_modules(prefix=name):
        batch_norm = isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d)
        if batch_norm and part.training and part.track_running_stats and part.momentum is None:
            raise SettingError(
                f"'{path}' is a {type(part).__name__} with momentum=None, by which it weights a batch by how many it"
                " has seen, a number that a graph keeps as it is; give it a momentum, such as 0.1, or set"
                " in_flight=1 (for StochasticWeightAveraging, too, which sets it to None in the last epoch)"
            )


def _traced(
    name: str,
    module: nn.Module,
    call: tuple[tuple[Any, ...], dict[str, Any]],
    frozen: FrozenValues,
    known: Answers,
    *,
    earlier: int,
    numbers: Collection[int],
    as_called: bool,
) -> tuple[fx.GraphModule, DataChecks]:
    """Do the work of :func:`graph_of`. With ``as_called``, hide from the code of ``module`` that it is traced.

    Some libraries that know of tracing use other operators, whose gradients differ in their last bits. A few of their
    parts can be traced in no other way.
    """
    decisions = Decisions(known, frozen.answers)
    leaves, spec = pytree.tree_flatten(call)
    # Export does not know the value of a number in a tensor, and so keeps how Python and torch compute with it.
    kinds = {float: torch.float64, int: torch.int64}
    given = [torch.tensor(each, dtype=kinds[type(each)]) if n in numbers else each for n, each in enumerate(leaves)]
    args, kwargs = pytree.tree_unflatten(given, spec)
    shapes: Any = _Shapes()
    for tensor in pytree.tree_leaves((args, kwargs)):
        if isinstance(tensor, Tensor) and tensor.dim() and earlier:
            varying = 1 if tensor.dim() >= 4 and earlier == 1 else tensor.dim()
            shapes[tensor] = dict.fromkeys(range(varying), Dim.AUTO)
    states = (random.getstate(), _numpy_state())
    try:
        with (
            _as_one_call(name, module, decisions, numbers, as_called=as_called),
            without_checkpoints(module),
            _left_alone(name, module, frozen) as assigned,
            _silently(),
        ):
            dynamic = shapes.dynamic_shapes(module, (args, kwargs))
            graph = export(module, (args, kwargs), dynamic_shapes=dynamic, strict=False).module(check_guards=True)
    except (SettingError, Undecidable):
        raise
    except Exception as error:
        raise _refusal(name, error, kwargs) from error
    if states != (random.getstate(), _numpy_state()):
        raise PipelineRefusal(
            f"'{name}' draws random numbers of Python or numpy in forward, which its graph would repeat for ever; draw"
            " them with torch, or in training_step"
        )
    assert isinstance(graph, fx.GraphModule)
    write_assigned_buffers(name, graph, dict(module.named_buffers(remove_duplicate=False)), assigned)
    inputs = graph.graph.find_nodes(op="placeholder")
    for number in numbers:
        for user in list(inputs[number].users):
            if user.target is torch.ops.aten.item.default:
                if _is_limited(user):
                    raise SettingError(f"the graph of '{name}' is for some values of a number only")
                user.replace_all_uses_with(inputs[number])
                graph.graph.erase_node(user)
    return graph, DataChecks(graph, module, decisions)


def _is_limited(number: fx.Node) -> bool:
    """Return True if a graph asserts anything about ``number``, as about the size of a tensor."""
    found = [number]
    for node in found:
        if any(name in str(node.target) for name in ("_assert_scalar", "sym_constrain_range")):
            return True
        if isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool):
            found += [user for user in node.users if user not in found]
    return False


def _refusal(name: str, error: Exception, kwargs: Mapping[str, Any]) -> SettingError:
    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    lines = [(code.co_filename, line) for code, line in frames if is_users(code) and code.co_filename[0] != "<"]
    where = f" at {line_for_people(*lines[-1])}" if lines else ""
    if any("DataDependent" in type(each).__name__ for each in chain_of(error)):
        return decides(name, where, kwargs)
    return PipelineRefusal(
        f"'{name}' cannot be captured by torch.export{where} ({first_line(error).rstrip('.')});"
        f" {_without_labels(kwargs)}write that part in another way, or let training_step itself run the module, by"
        " naming the ones to pipeline (module=[...])"
    )


def chain_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yield ``error`` and the errors that caused it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _without_labels(kwargs: Mapping[str, Any]) -> str:
    """Return the way out for a model that computes its loss if it is given labels, as models of Hugging Face do."""
    if kwargs.get("labels") is None:
        return ""
    return "if that is in its loss, call it without labels, and compute the loss in training_step; else "


def decides(name: str, where: str = "", kwargs: Mapping[str, Any] | None = None) -> SettingError:
    """Make the error that the module ``name`` decides by its data in a way that its inputs do not determine."""
    way_out = "use torch.where, or decide in training_step, outside the pipelined module"
    if "distribution.py:" in where:  # torch.distributions checks its arguments
        way_out = "give the distribution validate_args=False, or make it in training_step"
    elif _IS_NUMBER.search(where):
        way_out = f"give it that number as an argument (a size, say, as size= of a pooling over graphs), or {way_out}"
    return PipelineRefusal(
        f"'{name}' decides by the values of its data what to compute{where}, and stages run a graph that is the same"
        f" for every minibatch; {_without_labels(kwargs or {})}{way_out}"
    )


@contextmanager
def _left_alone(name: str, module: nn.Module, frozen: FrozenValues) -> Iterator[set[str]]:
    """Undo what tracing leaves in the modules' attributes, such as weights that ``torch.nn.utils`` computes.

    Refuse a side effect of ``forward``, which a graph would not have, and a buffer that ``forward`` replaces by a
    tensor of another kind. Since ``forward`` has run before, attributes that it sets only in its first call are set
    already. Hooks of the module itself are no part of its graph. Yield the paths, in the module, of buffers that it has
    assigned.
    """
    buffers: dict[str, Tensor] = {}
    assigned: set[str] = set()
    patched: set[str] = set()

    def begin(*call: Any) -> None:
        buffers.update(module.named_buffers())  # what stands for them while it is traced
        patched.update(before_run.changed())  # functions of `torch.fx.wrap`, for which tracing puts others

    def check(*call: Any) -> None:
        if (changed := before_run.attributes.changed()) is not None:
            part, attribute = changed
            raise sets_attribute(name, part, attribute, frozen.line_of(attribute))
        for path, buffer in module.named_buffers():
            if (before := buffers.get(path)) is buffer:
                continue
            if before is None or any(getattr(before, a) != getattr(buffer, a) for a in ("shape", "dtype", "device")):
                raise replaces_buffer(name, f"{name}.{path}")
            assigned.add(path)
        if paths := [path for path in before_run.changed() if path not in patched]:
            told = paths[0] if "'" in paths[0] else f"'{paths[0]}'"
            is_shared = not all(map(frozen.is_own, paths))
            raise SideEffect(
                name,
                f"changes {told}",
                frozen.line_of(paths[0]),
                paths,
                is_shared=is_shared,
                is_lost=any(map(frozen.reached.is_lost, paths)),
            )

    with untouched(module, frozen) as before_run, without_hooks(module):
        module.register_forward_pre_hook(begin)
        module.register_forward_hook(check)
        yield assigned


@contextmanager
def _as_one_call(
    name: str, module: nn.Module, decisions: Decisions, numbers: Collection[int], *, as_called: bool
) -> Iterator[None]:
    """Context manager in which ``forward`` takes ``(args, kwargs)``, as torch.export knows no names in ``**kwargs``.

    It returns what the pipeline hands on, and the tensors by which it has decided.
    """

    held, forward = vars(module), module.forward

    def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        for number in numbers:
            leaves[number] = leaves[number].item()
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        held["forward"] = forward
        tracing = traced_as_called() if as_called else contextlib.nullcontext()
        try:
            with refusing_changes(name, forward, args, kwargs), decisions, WritesByData(module), tracing:
                output = without_opaque(name, forward(*args, **kwargs))
            return output, decisions.asked
        finally:
            held["forward"] = call

    # Nobody reads the line of each node, which takes a twentieth of the time.
    with replaced([(module, "forward", call), (fx.config, "do_not_emit_stack_traces", True)]):
        yield


@contextmanager
def _silently() -> Iterator[None]:
    """Suppress torch's own diagnostics, such as the whole graph after a failure, because our error is enough."""
    printed = io.StringIO()
    with ExitStack() as stack:
        for log in map(logging.getLogger, _LOGS):
            log.addFilter(_withheld)
            stack.callback(log.removeFilter, _withheld)
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message=".* assigned during export.*")  # which is undone
        with contextlib.redirect_stderr(printed):
            yield
        sys.stderr.write(printed.getvalue())


_withheld = logging.Filter("nobody")  # lets no other logger's records through: our error says what they say
_LOGS = ("torch._export.non_strict_utils", "torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy")
    return [part.tolist() if hasattr(part, "tolist") else part for part in numpy.random.get_state()] if numpy else None


class WritesByData(TorchFunctionMode):
    """Mode while a graph of ``module`` is made: the ``.data`` of its buffers are views of them, which can be traced."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = module

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _DATA.__get__ and any(args[0] is buffer for buffer in self._module.buffers()):
            return args[0].detach()
        if func == _DATA.__set__ and any(args[0] is buffer for buffer in self._module.buffers()):
            buffer, value = args
            if buffer.shape == value.shape and buffer.dtype == value.dtype:
                with torch.no_grad():
                    return buffer.copy_(value)
        return func(*args, **(kwargs or {}))


def write_assigned_buffers(
    name: str, graph: fx.GraphModule, buffers: Mapping[str, Tensor], assigned: Collection[str]
) -> None:
    """Write each assigned buffer where its new value is made, not at the end of ``graph`` as ``torch.export`` does.

    At the end, the write would join all layers from the first to the last read into one layer. Earlier reads get a
    copy, since autograd may keep it for the backward. ``buffers`` has the module's buffers by path, and ``assigned``
    the paths of the buffers that were seen to be assigned.

    Raises:
        PipelineRefusal: for a value that is a view of the buffer or requires a gradient, and for a buffer that
            ``torch.export`` does not write.
    """
    nodes = graph.graph
    writes = [node for node in nodes.nodes if _is_of_export(node, buffers)]
    if missing := [path for path in assigned if path not in {str(write.args[0].target) for write in writes}]:
        raise replaces_buffer(name, f"{name}.{missing[0]}")
    for write in writes:
        buffer, value = write.args
        if _changed_in_place(value) is buffer:  # as by ``+=``, after which Python assigns what it has changed
            nodes.erase_node(write)
            continue
        if base_of(value) is buffer or value.meta["val"].requires_grad:
            raise replaces_buffer(name, f"{name}.{buffer.target}")
        others = [user for user in buffer.users if user is not write]
        after = value
        if any(buffer in written_by(user) for user in others):
            after = max([value, *others])
        elif others:
            with nodes.inserting_before(min(others)):
                read = nodes.call_function(torch.ops.aten.clone.default, (buffer,))
            if "nn_module_stack" in others[0].meta:
                read.meta["nn_module_stack"] = others[0].meta["nn_module_stack"]
            read.meta["val"] = buffer.meta.get("val", value.meta["val"])
            for user in others:
                user.replace_input_with(buffer, read)
        changes = [n for n in nodes.nodes if n is not write and base_of(value) in map(base_of, written_by(n))]
        max([after, *changes]).append(write)
    nodes.lint()
    graph.recompile()


def _is_of_export(node: fx.Node, buffers: Mapping[str, Tensor]) -> bool:
    """Return True if ``torch.export`` seems to have added ``node`` for an assigned buffer."""
    if node.target is not _COPY or node.users:
        return False
    buffer, value = node.args[:2]
    if not isinstance(value, fx.Node) or not isinstance(buffer, fx.Node) or str(buffer.target) not in buffers:
        return False
    return node.meta.get("val") is value.meta.get("val")


def _changed_in_place(node: fx.Node) -> fx.Node:
    """Return the node whose value ``node`` gives after changes in place."""
    while (written := written_by(node)) and written[0] is node.args[0]:
        node = written[0]
    return node


def replaces_buffer(name: str, path: str) -> SetsState:
    """Make the error that ``forward`` assigns a buffer in a way that no graph can."""
    return SetsState(
        f"'{name}' puts another tensor in the place of its buffer '{path}' in forward, of another shape or dtype, or"
        f" one that requires a gradient or is a view of the buffer; change the buffer in place, as by {path}.copy_()"
    )
