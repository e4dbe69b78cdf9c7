"""Guards every private name of torch and Lightning: each test says what breaks when its name moves."""

from __future__ import annotations

import ast
import operator
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import lightning as L
import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, Timer
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.strategies import ParallelStrategy, SingleDeviceStrategy, StrategyRegistry
from lightning.pytorch.tuner.tuning import Tuner
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor, fx, nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

import lightning_hetpipe
from lightning_hetpipe import HetPipeStrategy, torch_private
from lightning_hetpipe import lightning_private as of_lightning
from tests.support.small import Learner, batches, quiet_trainer

FILES = ["torch_private.py", "lightning_private.py"]
GUARDED: set[str] = set()
Test = TypeVar("Test", bound=Callable[..., Any])


def guards(*names: str) -> Callable[[Test], Test]:
    """Marks the test of private ``names``."""
    GUARDED.update(names)
    return lambda test: test


# torch.


@guards("_foreach_copy_")
def test_foreach_copy() -> None:
    targets, sources = [torch.zeros(2), torch.zeros(3)], [torch.ones(2), torch.full((3,), 2.0)]
    torch_private.foreach_copy_(targets, sources)
    same = [torch.equal(target, source) for target, source in zip(targets, sources, strict=True)]
    assert same == [True, True], (
        "weights would not reach their version's slot: copy them one by one in torch_private.py"
    )
    torch_private.foreach_copy_([], [])


@guards("_version")
def test_version_counter() -> None:
    tensor = torch.zeros(2)
    before = torch_private.version_counter(tensor)
    tensor.add_(1)
    after = torch_private.version_counter(tensor)
    assert after == before + 1, "in-place changes of inputs, and of what lies outside the pieces, would go unnoticed"
    tensor.detach().add_(1)
    assert torch_private.version_counter(tensor) == after + 1, (
        "in-place changes through a detached view would go unnoticed"
    )


@guards("_base")
def test_viewed() -> None:
    tensor = torch.zeros(2, requires_grad=True) * 1.0
    assert torch_private.viewed(tensor[:1]) is tensor, (
        "changes in place of what a tensor is a view of would go unnoticed"
    )
    assert torch_private.viewed(tensor) is tensor


@guards("_unsafe_preserve_version_counter")
def test_unseen_change() -> None:
    tensor = torch.zeros(2)
    before = torch_private.version_counter(tensor)
    with torch_private.unseen_change(tensor):
        tensor.add_(1)
    assert torch_private.version_counter(tensor) == before, (
        "views of a tensor changed in place could not be differentiated"
    )


@guards("_pytree")
def test_pytree() -> None:
    tree = {"b": [torch.ones(1), None], "a": (1, "text")}
    leaves, spec = torch_private.pytree.tree_flatten(tree)
    broken = "values could not be taken apart at a cut, and put together behind it"
    assert torch_private.pytree.tree_unflatten(leaves, spec) == tree, broken
    assert len(torch_private.pytree.tree_leaves(tree)) == len(leaves), broken
    doubled = torch_private.pytree.tree_map_only(Tensor, lambda t: t * 2, tree)
    assert (doubled["b"][0].item(), doubled["a"]) == (2.0, (1, "text")), broken


@guards("_indices", "_values")
def test_parts_of_sparse_tensors() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1, 1])).sum().backward()
    assert table.weight.grad is not None
    indices, values = torch_private.strided_parts(table.weight.grad)
    broken = "memory of sparse gradients on a GPU would be given away while the optimizer reads it"
    assert (indices.tolist(), values.shape) == ([[1, 1]], (2, 2)), broken
    assert torch_private.strided_parts(values) == (values,), broken
    for layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        blocks = (1, 1) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None
        parts = torch_private.strided_parts(torch.eye(2).to_sparse(layout=layout, blocksize=blocks))
        assert [part.layout for part in parts] == [torch.strided] * 3, "a GPU refuses such an input of a module"


@guards("_is_key_in_tls", "_get_obj_in_tls", "_stash_obj_in_tls", "_remove_obj_from_tls")
@pytest.mark.parametrize("gpu", [False, True])
def test_carried(gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: gpu)
    held: torch_private.Carried[str] = torch_private.Carried("test")
    broken = "a GPU's hooks would not know their minibatch"
    assert held.get() is None, broken
    held.set("mine")
    seen: list[str | None] = []
    thread = threading.Thread(target=lambda: seen.append(held.get()))
    thread.start()
    thread.join(10)
    assert (held.get(), seen) == ("mine", [None]), broken
    held.set(None)
    held.set(None)
    assert held.get() is None, broken


IN_ANOTHER_THREAD = """
import os, threading, torch
from lightning_hetpipe.torch_private import Carried

torch.cuda.is_initialized = lambda: True  # as where a GPU is used
held = Carried("test")
seen = {}

class Deep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, further):
        ctx.further = further
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        seen[threading.get_ident()] = held.get()
        if ctx.further:
            with torch.enable_grad():
                Deep.apply(torch.ones((), requires_grad=True), ctx.further - 1).backward()
        return gradient, None

held.set("mine")
Deep.apply(torch.ones((), requires_grad=True), 80).backward()
held.set(None)
print(list(seen.values()), flush=True)
os._exit(0)  # such a thread of torch's ends no process in peace
"""


@pytest.mark.slow
def test_what_is_carried_is_in_threads_of_autograds() -> None:
    """Without a GPU it has threads of its own only for backward passes deep within one another."""
    ran = subprocess.run([sys.executable, "-c", IN_ANOTHER_THREAD], capture_output=True, text=True, timeout=120)
    assert ran.stdout.strip() == "['mine', 'mine']", ran.stderr


@guards("_execution_engine")
def test_run_backward() -> None:
    x, w, other = (
        torch.arange(3.0).requires_grad_(),
        torch.ones(3, requires_grad=True),
        torch.ones(1, requires_grad=True),
    )
    given = torch.tensor([1.0, -1.0, 2.0])
    plain = torch.autograd.grad([x.sin() * w], [x, w, other], grad_outputs=[given], allow_unused=True)
    y = x.sin() * w
    for keep_graph in (True, False):
        found = torch_private.run_backward([y], [given], [get_gradient_edge(x), w, other], keep_graph)
        broken = "stages would compute other gradients: call torch.autograd.grad in torch_private.py instead"
        assert found[2] is None, broken
        assert all(torch.equal(a, b) for a, b in zip(found[:2], plain[:2], strict=True) if a is not None), broken
    assert x.grad is None, "gradients would be added to live parameters, by several threads at once"
    with pytest.raises(RuntimeError, match="second time"):
        torch_private.run_backward([y], [given], [x])


class Sees(TorchFunctionMode):
    """Counts the functions that it sees."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@guards("_get_current_function_mode")
def test_function_modes_can_be_left() -> None:
    outer, inner = Sees(), Sees()
    torch_private.enter_function_mode(outer)
    try:
        with inner:
            assert not torch_private.leave_function_mode(outer), "a mode that is not the innermost one must stay"
            assert torch_private.leave_function_mode(inner), "our own bookkeeping would go through the minibatch's view"
            torch.ones(1)
            torch_private.enter_function_mode(inner)
            torch.ones(1)
    finally:
        assert torch_private.leave_function_mode(outer)
    assert (outer.count, inner.count) == (2, 1)


class Counts(torch_private.ThreadDispatchMode):
    """Counts the operators that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


@guards("_python_dispatch", "_push_mode", "_pop_mode", "_should_skip_dynamo")
def test_dispatch_modes() -> None:
    mode = Counts()
    wrapped = "torch wraps each mode against torch.compile, which costs every operator of users' layers 6 us more"
    assert "eval_frame" not in Counts.__torch_dispatch__.__code__.co_filename, wrapped
    broken = "random operators of layers could not be given a generator of their own (law L7)"
    with mode:
        torch.zeros(1).add_(1)
    torch.ones(1)
    assert mode.seen == ["zeros.default", "add_.Tensor"], broken


@guards()
def test_dispatch_modes_belong_to_their_thread() -> None:
    mode = Counts()
    with mode:
        thread = threading.Thread(target=lambda: torch.ones(1))
        thread.start()
        thread.join()
    assert mode.seen == [], "a stage's mode would catch the random operators of other stages"


@guards()
def test_dispatch_modes_can_be_suspended() -> None:
    outer, inner = Counts(), Counts()
    with outer, inner:
        assert not outer.suspend(), "a mode that is not the innermost one must stay"
        assert inner.suspend()
        torch.ones(1)
        inner.__enter__()
    assert (outer.seen, inner.seen) == (["ones.default"], []), "modules that draw nothing would run under the mode"


@guards("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
@pytest.mark.parametrize(
    "register",
    [
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ],
)
def test_hooks_of_modules(register: str) -> None:
    module = nn.Linear(2, 2)
    assert not torch_private.has_hooks(module)
    handle = getattr(module, register)(lambda *_: None)
    assert torch_private.has_hooks(module), "a hook on a layer would run in stages, at the same time as other user code"
    handle.remove()
    assert not torch_private.has_hooks(module)


@guards("_parameters", "_buffers")
def test_contents() -> None:
    module = nn.BatchNorm1d(2)
    before = torch_private.contents(module)
    assert all(map(operator.is_, before, torch_private.contents(module)))
    for change in (
        lambda: setattr(module, "eps", 0.5),
        lambda: setattr(module, "weight", nn.Parameter(torch.ones(2))),
        lambda: setattr(module, "running_mean", torch.ones(2)),
        lambda: module.register_module("child", nn.Linear(1, 1)),
        lambda: module.register_forward_hook(lambda *_: None),
        lambda: module.eval(),
    ):
        change()
        after = torch_private.contents(module)
        same = len(after) == len(before) and all(map(operator.is_, before, after))
        assert not same, "stages would not follow a change of the live module"
        before = after


@guards("_forward_hooks", "_forward_pre_hooks")
def test_hooks_taken_away_for_a_while() -> None:
    normed: Any = nn.utils.weight_norm
    module = normed(nn.Linear(2, 2))
    module.register_forward_hook(lambda module, args, output: output * 2)
    x = torch.ones(1, 2)
    expected = module(x)
    with torch_private.without_hooks(module):
        module.register_forward_hook(lambda module, args, output: output * 100)
        found = module(x) / 100
    assert torch.allclose(found * 2, expected), "a graph would hold what hooks do, which the live module's call does"
    assert torch.equal(module(x), expected), "a user's hooks would be lost"


@guards()
def test_hooks_of_torch_itself() -> None:
    normed: Any = nn.utils.weight_norm
    module = normed(nn.Linear(2, 2))
    assert module._forward_pre_hooks, "this no longer tests anything: weight_norm has no hook any more"
    assert not torch_private.has_hooks(module), "layers with weight norm would be refused"


@guards("_has_any_global_hook")
@pytest.mark.parametrize(
    "register",
    ["register_module_forward_hook", "register_module_forward_pre_hook", "register_module_full_backward_hook"],
)
def test_hooks_of_all_modules(register: str) -> None:
    assert not torch_private.has_global_hooks()
    handle = getattr(nn.modules.module, register)(lambda *_: None)
    found = torch_private.has_global_hooks()
    handle.remove()
    assert found, "hooks on all modules would run in stages, at the same time as other user code"


@guards("_compiled_call_impl", "_call_impl")
def test_modules_compiled_in_place() -> None:
    module = nn.Linear(2, 2)
    assert vars(module).get(torch_private.COMPILED_CALL) is None
    expected = module(torch.ones(1, 2))
    module.compile(backend="eager")
    assert vars(module).get(torch_private.COMPILED_CALL) is not None, "dynamo would trace the pipeline's own code"
    assert torch.equal(torch_private.call_uncompiled(module, torch.ones(1, 2)), expected)


@guards("_orig_mod", "_modules")
def test_compiled_modules() -> None:
    plain = nn.Sequential(nn.Linear(2, 2))
    assert list(torch_private.children(plain)) == list(plain), "a metric put in place of another would go unnoticed"
    compiled: Any = torch.compile(plain, backend="eager")
    assert torch_private.behind_compile(compiled) is plain, "compiled code would run in stages, on the live weights"
    plain.compile(backend="eager")
    assert torch_private.behind_compile(plain) is None, "module.compile(), which works, would be taken for a wrapper"


@guards("_dynamo")
def test_graphs_of_compiled_code_are_checked() -> None:
    seen: list[int] = []

    def check(graph: fx.GraphModule) -> None:
        torch_private.run_without_data(graph)
        seen.append(1)

    def compute(x: Tensor) -> Tensor:
        return x * 2 + torch.arange(3)

    function = torch_private.compiled(compute, {"backend": "aot_eager", "dynamic": False}, check)
    assert torch.equal(function(torch.ones(3)), torch.tensor([2.0, 3.0, 4.0]))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        function(torch.ones(3, dtype=torch.float32))
    finally:
        torch.set_default_dtype(before)
    assert seen == [1], "stages would compile anew whenever user code changes the default dtype"


@guards("_dynamo")
def test_errors_of_the_compiler() -> None:
    def breaks(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x

    def refuse(graph: fx.GraphModule) -> None:
        raise ArithmeticError("not this one")

    # Else a layer that cannot be compiled would end training instead of running as it is.
    for function, check in ((breaks, torch_private.run_without_data), (torch.tanh, refuse)):
        compiled = torch_private.compiled(function, {"backend": "eager"}, check)
        with pytest.raises(torch_private.CompilerError):
            compiled(torch.ones(2))

    def double(x: Tensor) -> Tensor:
        return x * 2

    compiled = torch_private.compiled(double, {"backend": "eager", "dynamic": False}, torch_private.run_without_data)
    for count in range(2, 10):
        compiled(torch.ones(count))
    with pytest.raises(torch_private.CompilerLimit):
        compiled(torch.ones(10))
    torch.compiler.reset()


@guards("_inductor", "_subclasses")
def test_inductors_modes_and_its_compiler() -> None:
    modes = torch_private.inductor_modes()
    assert modes["default"] == {}
    assert modes["reduce-overhead"].get("triton.cudagraphs"), "modes with CUDA graphs would not be refused"
    assert torch_private.inductor_options_error({"max_autotune": True, "triton.cudagraphs": False}) is None
    assert torch_private.inductor_options_error({"zzz": 1}) == "Unexpected optimization option zzz"
    assert "got str should be bool" in str(torch_private.inductor_options_error({"max_autotune": "yes"}))
    found = torch_private.cpp_compiler_error()
    assert found is None or "compiler" in found


@guards("_C", "_functorch")
def test_tensors_that_torch_func_wraps() -> None:
    weight, seen = nn.Parameter(torch.ones(2, 2)), []

    def look(row: Tensor) -> Tensor:
        seen.append(torch_private.behind_functorch(row))
        return row.sum()

    torch.vmap(look)(weight)
    torch.func.grad(look)(weight)
    assert all(found is weight for found in seen), "training_step would read live weights through torch.func"
    assert len(seen) == 2
    assert torch_private.behind_functorch(weight) is None


@guards("variable")
def test_leaves_of_a_graph() -> None:
    used, unused = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    frozen = torch.ones(2)
    broken = "parameters that the loss reaches outside the pieces would be dropped silently"
    graph = torch_private.graph_start((used * 2 * frozen + used).sum() + (unused * 0).detach().sum())
    found = torch_private.graph_leaves([graph])
    assert [id(leaf) for leaf in found] == [id(used)], broken
    assert list(torch_private.graph_leaves([torch_private.graph_start(torch.ones(1))])) == []
    assert next(torch_private.graph_leaves([torch_private.graph_start(used)])) is used, broken


@guards()
def test_leaves_of_a_graph_up_to_its_seams() -> None:
    inside, outside = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    hidden = outside * 3 * inside
    for graph, found in ((hidden.sum(), []), (hidden.sum() + inside.sum(), [inside])):
        leaves = torch_private.graph_leaves([graph.grad_fn], [hidden.grad_fn])
        assert list(map(id, leaves)) == list(map(id, found))


class Branches(nn.Module):
    def forward(self, x: Tensor, *, scale: Tensor, shift: Tensor) -> dict[str, Tensor]:
        return {"y": torch.relu(x).mul_(scale) + shift, "x": x.view(-1)}


@guards("_codegen", "_guards_fn", "_ops", "_schema")
def test_exported_graphs() -> None:
    x, one = torch.randn(3, 2), torch.ones(())
    shapes = {"x": {0: torch.export.Dim("rows", max=8)}, "scale": None, "shift": None}
    exported = torch.export.export(Branches(), (x,), {"shift": one, "scale": one}, dynamic_shapes=shapes, strict=False)
    graph: Any = exported.module()
    inputs = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
    assert inputs[1:] == torch_private.keywords_of(graph), "arguments by name would go to others' places"
    nested = torch_private.pytree.tree_unflatten([1, 2], torch_private.outputs_of(graph))
    assert nested == {"y": 1, "x": 2}, "the outputs of a captured model would be nested otherwise than its own"
    getattr(graph, torch_private.GRAPH_GUARDS)(torch.randn(8, 2), one, one)
    with pytest.raises(AssertionError):  # else a graph would run on inputs that it was not made for
        getattr(graph, torch_private.GRAPH_GUARDS)(torch.randn(9, 2), one, one)
    aten = torch.ops.aten
    broken = "a value that is changed in place could cross a cut"
    assert isinstance(aten.relu_.default, torch_private.OperatorOverload), broken
    assert isinstance(torch.ops.higher_order.wrap_with_set_grad_enabled, torch_private.HigherOrderOperator), broken
    assert torch_private.arguments_of(aten.mul_.Tensor) == [("self", True, True), ("other", False, False)], broken
    assert torch_private.arguments_of(aten.view.default)[0] == ("self", True, False), broken


# Lightning.


def fetcher_of(loader: Any) -> Any:
    fetcher = _PrefetchDataFetcher(prefetch_batches=0)
    combined = CombinedLoader(loader, "max_size_cycle")
    combined.limits = [float("inf")]
    fetcher.setup(combined)
    return fetcher


@guards("_DataFetcher", "_start_profiler", "_stop_profiler", "_combined_loader")
def test_data_fetchers() -> None:
    fetcher = fetcher_of(batches(3))
    broken = "the look-ahead could not stand in for Lightning's fetcher"
    assert isinstance(fetcher, of_lightning.DataFetcher), broken
    iter(fetcher)
    for name in ("combined_loader", "_combined_loader", "iterator", "length", "fetched", "done"):
        assert hasattr(fetcher, name), f"{broken}: {name} is gone"
    for name in ("_start_profiler", "_stop_profiler"):
        assert callable(getattr(fetcher, name)), f"{broken}: {name} is gone"
    batch, batch_idx, dataloader_idx = next(fetcher)
    assert (len(batch), batch_idx, dataloader_idx) == (2, 0, 0), broken
    assert (fetcher.fetched, fetcher.done, fetcher.length) == (1, False, 3), broken
    next(fetcher), next(fetcher)
    assert fetcher.done, broken


@guards("_DataLoaderIterDataFetcher")
def test_the_fetcher_of_dataloader_iter() -> None:
    assert issubclass(of_lightning.DataLoaderIterFetcher, of_lightning.DataFetcher), (
        "training_step(dataloader_iter) would be looked ahead of"
    )


@guards("_state_dicts")
def test_states_of_loaders() -> None:
    class Resumable(DataLoader[Any]):
        def state_dict(self) -> dict[str, Any]:
            return {"at": 7}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise NotImplementedError

    fetcher = fetcher_of(Resumable(batches(3).dataset))
    assert of_lightning.loader_iterator(fetcher.combined_loader) is None
    iter(fetcher)
    assert of_lightning.loader_iterator(fetcher.combined_loader) is fetcher.combined_loader._iterator is not None
    broken = "a checkpoint would save a resumable DataLoader's state ahead of its step (law L9)"
    assert fetcher.combined_loader._state_dicts() == [{"at": 7}], broken


@guards("_MultiProcessingDataLoaderIter", "_get_data", "_get_iterator", "_iterator")
def test_dataloaders_with_workers() -> None:
    events: list[str] = []

    @contextmanager
    def waiting() -> Iterator[None]:
        events.append("wait")
        yield

    loader = DataLoader(batches(1).dataset, 2, num_workers=1)
    fetcher = fetcher_of(loader)
    iter(fetcher)
    redirects = of_lightning.with_workers(fetcher, waiting, lambda: events.append("start"))
    next(fetcher)
    assert events == ["wait"], "user code would stand still while Lightning's thread waits for DataLoader workers"
    next(iter(loader))
    assert events == ["wait", "start", "wait"], "DataLoader workers would be forked while stages work"
    for redirect in redirects:
        redirect.remove()
    list(loader)
    list(fetcher)
    assert events.count("start") == 1


@guards("from_training_step_output", "closure_loss")
def test_closure_results() -> None:
    loss = torch.tensor(6.0, requires_grad=True)
    broken = "the pipeline would differentiate another loss than Lightning"
    for output in (loss, {"loss": loss, "extra": 1}):
        found = of_lightning.closure_loss(output, 2)
        assert found is not None, broken
        assert (found.item(), found.requires_grad) == (3.0, True), broken
    assert of_lightning.closure_loss(None, 2) is None, broken


class Looks(L.Callback):
    """Looks at what is private, where a step begins."""

    def __init__(self) -> None:
        self.progress: list[tuple[int, int]] = []
        self.arguments: list[tuple[Any, ...]] = []

    def on_before_zero_grad(self, trainer: L.Trainer, pl_module: Any, optimizer: Any) -> None:
        self.progress.append(of_lightning.begun_minibatches(trainer))
        self.arguments.append(of_lightning.step_arguments(trainer, "batch", 3))


class LooksAtCuts(L.Callback):
    """State of the loop when a checkpoint or a validation could come."""

    def __init__(self) -> None:
        self.in_a_step: list[bool] = []
        self.at_the_end: list[bool] = []

    def on_before_zero_grad(self, trainer: L.Trainer, *_: Any) -> None:
        self.in_a_step.append(of_lightning.in_a_step(trainer))

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.in_a_step.append(of_lightning.in_a_step(trainer))

    def on_validation_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.at_the_end.append(of_lightning.validates_at_the_end(trainer))


class Validated(Learner):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


@guards("batch_progress")
@pytest.mark.parametrize(("interval", "at_the_end"), [(0.5, [False, True]), (2, [False, False]), (1.0, [True])])
def test_where_checkpoints_and_validations_come(interval: float, at_the_end: list[bool]) -> None:
    looks = LooksAtCuts()
    trainer = quiet_trainer("auto", callbacks=[looks], val_check_interval=interval, num_sanity_val_steps=0)
    trainer.fit(Validated(), batches(4), batches(1))
    assert looks.in_a_step == [True, False] * 4, "a checkpoint in the middle of a step would be taken for a cut"
    assert looks.at_the_end == at_the_end, "virtual workers with other numbers of batches would validate alone"


class Stops(L.Callback):
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.should_stop = True


@guards("_can_stop_early")
@pytest.mark.parametrize(("min_epochs", "at_the_end"), [(None, [True]), (1, [False, False])])
def test_a_stop_validates_where_it_may_stop(min_epochs: int | None, at_the_end: list[bool]) -> None:
    looks = LooksAtCuts()
    settings = {"val_check_interval": 2, "num_sanity_val_steps": 0, "min_epochs": min_epochs, "max_epochs": 1}
    quiet_trainer("auto", callbacks=[Stops(), looks], **settings).fit(Validated(), batches(4), batches(1))
    assert looks.at_the_end == at_the_end, "virtual workers would take a validation of mid-epoch for the last"


@guards("_signal_connector", "_slurm_sigusr_handler_fn")
def test_the_signal_of_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SLURMEnvironment, "detect", staticmethod(lambda: False))
    trainer = quiet_trainer("auto", plugins=[SLURMEnvironment(requeue_signal=signal.SIGUSR2)], devices=1)
    heard = []
    redirect = of_lightning.on_requeue(trainer, lambda redirect, *args: heard.append(args[0]))
    before = signal.getsignal(signal.SIGUSR2)
    trainer._signal_connector.register_signal_handlers()
    try:
        signal.raise_signal(signal.SIGUSR2)
    finally:
        trainer._signal_connector.teardown()
        redirect.remove()
    assert signal.getsignal(signal.SIGUSR2) is before
    assert heard == [signal.SIGUSR2], "a checkpoint would be saved in the middle of whatever runs, and hang"


@guards("_every_n_train_steps", "_train_time_interval", "_duration", "_interval", "_val_check_time_interval")
def test_what_decides_by_steps_or_by_time() -> None:
    hour = timedelta(hours=1)
    callbacks: list[L.Callback] = [
        ModelCheckpoint(every_n_train_steps=2),
        ModelCheckpoint(train_time_interval=hour),
        ModelCheckpoint(),
    ]
    callbacks += [Timer(hour), Timer(hour, interval="epoch"), Timer(), L.Callback()]
    by_steps, at_every_step = (
        map(of_lightning.saves_by_steps, callbacks),
        map(of_lightning.asks_at_every_step, callbacks),
    )
    broken = "what ties virtual workers to each other would go unnoticed"
    assert [*by_steps] == [True, False, False, False, False, False, False], broken
    assert [*at_every_step] == [False, True, False, True, False, False, False], broken
    trainers = [quiet_trainer("auto", val_check_interval=interval) for interval in ("00:01:00:00", 3, 0.5)]
    assert [*map(of_lightning.seconds_between_validations, trainers)] == [3600, None, None]


@guards("_build_kwargs", "batch_progress")
def test_progress_and_arguments_of_a_step() -> None:
    looks = Looks()
    quiet_trainer("auto", callbacks=[looks], max_epochs=2).fit(Learner(), batches(2))
    assert looks.progress == [(1, 1), (2, 2), (3, 1), (4, 2)], "minibatches would be numbered otherwise"
    assert looks.arguments == [("batch", 3)] * 4, "training_step would be given other arguments"


@guards()
def test_arguments_of_a_step_without_batch_idx() -> None:
    class Short(Learner):
        def training_step(self, batch: Any) -> Any:  # type: ignore[override]
            return self.net(batch[0]).sum()

    looks = Looks()
    quiet_trainer("auto", callbacks=[looks]).fit(Short(), batches(1))
    assert looks.arguments == [("batch",)], "training_step(batch) would be given a batch_idx too"


class Evaluates(Learner):
    """Looks at the evaluating loop in its own step."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 5) -> None:
        loop = of_lightning.evaluating_loop(self.trainer)
        hook = {"validate": "validation_step", "predict": "predict_step"}[self.trainer.state.fn or ""]
        fetcher = of_lightning.fetcher_of(loop)
        assert fetcher is not None
        of_lightning.set_fetcher(loop, fetcher)
        self.found.append((fetcher.done, of_lightning.evaluation_arguments(loop, hook, "batch", 3, 1)))

    predict_step = validation_step


@guards(
    "_EvaluationLoop",
    "_PredictionLoop",
    "_build_kwargs",
    "_build_step_args_from_hook_kwargs",
    "_data_fetcher",
    "_is_sequential",
)
@pytest.mark.parametrize("task", ["validate", "predict"])
@pytest.mark.parametrize("loaders", [1, 2])
def test_the_fetcher_and_the_arguments_of_an_evaluation(task: str, loaders: int) -> None:
    module = Evaluates()
    given = [batches(2) for _ in range(loaders)]
    getattr(quiet_trainer("auto"), task)(module, given if loaders > 1 else given[0])
    args = ("batch", 3, 1) if loaders > 1 else ("batch", 3)
    assert [a for _, a in module.found] == [args] * 2 * loaders, "the evaluation's step would be given other arguments"
    assert [done for done, _ in module.found][-2:] == [False, True], "this would not be the loop's own fetcher"


@guards("_on_before_batch_transfer")
def test_hooks_before_the_transfer() -> None:
    class Hooked(Learner):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return (batch, dataloader_idx) if batch == "batch" else batch

    class Moves(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
            found.append(of_lightning.move_before_transfer(pl_module, "batch"))

    found: list[Any] = []
    quiet_trainer("auto", callbacks=[Moves()]).fit(Hooked(), batches(1))
    assert found == [("batch", 0)], "on_before_batch_transfer would not run for batches that are fetched ahead"


@guards("_checkpoint_io")
def test_the_writer_of_checkpoints() -> None:
    strategy, io = HetPipeStrategy(), TorchCheckpointIO()
    of_lightning.set_checkpoint_io(strategy, io)
    assert super(HetPipeStrategy, strategy).checkpoint_io is io, "a user's plugin would not write checkpoints"


@guards("_layer_sync")
def test_synchronised_batchnorm() -> None:
    strategies = [quiet_trainer(HetPipeStrategy(), sync_batchnorm=sync).strategy for sync in (False, True)]
    asked = [of_lightning.synchronises_batchnorm(s) for s in strategies if isinstance(s, ParallelStrategy)]
    assert asked == [False, True], "sync_batchnorm=True would be dropped silently"


@guards("_average_model")
def test_averages() -> None:
    averaging = EMAWeightAveraging()
    trainer = quiet_trainer(HetPipeStrategy(), callbacks=[averaging])
    assert of_lightning.averages(trainer) == []
    module = Learner()
    averaging.setup(trainer, module, "fit")
    numbers = {tensor.numel() for tensor in of_lightning.averages(trainer)}
    wanted = {tensor.numel() for tensor in module.state_dict().values()} | {1}
    assert numbers == wanted, "virtual workers would evaluate and end with averages of their own"


@guards()
def test_several_optimizers() -> None:
    class Two(Learner):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD([parameter], lr=0.1) for parameter in list(self.parameters())[:2]]

    with pytest.raises(RuntimeError) as raised:
        quiet_trainer("auto").fit(Two(), batches(1))
    assert of_lightning.wants_several_optimizers(raised.value), "users would be advised manual optimization"


@guards("_StrategyRegistry")
def test_the_registry() -> None:
    assert isinstance(StrategyRegistry, of_lightning.StrategyRegistry), "strategy='hetpipe' would be unknown"


@guards("_post_accumulate_grad_hooks")
@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters(register: str) -> None:
    parameter = nn.Parameter(torch.ones(2))
    assert not of_lightning.has_gradient_hooks(parameter)
    getattr(parameter, register)(lambda *_: None)
    assert of_lightning.has_gradient_hooks(parameter), "gradient hooks of the user would not run"


@guards("_optimizer_step_post_hooks")
def test_the_order_of_hooks_after_a_step() -> None:
    optimizer, ran = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), []
    for name in ("first", "second"):
        optimizer.register_step_post_hook(lambda *_, name=name: ran.append(name))
    ours = optimizer.register_step_post_hook(lambda *_: ran.append("ours"))
    of_lightning.run_first(optimizer, ours)
    optimizer.step()
    assert ran == ["ours", "first", "second"], "a user's hook would run while training_step runs (law L8)"
    ours.remove()
    optimizer.step()
    assert ran[3:] == ["first", "second"], "our hook would stay in the user's optimizer"


@guards("log_every_n_steps")
def test_the_log_interval() -> None:
    trainer = quiet_trainer("auto", log_every_n_steps=7)
    assert of_lightning.log_interval(trainer) == 7, "metrics would not keep to the Trainer's interval"


@guards("_Launcher")
def test_launchers() -> None:
    required = of_lightning.BaseLauncher.__abstractmethods__
    assert required == {"is_interactive_compatible", "kill", "launch"}, "our launcher would lack a method"


@guards("_TunerExitException")
def test_the_end_of_tuning() -> None:
    ended: list[type[BaseException]] = []

    class Watched(of_lightning.BaseLauncher):
        is_interactive_compatible = True

        def kill(self, signum: Any) -> None:
            raise NotImplementedError

        def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except BaseException as error:
                ended.append(type(error))
                raise

    strategy = SingleDeviceStrategy()
    strategy._launcher = Watched()
    Tuner(quiet_trainer(strategy)).lr_find(Learner(), batches(3), num_training=2, update_attr=False)
    assert ended == [of_lightning.TunerExit], "the end of lr_find would end the other virtual workers"


# All of them.


def names_in(file: str) -> set[str]:
    """Private names of others in ``file``: imported ones, attributes and those in strings."""
    path = Path(lightning_hetpipe.__file__).parent / file
    tree = ast.parse(path.read_text())
    own = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found.update((node.module or "").split("."), (alias.name for alias in node.names))
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            found.add(node.value)
    return {name for name in found - own if name.startswith("_") and not name.startswith("__")}


@pytest.mark.parametrize("file", FILES)
def test_every_private_name_is_guarded(file: str) -> None:
    assert names_in(file) - GUARDED == set(), "give these a test of their own"
