"""Private names of torch for modules, their hooks, and modes under which they run."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lightning_hetpipe import lightning_private as of_lightning
from lightning_hetpipe.capture.contents import Contents
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.torch_private import modes
from lightning_hetpipe.torch_private.modes import (
    OwnMode,
    ThreadDispatchMode,
    UntoldFunction,
    enter_function_mode,
    leave_function_mode,
    without_dispatch_modes,
)
from lightning_hetpipe.torch_private.modules import (
    computing_hooks,
    has_global_hooks,
    has_hooks,
    reset_of,
    without_hooks,
    without_tensors,
)
from lightning_hetpipe.torch_private.tensors import has_gradient_hooks, without_gradient_hooks
from tests.private.guarding import guards


class Sees(TorchFunctionMode):
    """Counts the functions that it sees."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@guards("_get_current_function_mode_stack")
def test_function_modes_can_be_left() -> None:
    outer, inner = Sees(), Sees()
    enter_function_mode(outer)
    try:
        with inner:
            assert not leave_function_mode(outer), "a mode that is not the innermost one must stay"
            assert leave_function_mode(inner), "our own bookkeeping would go through the minibatch's view"
            torch.ones(1)
            enter_function_mode(inner)
            torch.ones(1)
    finally:
        assert leave_function_mode(outer)
    assert (outer.count, inner.count) == (2, 1)


class Told(OwnMode):
    """Notes what it is told of."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(type(func).__name__)
        return func(*args, **(kwargs or {}))


class Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.mul(2)


class DoublesUntold(UntoldFunction):
    forward = Doubles.forward


@guards("_SingleLevelFunction", "_get_current_function_mode_stack")
def test_modes_are_told_of_custom_functions() -> None:
    """Also where ``apply`` was looked up before; the innermost mode is told first, and hands on to the next."""
    seen: list[str] = []
    double: Any = Doubles.apply
    untold: Any = DoublesUntold.apply
    one = torch.ones(())
    with Told(seen), Told(seen):
        double(one)
    broken = "operands of custom functions would stay on their devices, and parameters would be of another version"
    assert seen[:2] == ["CustomFunction", "_Heard"], broken
    seen.clear()
    with Told(seen):
        untold(one)
    assert seen == ["method_descriptor"], "the boundary of a piece would have all its tensors moved to one device"
    assert double(one) == 2
    assert "apply" not in vars(torch.autograd.function._SingleLevelFunction)


class Passes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, inner: Any) -> Any:
        return inner(x)


@guards("_forward_cls")
def test_custom_functions_whose_modes_are_not_told_are_refused() -> None:
    """From torch 2.14 on ``apply`` is C code: one that was looked up before the import of the package asks nobody."""
    base: Any = super(torch.autograd.function._SingleLevelFunction, Doubles)
    before: Any = base.apply
    one = torch.ones(())
    passes: Any = Passes.apply
    double: Any = Doubles.apply
    assert before(one) == 2
    with Told([]):
        if isinstance(modes.TORCHS_APPLY, classmethod):  # calls one that can be replaced
            assert before(one) == 2
            return
        calls: list[tuple[Any, tuple[Any, ...]]] = [(before, (one,)), (passes, (one, before))]
        for early, given in calls:
            with pytest.raises(SettingError, match=r"'Doubles\.apply', which the model calls, was looked up before"):
                early(*given)
        assert passes(one, double) == 2, "the way out that the error names"
    assert before(one) == 2


class Counts(ThreadDispatchMode):
    """Counts the operators that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


@guards("_parameters", "_buffers", "_flat_weights", "_flat_weight_refs")
def test_without_tensors() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    before = [*module.parameters(), *module.buffers()]
    with without_tensors([module[0]]):
        assert list(module.parameters()) == [*module[1].parameters()], "a model would go to one device as a whole"
        module.to(torch.float64)
    after = [*module.parameters(), *module.buffers()]
    assert list(map(id, after)) == list(map(id, before))
    assert [tensor.dtype for tensor in after[:2]] == [torch.float32] * 2
    layer = nn.LSTM(2, 2)
    with without_tensors([layer]):
        layer.to(torch.float64)
    assert layer(torch.ones(1, 2))[0].shape == (1, 2), "a spread RNN would have lost its list of weights"


@guards("_python_dispatch", "_push_mode", "_pop_mode", "_get_current_dispatch_mode", "_should_skip_dynamo")
def test_dispatch_modes() -> None:
    mode = Counts()
    wrapped = "torch wraps each mode against torch.compile, which costs every operator of users' layers 6 us more"
    assert "eval_frame" not in Counts.__torch_dispatch__.__code__.co_filename, wrapped
    broken = "random operators of layers could not be given a generator of their own (law L7)"
    with mode:
        torch.zeros(1).add_(1)
        with mode, without_dispatch_modes():
            torch.ones(1)
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
    assert not has_hooks(module)
    handle = getattr(module, register)(lambda *_: None)
    assert has_hooks(module), "a hook on a layer would run in stages, at the same time as other user code"
    handle.remove()
    assert not has_hooks(module)


@guards("_parameters", "_buffers", "_flat_weights", "_flat_weight_refs")
def test_contents() -> None:
    norm: Any = nn.BatchNorm1d(2)
    recurrent: Any = nn.LSTM(1, 1)
    module = nn.Sequential(norm, recurrent)
    held = Contents([*module.modules()])
    assert held.same()
    for change in (
        lambda: setattr(norm, "eps", 0.5),
        lambda: setattr(norm, "weight", nn.Parameter(torch.ones(2))),
        lambda: setattr(norm, "running_mean", torch.ones(2)),
        lambda: norm.register_module("child", nn.Linear(1, 1)),
        lambda: norm.register_forward_hook(lambda *_: None),
        lambda: norm.eval(),
        lambda: recurrent._flat_weights.reverse(),
        lambda: recurrent._flat_weights.pop(),
        lambda: setattr(module, "new", None),
        lambda: vars(module).update(other=vars(module).pop("new")),
    ):
        change()
        assert not held.same(), "stages would not follow a change of the live module"
        held.take()
        assert held.same()


@guards("_forward_hooks", "_forward_pre_hooks")
def test_hooks_taken_away_for_a_while() -> None:
    normed: Any = nn.utils.weight_norm
    module = normed(nn.Linear(2, 2))
    module.register_forward_hook(lambda module, args, output: output * 2)
    x = torch.ones(1, 2)
    expected = module(x)
    with without_hooks(module):
        module.register_forward_hook(lambda module, args, output: output * 100)
        found = module(x) / 100
    assert torch.allclose(found * 2, expected), "a graph would hold what hooks do, which the live module's call does"
    assert torch.equal(module(x), expected), "a user's hooks would be lost"


@guards()
def test_hooks_of_torch_itself() -> None:
    normed: Any = nn.utils.weight_norm
    module = normed(nn.Linear(2, 2))
    assert module._forward_pre_hooks, "this no longer tests anything: weight_norm has no hook any more"
    assert not has_hooks(module), "layers with weight norm would be refused"


@guards("_forward_pre_hooks")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm, nn.utils.prune.RandomUnstructured])
def test_hooks_that_compute_weights(norm: Any) -> None:
    """They ask a module for no more than attributes, so that something else can be given in its place."""
    module: Any = nn.Linear(4, 4)
    norm.apply(module, "weight", 0.5) if hasattr(norm, "apply") else norm(module)
    module(torch.ones(1, 4))
    expected = module.weight
    own = SimpleNamespace(training=False, **dict(module.named_parameters()), **dict(module.named_buffers()))
    for hook in computing_hooks(module):
        hook(own, ())
    assert torch.equal(own.weight, expected), "observers would see weights that no forward has computed"


@guards("_has_any_global_hook")
@pytest.mark.parametrize(
    "register",
    ["register_module_forward_hook", "register_module_forward_pre_hook", "register_module_full_backward_hook"],
)
def test_hooks_of_all_modules(register: str) -> None:
    assert not has_global_hooks()
    handle = getattr(nn.modules.module, register)(lambda *_: None)
    found = has_global_hooks()
    handle.remove()
    assert found, "hooks on all modules would run in stages, at the same time as other user code"


@guards("_post_accumulate_grad_hooks")
@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters(register: str) -> None:
    parameter = nn.Parameter(torch.ones(2))
    assert not has_gradient_hooks(parameter)
    getattr(parameter, register)(lambda *_: None)
    assert has_gradient_hooks(parameter), "gradient hooks of the user would not run"


@guards("_backward_hooks")
def test_a_backward_without_hooks() -> None:
    leaf = torch.ones(2, requires_grad=True)
    made: Any = leaf * 2
    ran = list[int]()
    made.register_hook(lambda gradient: ran.append(1))
    made.retain_grad()
    for looks in (True, False):
        with without_gradient_hooks([made]) if looks else nullcontext():
            torch.autograd.grad(made.sum(), leaf, retain_graph=True)
        assert (made.grad is None, ran) == (looks, [1] * (not looks)), "hooks of the user would run once more"


@guards("_optimizer_step_post_hooks")
def test_the_order_of_hooks_after_a_step() -> None:
    optimizer, ran = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), []
    for name in ("first", "second"):
        optimizer.register_step_post_hook(lambda *_, name=name: ran.append(name))
    assert of_lightning.has_step_hooks(optimizer)
    ours = optimizer.register_step_post_hook(lambda *_: ran.append("ours"))
    of_lightning.run_first(optimizer, ours)
    optimizer.step()
    assert ran == ["ours", "first", "second"], "a user's hook would run while training_step runs (law L8)"
    ours.remove()
    optimizer.step()
    assert ran[3:] == ["first", "second"], "our hook would stay in the user's optimizer"


@guards("_reset_parameters")
def test_attention_resets_itself() -> None:
    """Torch's attention and Transformer name the method otherwise than all its other modules."""
    for module in (nn.MultiheadAttention(4, 2), nn.Transformer(4, 2, 1, 1, 4)):
        weight = next(module.parameters())
        reset = reset_of(module)
        assert reset is not None, "such a module, made on meta, would be refused"
        with torch.no_grad():
            weight.fill_(torch.nan)
        reset()
        assert weight.isfinite().all()
    assert reset_of(nn.ReLU()) is None
