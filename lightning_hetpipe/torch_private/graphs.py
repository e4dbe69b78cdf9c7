"""Private names of torch for graphs that it exports or compiles, their operators, and the compilers behind them.

If torch does not have a name:

- ``_dynamo``, ``_subclasses``, ``_ops``, ``_safe_softmax``, ``_local_scalar_dense``, ``_assert_tensor_metadata``: this
  module cannot be imported.
- ``_is_compiling_flag``, ``_is_exporting_flag``, ``_is_make_fx_tracing``, ``_meta_registrations``,
  ``_meta_grouped_mm_common``: nothing is hidden from modules while they are traced. Some are traced in operators that
  they do not call otherwise, whose last bits may differ, and no error says so.
- ``_create_grouped_mm_output_tensor``: as above, for modules that call ``grouped_mm``.
- ``_transformer_encoder_layer_fwd``: this module cannot be imported. ``_C``: each capture fails.
- ``_codegen``, and ``_replace`` of its named tuple: each capture fails.
- ``_schema``: each division of a graph into layers fails.
- ``_guards_fn``: the checks that torch makes of a graph's inputs are left out, and no error says so. A graph may then
  be run on sizes that it is not for.
- ``_inductor``: the check of ``compile`` fails if the backend is inductor.
- ``_TorchCompileInductorWrapper``: the check of ``compile`` fails if options of inductor are given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn
from torch._dynamo.exc import FailOnRecompileLimitHit as CompilerLimit
from torch._dynamo.exc import TorchDynamoException as CompilerError
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import has_torch_function

from lightning_hetpipe.torch_private.modes import replaced

__all__ = ["CompilerError", "CompilerLimit"]

C = TypeVar("C", bound=Callable[..., Any])

GRAPH_GUARDS = "_guards_fn"
"""Submodule of an exported graph that checks whether the graph was made for the given inputs."""


class _NotANumber:
    """The name ``nan`` in the checks of exported graphs. It equals every NaN."""

    def __eq__(self, other: object) -> bool:
        return other != other

    __hash__ = None  # type: ignore[assignment]


SAFE_SOFTMAX = torch.ops.aten._safe_softmax.default
"""Softmax of attention, which gives zeros if all positions are masked."""


def split_outputs(graph: fx.GraphModule) -> list[fx.Node]:
    """Reduce the output of an exported graph from a pair to its first part, and return the nodes of the second part."""
    tree = _tree_of(graph)
    kept, taken = (tree.out_spec.child(number) for number in (0, 1))
    graph.graph._codegen.pytree_info = tree._replace(out_spec=kept)  # type: ignore[attr-defined]  # as it is one of pytrees
    output = next(node for node in graph.graph.nodes if node.op == "output")
    nodes = list(output.args[0])
    output.args = (tuple(nodes[: kept.num_leaves]),)
    graph.recompile()
    return nodes[kept.num_leaves : kept.num_leaves + taken.num_leaves]


def outputs_of(graph: fx.GraphModule) -> Any:
    """Return the nesting of the outputs of an exported graph, for :func:`pytree.tree_unflatten`."""
    return _tree_of(graph).out_spec


@contextmanager
def traced_as_called() -> Iterator[None]:
    """Hide from modules that ``torch.export`` traces them.

    ``torch.compiler.is_compiling`` and ``is_exporting`` return False. Without gradients, torch.nn's modules for
    attention take fused operators as in evaluations. Products of experts are traced in all their dtypes.
    """
    from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP  # here, as it imports sympy

    # Torch 2.11 checks an argument that is NaN by the name "nan", which the code of its checks does not define.
    SYMPY_INTERP.setdefault("nan", _NotANumber())
    # Torch 2.11 lacks the output shape of a fused TransformerEncoder layer for tracing.
    if not _ENCODER_LAYER.has_kernel_for_dispatch_key(torch._C.DispatchKey.Meta):
        _OPERATORS.impl("_transformer_encoder_layer_fwd", _encoder_layer_shape, "Meta")
    hidden: list[tuple[Any, str, Any]] = [
        (torch.compiler, "_is_compiling_flag", False),
        (torch.compiler, "_is_exporting_flag", False),
        (torch.overrides, "has_torch_function", _has_torch_function),
        (torch.nn.modules.activation, "_is_make_fx_tracing", torch.is_grad_enabled),
        (torch._meta_registrations, "_meta_grouped_mm_common", _grouped_mm_shape),
    ]
    with replaced(hidden):
        yield


_ENCODER_LAYER: Any = torch.ops.aten._transformer_encoder_layer_fwd.default
_OPERATORS: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]  # torch has no types here


def _encoder_layer_shape(tokens: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.empty_like(tokens)


def _grouped_mm_shape(first: Tensor, second: Tensor, *, offs: Tensor | None, out_dtype: Any, **_: Any) -> Any:
    """Return the shape and dtype of ``grouped_mm``, which torch gives to tracing for bfloat16 only."""
    create: Any = torch._meta_registrations._create_grouped_mm_output_tensor
    return create(first, second, offs, out_dtype)


def _has_torch_function(values: Iterable[Any]) -> bool:
    """Answer as torch does. For tensors without gradients, ignore active ``TorchFunctionMode``."""
    if torch.is_grad_enabled() or any(type(value) not in (FakeTensor, Tensor, nn.Parameter) for value in values):
        return has_torch_function(values)
    return False


OperatorOverload = torch._ops.OpOverload
"""One operator of torch, as graphs call it."""

READ_VALUE = torch.ops.aten._local_scalar_dense.default
"""Operator by which Python reads the value of a tensor."""

ASSERTS_METADATA = torch.ops.aten._assert_tensor_metadata.default
"""Operator by which a graph asserts that a tensor has the dtype and device of tracing."""

HigherOrderOperator = torch._ops.HigherOrderOperator
"""Operator that takes a region of the graph."""


def schema_of(operator: OperatorOverload) -> Any:
    """Return the arguments and results of ``operator``."""
    return operator._schema


def arguments_of(operator: torch._ops.OpOverload) -> list[tuple[str, bool, bool]]:
    """Return for each argument its name, whether an output may share its memory, and whether it is changed in place."""
    return [
        (
            argument.name,
            argument.alias_info is not None,
            argument.alias_info is not None and argument.alias_info.is_write,
        )
        for argument in schema_of(operator).arguments
    ]


def written_and_viewed(
    operator: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return the argument nodes that ``operator`` changes in place, and the nodes whose memory its output may share.

    Two facts are missing in schemas: batch and instance norm change their statistics, and dropout may return its input.
    """
    written: list[fx.Node] = []
    viewed: list[fx.Node] = []
    for position, (name, shares, changes) in enumerate(arguments_of(operator)):
        value = args[position] if position < len(args) else kwargs.get(name)
        nodes = [each for each in (value if isinstance(value, list | tuple) else [value]) if isinstance(each, fx.Node)]
        if shares or (name == "input" and "dropout" in str(operator)):
            viewed += nodes
        if changes or name in ("running_mean", "running_var"):
            written += nodes
    return written, viewed


def _tree_of(graph: fx.GraphModule) -> Any:
    codegen: Any = graph.graph._codegen
    return codegen.pytree_info


# Compilation.

_compile: Any = torch.compile  # torch's own, also while another stands in its place; it does not keep the type


def compiled(function: C, options: Mapping[str, Any], check: Callable[[fx.GraphModule], None]) -> C:
    """Call ``torch.compile(function, fullgraph=True, **options)`` so that ``check`` sees each graph before the backend.

    Three kinds of guards are left out. Guards on the process's state, such as its default dtype, fail because other
    threads change that state. Guards on the object that replaces a module's ``forward`` fail in copies with other
    objects. Guards on the number of a layer's graphs fail when another graph comes.
    """
    backend = options.get("backend", "inductor")
    further: dict[str, Any] = dict(options.get("options") or {})
    if backend == "inductor":
        mode = options.get("mode")
        keywords: dict[str, Any] = {"config_patches": {**(inductor_modes()[mode] if mode else {}), **further}}
    else:
        keywords = {"options": further} if further else {}
    compile_graph: Any = backend if callable(backend) else torch._dynamo.lookup_backend(backend)

    def checked(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        check(graph)
        return compile_graph(graph, inputs, **keywords)

    made: C = _compile(
        function,
        fullgraph=True,
        dynamic=options.get("dynamic"),
        backend=checked,
        options={"guard_filter_fn": lambda guards: [not _is_needless(guard) for guard in guards]},
    )
    return made


def _is_needless(guard: Any) -> bool:
    kind, name = str(guard.guard_type), str(guard.name)
    return (
        kind == "GLOBAL_STATE"
        or (kind == "CLOSURE_MATCH" and name.endswith(".forward"))
        or (kind == "SEQUENCE_LENGTH" and name.endswith(".code.variants"))
    )


def run_without_data(graph: fx.GraphModule) -> None:
    """Run a graph that ``torch.compile`` has traced on tensors without data. Call this during the compilation."""
    inputs = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
    modes = [each.fake_mode for each in inputs if isinstance(each, FakeTensor)]
    with torch.no_grad(), modes[0] if modes else nullcontext():
        graph(*inputs)


def inductor_modes() -> dict[str, dict[str, Any]]:
    """Return the options of inductor for each ``mode`` of ``torch.compile``."""
    from torch._inductor import list_mode_options  # here, as it takes its time

    modes: Any = list_mode_options  # torch has no types here
    found: dict[str, dict[str, Any]] = modes()
    return found


def inductor_options_error(options: Mapping[str, Any]) -> str | None:
    """Return torch's error about ``options`` with an unknown name or a wrong type for inductor, or None."""
    make: Any = torch._TorchCompileInductorWrapper  # what torch.compile itself makes of its options
    try:
        make(None, dict(options), None)
    except RuntimeError as error:
        return str(error).partition(", known options are")[0]
    return None


def cpp_compiler_error() -> str | None:
    """Return torch's error if it finds no C++ compiler for its code on CPUs, or None."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        return str(error)
    return None
