"""Private names of torch for code that it compiles, and for graphs that it exports."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from lightning_hetpipe.torch_private.graphs import (
    ASSERTS_METADATA,
    GRAPH_GUARDS,
    READ_VALUE,
    SAFE_SOFTMAX,
    CompilerError,
    CompilerLimit,
    HigherOrderOperator,
    OperatorOverload,
    arguments_of,
    compiled,
    cpp_compiler_error,
    inductor_modes,
    inductor_options_error,
    outputs_of,
    run_without_data,
    split_outputs,
    traced_as_called,
)
from lightning_hetpipe.torch_private.modes import ThreadDispatchMode
from lightning_hetpipe.torch_private.modules import COMPILED_CALL, behind_compile, call_uncompiled, children
from lightning_hetpipe.torch_private.tensors import pytree
from tests.private.guarding import guards


@guards("_compiled_call_impl", "_call_impl")
def test_modules_compiled_in_place() -> None:
    module = nn.Linear(2, 2)
    assert vars(module).get(COMPILED_CALL) is None
    expected = module(torch.ones(1, 2))
    module.compile(backend="eager")
    assert vars(module).get(COMPILED_CALL) is not None, "dynamo would trace the pipeline's own code"
    assert torch.equal(call_uncompiled(module, torch.ones(1, 2)), expected)


@guards("_orig_mod", "_modules")
def test_compiled_modules() -> None:
    plain = nn.Sequential(nn.Linear(2, 2))
    assert list(children(plain)) == list(plain), "a metric put in place of another would go unnoticed"
    wrapper: Any = torch.compile(plain, backend="eager")
    assert behind_compile(wrapper) is plain, "compiled code would run in stages, on the live weights"
    plain.compile(backend="eager")
    assert behind_compile(plain) is None, "module.compile(), which works, would be taken for a wrapper"


@guards("_dynamo")
def test_graphs_of_compiled_code_are_checked() -> None:
    seen: list[int] = []

    def check(graph: fx.GraphModule) -> None:
        run_without_data(graph)
        seen.append(1)

    def compute(x: Tensor) -> Tensor:
        return x * 2 + torch.arange(3)

    function = compiled(compute, {"backend": "aot_eager", "dynamic": False}, check)
    assert torch.equal(function(torch.ones(3)), torch.tensor([2.0, 3.0, 4.0]))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        function(torch.ones(3, dtype=torch.float32))
    finally:
        torch.set_default_dtype(before)
    assert seen == [1], "stages would compile anew whenever user code changes the default dtype"


@guards("_is_compiling_flag", "_is_exporting_flag")
def test_tracing_is_hidden() -> None:
    told: list[bool] = []

    class Told(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            told.append(torch.compiler.is_compiling() or torch.compiler.is_exporting())
            with traced_as_called():
                told.append(torch.compiler.is_compiling() or torch.compiler.is_exporting())
            return x + 1

    torch.export.export(Told(), (torch.ones(2),))
    assert told[:2] == [True, False], "models would compute by operators of which plain training knows nothing"


@guards("_is_make_fx_tracing", "_transformer_encoder_layer_fwd", "_native_multi_head_attention")
@pytest.mark.parametrize("gradients", [False, True])
def test_tracing_is_hidden_from_attention_without_gradients(gradients: bool) -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor) -> Any:
            with traced_as_called():
                x = self.encoder(x)
                return self.attention(x, x, x)

    with torch.set_grad_enabled(gradients):
        sizes = {"x": {0: torch.export.Dim.AUTO}}
        graph = torch.export.export(Attends().eval(), (torch.ones(2, 3, 8),), dynamic_shapes=sizes, strict=False).graph
    found = [name for name in ("encoder_layer_fwd", "native_multi_head") if name in str(graph)]
    # Fused operators have no gradients; without these, evaluations compute by them.
    assert len(found) == (0 if gradients else 2)


@guards("_meta_registrations", "_meta_grouped_mm_common", "_create_grouped_mm_output_tensor")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_experts_are_traced_in_all_dtypes(dtype: torch.dtype) -> None:
    class Experts(nn.Module):
        def forward(self, x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
            with traced_as_called():
                return functional.grouped_mm(x, weights, offs=ends)

    given = torch.randn(6, 8, dtype=dtype), torch.randn(2, 8, 16, dtype=dtype), torch.tensor([2, 6], dtype=torch.int32)
    graph = torch.export.export(Experts(), given, strict=False)
    assert torch.equal(graph.module()(*given), functional.grouped_mm(given[0], given[1], offs=given[2])), "Mixtral"


@guards("_dynamo")
def test_errors_of_the_compiler() -> None:
    def breaks(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x

    def refuse(graph: fx.GraphModule) -> None:
        raise ArithmeticError("not this one")

    def curve(x: Tensor) -> Tensor:  # a function of torch's may run in a frame that torch has been told to skip
        return x.tanh()

    # Else a layer that cannot be compiled would end training instead of running as it is.
    for function, check in ((breaks, run_without_data), (curve, refuse)):
        broken = compiled(function, {"backend": "eager"}, check)
        with pytest.raises(CompilerError):
            broken(torch.ones(2))

    def double(x: Tensor) -> Tensor:
        return x * 2

    doubled = compiled(double, {"backend": "eager", "dynamic": False}, run_without_data)
    for count in range(2, 10):
        doubled(torch.ones(count))
    with pytest.raises(CompilerLimit):
        doubled(torch.ones(10))
    torch.compiler.reset()


@guards("_inductor", "_subclasses", "_TorchCompileInductorWrapper")
def test_inductors_modes_and_its_compiler() -> None:
    modes = inductor_modes()
    assert modes["default"] == {}
    assert modes["reduce-overhead"].get("triton.cudagraphs"), "modes with CUDA graphs would not be refused"
    assert inductor_options_error({"max_autotune": True, "triton.cudagraphs": False}) is None
    assert inductor_options_error({"zzz": 1}) == "Unexpected optimization option zzz"
    assert "got str should be bool" in str(inductor_options_error({"max_autotune": "yes"}))
    found = cpp_compiler_error()
    assert found is None or "compiler" in found


class Branches(nn.Module):
    def forward(self, x: Tensor, *, scale: Tensor, shift: Tensor) -> dict[str, Tensor]:
        return {"y": torch.relu(x).mul_(scale) + shift, "x": x.view(-1)}


class Pairs(nn.Module):
    def forward(self, x: Tensor) -> tuple[dict[str, Tensor], list[Tensor]]:
        return {"y": x * 2}, [-x]


@guards("_codegen", "_replace", "_guards_fn", "_ops", "_schema")
def test_exported_graphs() -> None:
    x, one = torch.randn(3, 2), torch.ones(())
    shapes = {"x": {0: torch.export.Dim("rows", max=8)}, "scale": None, "shift": None}
    exported = torch.export.export(Branches(), (x,), {"shift": one, "scale": one}, dynamic_shapes=shapes, strict=False)
    graph: Any = exported.module()
    nested = pytree.tree_unflatten([1, 2], outputs_of(graph))
    assert nested == {"y": 1, "x": 2}, "the outputs of a captured model would be nested otherwise than its own"
    getattr(graph, GRAPH_GUARDS)(torch.randn(8, 2), one, one)
    with pytest.raises(AssertionError):  # else a graph would run on inputs that it was not made for
        getattr(graph, GRAPH_GUARDS)(torch.randn(9, 2), one, one)
    pair: Any = torch.export.export(Pairs(), (x,), strict=False).module()
    assert [node.target for node in split_outputs(pair)] == [torch.ops.aten.neg.default]
    assert torch.equal(pair(x)["y"], x * 2), "what a module decides by would be an output of its"
    aten = torch.ops.aten
    broken = "a value that is changed in place could cross a cut"
    assert isinstance(aten.relu_.default, OperatorOverload), broken
    assert isinstance(torch.ops.higher_order.wrap_with_set_grad_enabled, HigherOrderOperator), broken
    assert arguments_of(aten.mul_.Tensor) == [("self", True, True), ("other", False, False)], broken
    assert arguments_of(aten.view.default)[0] == ("self", True, False), broken


class Notes(ThreadDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


@guards("_local_scalar_dense")
def test_the_operator_that_reads_a_value() -> None:
    with Notes() as notes:
        assert bool(torch.tensor(True))
    assert notes.seen[-1] is READ_VALUE, "a module's decisions would be answered with False at first"


@guards("_assert_tensor_metadata")
def test_the_operator_that_asserts_what_a_tensor_is() -> None:
    class Casts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.to(torch.float32) + 1

    graph = torch.export.export(Casts(), (torch.ones(2),), strict=False).graph
    found = [node for node in graph.nodes if node.target is ASSERTS_METADATA]
    assert found, "layers would refuse tensors that lie on another device"
    assert all("device" in node.kwargs for node in found)


@guards("_safe_softmax")
def test_softmax_of_what_is_hidden_is_zero() -> None:
    scores = torch.tensor([[1.0, 1.0, -torch.inf], [-torch.inf] * 3])
    assert SAFE_SOFTMAX(scores, -1).tolist() == [[0.5, 0.5, 0.0], [0.0, 0.0, 0.0]]
