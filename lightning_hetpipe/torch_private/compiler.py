"""Private names of torch for what ``torch.compile`` compiles, and the compilers behind it.

If torch does not have a name:

- ``_dynamo``, ``_subclasses``: this module cannot be imported.
- ``_inductor``: the check of ``compile`` fails if the backend is inductor.
- ``_TorchCompileInductorWrapper``: the check of ``compile`` fails if options of inductor are given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import fx
from torch._dynamo.exc import FailOnRecompileLimitHit as CompilerLimit
from torch._dynamo.exc import TorchDynamoException as CompilerError
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["CompilerError", "CompilerLimit"]

C = TypeVar("C", bound=Callable[..., Any])


_compile: Any = torch.compile  # torch's own, also while another stands in its place; it does not keep the type


def compiled(function: C, options: Mapping[str, Any], check: Callable[[fx.GraphModule], None]) -> C:
    """Call ``torch.compile(function, fullgraph=True, **options)`` so that ``check`` sees each graph before the backend.

    Two kinds of guards are left out. Guards on the process's state, such as its default dtype, fail because other
    threads change that state. Guards on the object that replaces a module's ``forward`` fail in copies with other
    objects.
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
    return kind == "GLOBAL_STATE" or (kind == "CLOSURE_MATCH" and name.endswith(".forward"))


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
