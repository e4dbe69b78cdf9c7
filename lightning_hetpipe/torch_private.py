"""The private names of torch that this package touches, in one place; ``tests/private`` guards each.

``TorchDispatchMode`` and ``pytree`` are what torch's own extensions build on, but carry an underscore in their path.
``foreach_copy_`` copies a stage's weights in one fused call; ``Tensor._version`` counts in-place changes.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FunctionType
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor, fx, nn
from torch._dynamo.exc import FailOnRecompileLimitHit as CompilerLimit
from torch._dynamo.exc import TorchDynamoException as CompilerError
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import GradientEdge, Node
from torch.nn.modules.module import _has_any_global_hook
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode, _get_current_function_mode, has_torch_function
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from lightning_hetpipe.accelerator import is_initialized

__all__ = [
    "COMPILED_CALL",
    "GRAPH_GUARDS",
    "READ_VALUE",
    "Carried",
    "CompilerError",
    "CompilerLimit",
    "HigherOrderOperator",
    "OperatorOverload",
    "ThreadDispatchMode",
    "arguments_of",
    "behind_compile",
    "behind_functorch",
    "call_uncompiled",
    "children",
    "compiled",
    "contents",
    "cpp_compiler_error",
    "foreach_copy_",
    "give_memory",
    "graph_leaves",
    "graph_nodes",
    "graph_start",
    "has_any_hooks",
    "has_global_hooks",
    "has_hooks",
    "inductor_modes",
    "inductor_options_error",
    "outputs_of",
    "pytree",
    "reset_of",
    "run_without_data",
    "split_outputs",
    "strided_parts",
    "traced_as_called",
    "unseen_change",
    "version_counter",
    "viewed",
    "without_checkpoint_hooks",
    "without_hooks",
]

C = TypeVar("C", bound=Callable[..., Any])
T = TypeVar("T")

GRAPH_GUARDS = "_guards_fn"
"""The submodule of an exported graph that checks whether inputs are of the kind that it was made for."""


def split_outputs(graph: fx.GraphModule) -> list[fx.Node]:
    """Leave an exported graph that gives a pair only the first of it; return the nodes of the second."""
    tree = _tree_of(graph)
    kept, taken = (tree.out_spec.child(number) for number in (0, 1))
    graph.graph._codegen.pytree_info = tree._replace(out_spec=kept)  # type: ignore[attr-defined]  # as it is one of pytrees
    output = next(node for node in graph.graph.nodes if node.op == "output")
    nodes = list(output.args[0])
    output.args = (tuple(nodes[: kept.num_leaves]),)
    graph.recompile()
    return nodes[kept.num_leaves : kept.num_leaves + taken.num_leaves]


def outputs_of(graph: fx.GraphModule) -> Any:
    """Nesting of the outputs of an exported graph, for :func:`pytree.tree_unflatten`."""
    return _tree_of(graph).out_spec


@contextmanager
def traced_as_called() -> Iterator[None]:
    """Hide that ``torch.export`` traces.

    It is hidden from ``torch.compiler.is_compiling`` and ``is_exporting``; and, where there are no gradients, from the
    questions by which torch.nn's modules for attention take fused operators, as they do in evaluations. Products of
    experts are traced in all dtypes in which they are computed.
    """
    hidden: list[tuple[Any, str, Any]] = [
        (torch.compiler, "_is_compiling_flag", False),
        (torch.compiler, "_is_exporting_flag", False),
        (torch.overrides, "has_torch_function", _has_torch_function),
        (torch.nn.modules.activation, "_is_make_fx_tracing", torch.is_grad_enabled),
        (torch._meta_registrations, "_meta_grouped_mm_common", _grouped_mm_shape),
    ]
    before = [getattr(owner, name) for owner, name, _ in hidden]
    for owner, name, value in hidden:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for (owner, name, _), value in zip(hidden, before, strict=True):
            setattr(owner, name, value)


def _grouped_mm_shape(first: Tensor, second: Tensor, *, offs: Tensor | None, out_dtype: Any, **_: Any) -> Any:
    """Shape and dtype of ``torch.nn.functional.grouped_mm``, which torch tells tracing for bfloat16 only."""
    create: Any = torch._meta_registrations._create_grouped_mm_output_tensor
    return create(first, second, offs, out_dtype)


def _has_torch_function(values: Iterable[Any]) -> bool:
    """Answer as torch does; of tensors, without gradients, as if no ``TorchFunctionMode`` were active."""
    if torch.is_grad_enabled() or any(type(value) not in (FakeTensor, Tensor, nn.Parameter) for value in values):
        return has_torch_function(values)
    return False


OperatorOverload = torch._ops.OpOverload
"""One operator of torch, as graphs call it."""

READ_VALUE = torch.ops.aten._local_scalar_dense.default
"""Operator by which Python reads the value of a tensor."""

HigherOrderOperator = torch._ops.HigherOrderOperator
"""One that is given a region of the graph."""


def arguments_of(operator: torch._ops.OpOverload) -> list[tuple[str, bool, bool]]:
    """For each argument: its name, whether an output may share its memory, and whether it is changed in place."""
    return [
        (
            argument.name,
            argument.alias_info is not None,
            argument.alias_info is not None and argument.alias_info.is_write,
        )
        for argument in operator._schema.arguments
    ]


def _tree_of(graph: fx.GraphModule) -> Any:
    codegen: Any = graph.graph._codegen
    return codegen.pytree_info


def foreach_copy_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies each source into its target, fused where the devices allow it."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


def foreach_norm(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The 2-norm of each of ``tensors``, which lie on one device: as gradient clipping computes it."""
    norms: tuple[Tensor, ...] = torch._foreach_norm(list(tensors), 2.0)
    return norms


_engine: Any = torch.autograd.Variable._execution_engine


def run_backward(
    outputs: Sequence[Tensor | GradientEdge],
    gradients: Sequence[Tensor],
    inputs: Sequence[Tensor | GradientEdge],
    keep_graph: bool = False,
) -> Sequence[Tensor | None]:
    """Compute gradients as ``torch.autograd.grad`` does, without its checks, which take longer.

    Gives None for an input that no gradient reaches.
    """
    found: Sequence[Tensor | None] = _engine.run_backward(
        tuple(outputs),
        tuple(gradients),
        keep_graph,
        False,
        tuple(inputs),
        allow_unreachable=True,
        accumulate_grad=False,
    )
    return found


class Carried(Generic[T]):
    """Something that each thread holds for itself, and autograd's own threads (it has one for each GPU) hold while they
    run hooks and functions of a backward pass that the thread has begun.

    Whoever sets it sets it to None before the thread ends: torch would let go of it later, and wait for Python. What
    torch carries costs autograd 1 us for each operator, so that it is asked to only where GPUs are used.
    """

    def __init__(self, name: str) -> None:
        self.own = threading.local()
        self.name = f"lightning_hetpipe {name} {id(self)}"  # as torch's table of a thread has it

    def get(self) -> T | None:
        held: T | None = getattr(self.own, "held", None)
        if held is None and torch._C._is_key_in_tls(self.name):
            held = torch._C._get_obj_in_tls(self.name)
        return held

    def set(self, value: T | None) -> None:
        self.own.held = value
        if value is not None:
            if is_initialized():
                torch._C._stash_obj_in_tls(self.name, value)
        elif torch._C._is_key_in_tls(self.name):
            remove: Any = torch._C._remove_obj_from_tls  # torch has no types here
            remove(self.name)


def strided_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """The tensors that hold what ``tensor`` holds: itself, unless it is sparse."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


def unseen_change(tensor: Tensor) -> AbstractContextManager[None]:
    """Within it, changes of ``tensor`` in place are not counted."""
    kept: Any = torch.autograd.grad_mode._unsafe_preserve_version_counter  # torch has no types here
    manager: AbstractContextManager[None] = kept(tensor)
    return manager


def viewed(tensor: Tensor) -> Tensor:
    """The tensor of which ``tensor`` is a view, for autograd; itself where it is none."""
    return tensor if tensor._base is None else tensor._base


def version_counter(tensor: Tensor) -> int:
    """Count the in-place changes of ``tensor`` so far; changes through ``tensor.data`` are not counted."""
    return tensor._version


def give_memory(tensor: Tensor, device: str = "cpu") -> None:
    """Give ``tensor`` new memory, on the host or on meta: it stays the same object, whoever refers to it."""
    kind: Any = type(tensor)
    if is_lazy(tensor):
        made = kind(device=device, dtype=tensor.dtype)
    else:
        made = torch.empty_like(tensor, device=device, requires_grad=False)
        made = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
    torch._C._swap_tensor_impl(tensor, made)


def reset_of(module: nn.Module) -> Callable[[], object] | None:
    """The method of ``module`` that gives parameters and buffers their first values, if it has one."""
    if isinstance(module, nn.MultiheadAttention | nn.Transformer):
        return module._reset_parameters
    reset: Callable[[], object] | None = getattr(module, "reset_parameters", None)
    return reset if callable(reset) else None


def enter_function_mode(mode: TorchFunctionMode) -> None:
    mode.__enter__()  # type: ignore[no-untyped-call]  # torch has no types here


def leave_function_mode(mode: TorchFunctionMode) -> bool:
    """Leaves ``mode`` until its ``__enter__``, if it is the innermost one of this thread; returns whether it is."""
    innermost: Callable[[], TorchFunctionMode | None] = _get_current_function_mode  # torch has no types here
    if innermost() is not mode:
        return False
    mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    return True


@functools.cache
def without_override(function: FunctionType) -> Callable[..., Any]:
    """``function``, one of torch's written in Python, without its first question: whether a mode or a subclass of
    Tensor runs it. What it calls is asked as ever."""
    no = {name: lambda *_: False for name in _OVERRIDDEN}
    code, values, name = function.__code__, {**function.__globals__, **no}, function.__name__
    found = FunctionType(code, values, name, function.__defaults__, function.__closure__)
    found.__kwdefaults__ = function.__kwdefaults__
    return found


_OVERRIDDEN = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


class UnseenMode(TorchFunctionMode):
    """A ``TorchFunctionMode`` that modules do not see that ask for modes before they take fused operators, as those
    for attention do in evaluations."""

    def __enter__(self) -> Self:
        global _unseen
        with _unseen_lock:
            _unseen += 1
            torch.overrides.has_torch_function = _seen_by_others  # type: ignore[assignment]  # another parameter's name
        super().__enter__()  # type: ignore[no-untyped-call]  # torch has no types here
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        global _unseen
        with _unseen_lock:
            _unseen -= 1
            if not _unseen:
                torch.overrides.has_torch_function = has_torch_function


_unseen = 0  # how many are entered, in all threads
_unseen_lock = threading.Lock()


def _seen_by_others(values: Iterable[Any]) -> bool:
    innermost: Callable[[], TorchFunctionMode | None] = _get_current_function_mode
    if isinstance(innermost(), UnseenMode) and all(type(value) in (Tensor, nn.Parameter) for value in values):
        return False
    return has_torch_function(values)


class ThreadDispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """A ``TorchDispatchMode`` that several threads may enter at once.

    torch's own also keeps process-wide flags for torch.compile, restored in the order of a stack: threads that come and
    go in another order leave them set, and from then on nothing in the process is compiled.
    """

    def __init__(self) -> None:
        """Without torch's, which prepares those flags."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """To wrap ``__torch_dispatch__`` against torch.compile would cost each operator 6 us."""
        return False

    def __enter__(self) -> Self:
        _push_mode(self)
        return self

    def __exit__(self, *exception: object) -> None:
        _pop_mode()

    def suspend(self) -> bool:
        """Leaves the mode until ``__enter__``, if it is the innermost one of this thread; returns whether it is."""
        innermost = _pop_mode()
        if innermost is not self:
            _push_mode(innermost)
        return innermost is self


def has_any_hooks(module: nn.Module) -> bool:
    """Return True if ``module`` has any hooks."""
    return any(_hooks(module))


def has_hooks(module: nn.Module) -> bool:
    """Return True if a user has put hooks on ``module``; those of ``torch.nn.utils`` (weight norm) do not count."""
    return any(_is_users(hook) for hooks in _hooks(module) for hook in hooks.values())


@contextmanager
def without_hooks(module: nn.Module) -> Iterator[None]:
    """Within it, ``module`` itself has no hooks of a user's; those that are added are gone afterwards."""
    with _without(module, _is_users):
        yield


@contextmanager
def without_checkpoint_hooks(module: nn.Module) -> Iterator[None]:
    """Within it, ``module`` itself has no hooks by which Hugging Face lets checkpoints begin at frozen weights."""
    with _without(module, _is_for_checkpoints):
        yield


@contextmanager
def _without(module: nn.Module, is_meant: Callable[[Any], bool]) -> Iterator[None]:
    before = [(hooks, dict(hooks)) for hooks in _hooks(module)]
    for hooks, all_hooks in before:
        for key in [key for key, hook in all_hooks.items() if is_meant(hook)]:
            del hooks[key]
    try:
        yield
    finally:
        for hooks, all_hooks in before:
            hooks.clear()
            hooks.update(all_hooks)


def _hooks(module: nn.Module) -> list[dict[int, Any]]:
    return [module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks]


def _is_users(hook: Any) -> bool:
    return not type(hook).__module__.startswith("torch.nn.utils") and not _is_for_checkpoints(hook)


def _is_for_checkpoints(hook: Any) -> bool:
    return getattr(hook, "__name__", None) in ("make_inputs_require_grads", "make_inputs_require_grad")


def contents(module: nn.Module) -> tuple[Any, ...]:
    """All that ``module`` itself holds, lists and dicts with what is in them: to be compared by identity."""
    held = vars(module)
    found = [*held, *held.values()]
    for value in held.values():
        if type(value) in _CONTAINERS and value:
            found += value
            if type(value) not in (list, set):
                found += value.values()
    return tuple(found)


_CONTAINERS = {dict, OrderedDict, list, set}


def has_global_hooks() -> bool:
    """Return True if a user has put hooks on all modules of the process."""
    has_any: Any = _has_any_global_hook  # torch has no types here
    return bool(has_any())


_TENSORS = ("_parameters", "_buffers", "_flat_weights", "_flat_weight_refs")
"""Attributes in which a module keeps its tensors; an RNN has lists of its weights besides."""


@contextmanager
def without_tensors(parts: Sequence[nn.Module]) -> Iterator[None]:
    """Within it, ``parts`` seem to have no parameters and buffers: ``Module.to`` leaves these where they are."""
    held = [(part, {name: vars(part)[name] for name in _TENSORS if name in vars(part)}) for part in parts]
    try:
        for part in parts:
            vars(part).update(_parameters={}, _buffers={})
        yield
    finally:
        for part, tensors in held:
            vars(part).update(tensors)


def children(module: nn.Module) -> Iterable[nn.Module | None]:
    """The modules that ``module`` itself holds. ``module.children()`` takes the hash of each, slow for a metric."""
    return module._modules.values()


def behind_compile(module: nn.Module) -> nn.Module | None:
    """The module around which ``torch.compile`` has wrapped ``module``; None if it is no such wrapper."""
    children = vars(module).get("_modules")  # a traced module has none, and a scripted one another kind of mapping
    behind = children.get("_orig_mod") if isinstance(children, dict) else None
    return behind if isinstance(behind, nn.Module) else None


COMPILED_CALL = "_compiled_call_impl"
"""Attribute that ``module.compile()`` sets: called in place of the module's own hooks and ``forward``."""


def call_uncompiled(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Calls ``module``, with its hooks, as if it had not been compiled in place."""
    call: Any = module._call_impl  # torch has no types here
    return call(*args, **kwargs)


def behind_functorch(tensor: Tensor) -> Tensor | None:
    """The tensor that ``torch.func`` has wrapped as ``tensor``, through all its levels; None if it has not."""
    functorch, inner = torch._C._functorch, tensor
    while functorch.is_functorch_wrapped_tensor(inner):
        inner = functorch.get_unwrapped(inner)
    return None if inner is tensor else inner


def graph_nodes(starts: Iterable[Node | None], barred: Iterable[Node | None]) -> Iterator[Node]:
    """The nodes of autograd's graph that ``starts`` lead to, themselves among them, on ways that pass no ``barred``."""
    seen: set[Node | None] = {None, *barred}
    pending = list(starts)
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        yield node
        seen.add(node)
        pending.extend(following for following, _ in node.next_functions)


def graph_start(tensor: Tensor) -> Node | Tensor | None:
    """Start of autograd's graph of ``tensor`` as it is now: its node, itself if it is a leaf, or None."""
    return tensor.grad_fn if tensor.grad_fn is not None else tensor if tensor.requires_grad else None


def graph_leaves(starts: Iterable[Node | Tensor | None], barred: Iterable[Node | None] = ()) -> Iterator[Tensor]:
    """The leaves that ``starts`` lead to on ways that pass no ``barred`` (``AccumulateGrad.variable`` has them)."""
    starts = [*starts]
    yield from (start for start in starts if isinstance(start, Tensor))
    for node in graph_nodes((start for start in starts if not isinstance(start, Tensor)), barred):
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf


def compiled(function: C, options: Mapping[str, Any], check: Callable[[fx.GraphModule], None]) -> C:
    """``torch.compile(function, fullgraph=True, **options)``, where ``check`` sees each graph before its backend does.

    Two kinds of guards are left out: on the process's state, such as its default dtype, which other threads change; and
    on which object stands in for the ``forward`` of a module, which is another one in each copy.
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

    compile_function: Any = torch.compile  # it does not say that it keeps the type
    made: C = compile_function(
        function,
        fullgraph=True,
        dynamic=options.get("dynamic"),
        backend=checked,
        options={"guard_filter_fn": lambda guards: [not _is_needless(guard) for guard in guards]},
    )
    return made


def _is_needless(guard: Any) -> bool:
    kind, name = str(guard.guard_type), str(guard.name)
    return kind == "GLOBAL_STATE" or (kind == "CLOSURE_MATCH" and name.endswith(".forward"))


def run_without_data(graph: fx.GraphModule) -> None:
    """Runs a graph that ``torch.compile`` has traced on tensors without data; to be called while it compiles."""
    inputs = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
    modes = [each.fake_mode for each in inputs if isinstance(each, FakeTensor)]
    with torch.no_grad(), modes[0] if modes else nullcontext():
        graph(*inputs)


def inductor_modes() -> dict[str, dict[str, Any]]:
    """The options of inductor that each ``mode`` of ``torch.compile`` stands for."""
    from torch._inductor import list_mode_options  # here, as it takes its time

    modes: Any = list_mode_options  # torch has no types here
    found: dict[str, dict[str, Any]] = modes()
    return found


def inductor_options_error(options: Mapping[str, Any]) -> str | None:
    """Error of torch for ``options`` that its inductor does not have, or has of another type; None if it takes all."""
    make: Any = torch._TorchCompileInductorWrapper  # what torch.compile itself makes of its options
    try:
        make(None, dict(options), None)
    except RuntimeError as error:
        return str(error).partition(", known options are")[0]
    return None


def cpp_compiler_error() -> str | None:
    """Error of torch where it finds no C++ compiler for its code on CPUs; None if it finds one."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        return str(error)
    return None
