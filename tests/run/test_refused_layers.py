"""Layers that no stage can run as a plain run would, and state that changes while minibatches are in flight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn import functional as F

from lightning_hetpipe import HetPipeStrategy
from tests.exact.pipelines import Pinned
from tests.support.small import Learner, assert_refused, batches, layers, pipeline, plain_step
from tests.support.trainers import quiet_trainer

# State outside of the pieces that changes while minibatches are in flight.


def counts(module: Any, x: Tensor, y: Tensor, batch_idx: int) -> Any:
    module.seen += len(x)
    return plain_step(module, x, y, batch_idx)


def replaces(module: Any, x: Tensor, y: Tensor, batch_idx: int) -> Any:
    module.seen = module.seen + len(x)
    return plain_step(module, x, y, batch_idx)


def with_buffer(step: Callable[..., Any]) -> Learner:
    module = Learner(step)
    module.register_buffer("seen", torch.zeros(()))
    return module


@pytest.mark.parametrize("step", [counts, replaces])
def test_a_buffer_that_training_step_changes(step: Callable[..., Any]) -> None:
    assert_refused(
        with_buffer(step),
        "'seen', which lies outside the pipelined modules, was changed by training_step",
        "set in_flight=1",
        strategy=pipeline(3),
    )


@pytest.mark.parametrize("step", [counts, replaces])
def test_such_a_buffer_with_nothing_in_flight(step: Callable[..., Any]) -> None:
    module = with_buffer(step)
    quiet_trainer(pipeline(1)).fit(module, batches())
    assert torch.equal(module.get_buffer("seen"), torch.tensor(20.0))


class Teacher(L.Callback):
    """Moves a teacher towards the student after each step, as in self-distillation."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        with torch.no_grad():
            for mine, theirs in zip(pl_module.teacher.parameters(), pl_module.net.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)


def distil(module: Any, x: Tensor, y: Tensor, batch_idx: int) -> Any:
    with torch.no_grad():
        target = module.teacher(x)
    return F.mse_loss(module.net(x), target)


@pytest.mark.parametrize(("step", "teacher"), [(counts, None), (replaces, None), (distil, Teacher)])
def test_such_changes_with_synchronous_weights(step: Callable[..., Any], teacher: type[Teacher] | None) -> None:
    """Nothing runs ahead there, as the error says."""
    found = list[dict[str, Tensor]]()
    for strategy in ("auto", HetPipeStrategy(stages=2, in_flight=3, weights="sync")):
        torch.manual_seed(0)
        module = Learner(step, teacher=layers().requires_grad_(False))
        module.register_buffer("seen", torch.zeros(()))
        quiet_trainer(strategy, callbacks=[teacher()] if teacher else []).fit(module, batches())
        found.append(module.state_dict())
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_a_teacher_that_a_callback_moves() -> None:
    module = Learner(distil, teacher=layers().requires_grad_(False))
    assert_refused(
        module,
        "'teacher.0.weight', which lies outside the pipelined modules, was changed after minibatch",
        "set in_flight=1",
        strategy=pipeline(3),
        callbacks=[Teacher()],
    )


def follows(module: Any, x: Tensor, y: Tensor, batch_idx: int) -> Any:
    """As self-supervised models of libraries do it: the teacher follows where the step begins."""
    with torch.no_grad():
        for mine, its in zip(module.teacher.parameters(), module.net.parameters(), strict=True):
            mine.lerp_(its, 0.1)
    return distil(module, x, y, batch_idx)


def test_a_teacher_that_training_step_moves() -> None:
    message = "'teacher.0.weight', which lies outside the pipelined modules, was changed by training_step"
    remedy = "change it in on_train_batch_end, and pipeline 'teacher', too (module=['net', 'teacher'])"
    assert_refused(
        Learner(follows, teacher=layers().requires_grad_(False)), message, remedy, strategy=pipeline(3), callbacks=[]
    )


def test_that_remedy() -> None:
    module = Learner(distil, teacher=layers().requires_grad_(False))
    strategy = HetPipeStrategy(stages=2, in_flight=3, module=["net", "teacher"])
    quiet_trainer(strategy, callbacks=[Teacher()]).fit(module, batches())
    assert strategy.last_run.in_flight == 3


def test_such_a_teacher_with_nothing_in_flight_is_that_of_a_plain_run() -> None:
    weights = list[dict[str, Tensor]]()
    for strategy in ("auto", pipeline(1)):
        torch.manual_seed(0)
        module = Learner(follows, teacher=layers().requires_grad_(False))
        quiet_trainer(strategy).fit(module, batches())
        weights.append(module.state_dict())
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def normed_teacher() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)).requires_grad_(False)


def test_a_teacher_with_batchnorm() -> None:
    remedy = "set in_flight=1, or weights='sync', or pipeline 'teacher', too (module=['net', 'teacher'])"
    message = "'teacher.1.running_mean', which lies outside the pipelined modules, was changed by training_step"
    assert_refused(Learner(distil, teacher=normed_teacher()), message, remedy, strategy=pipeline(3))


def test_such_a_teacher_with_nothing_in_flight() -> None:
    module = Learner(distil, teacher=layers().requires_grad_(False))
    before = module.get_parameter("teacher.0.weight").clone()
    quiet_trainer(pipeline(1), callbacks=[Teacher()]).fit(module, batches())
    assert not torch.equal(module.get_parameter("teacher.0.weight"), before)


class Gaussian(nn.Module):
    """Gives a distribution, which is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Normal:
        return Normal(self.second(self.first(x).tanh()), 1.0)


def likely(module: Any, x: Tensor, y: Tensor, batch_idx: int) -> Any:
    return -module.net(x).log_prob(F.one_hot(y, 3)).mean()


def test_a_distribution_that_a_module_gives() -> None:
    remedy = "name the modules in it to pipeline (module=[...])"
    assert_refused(Learner(likely, net=Gaussian()), "'net' gives a Normal, of which its 'log_prob' is used", remedy)


def test_the_remedy_for_that() -> None:
    weights = list[dict[str, Tensor]]()
    for strategy in ("auto", pipeline(1, module=["net.first", "net.second"])):
        torch.manual_seed(0)
        module = Learner(likely, net=Gaussian())
        quiet_trainer(strategy).fit(module, batches())
        weights.append(module.state_dict())
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


class Resets(L.Callback):
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            pl_module.net[1].reset_running_stats()


def test_a_pipelined_buffer_that_a_callback_changes() -> None:
    module = Learner(net=nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)))
    message = "of a pipelined BatchNorm1d was changed by hand after minibatch 3"
    assert_refused(module, message, "set in_flight=1", strategy=pipeline(3), callbacks=[Resets()])


class ReadFirst(nn.Module):
    """Reads a buffer in its first layer, and changes it behind its last one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.second((self.first(x) - self.mean).tanh())
        y: Tensor = self.third(h)
        if self.training:
            self.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        return y


def test_a_buffer_that_joins_all_layers() -> None:
    message = "the buffer 'net.mean' is read in one of its parts and changed in a later one, which joins 3 of them"
    remedy = "set weights='sync' and pipeline only the parts (module=['net.first', 'net.second', 'net.third'])"
    assert_refused(Learner(net=ReadFirst()), message, remedy, strategy=pipeline(3))


def test_the_remedy_for_such_a_buffer() -> None:
    weights = list[dict[str, Tensor]]()
    parts = ["net.first", "net.second", "net.third"]
    for strategy in ("auto", pipeline(3, weights="sync", module=parts)):
        torch.manual_seed(0)
        module = Learner(net=ReadFirst())
        quiet_trainer(strategy).fit(module, batches())
        weights.append(module.state_dict())
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


# Layers that cannot be run elsewhere.


def test_a_first_layer_that_changes_its_input() -> None:
    module = Learner(net=nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 3)))
    message = "layer 'net.0' changes the input of the pipelined module 'net' in place"
    assert_refused(module, message, "inplace=False")


class Profiled(L.Callback):
    """Has a profiler name modules by hooks, as PyTorchProfiler(record_module_names=True) does when profiling starts."""

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        pl_module.net[1].register_forward_pre_hook(lambda *_: None)


def test_a_hook_may_be_a_profilers() -> None:
    assert_refused(Learner(), "PyTorchProfiler(record_module_names=False)", callbacks=[Profiled()])


def test_hooks_on_all_modules() -> None:
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert_refused(Learner(), "a hook on all modules is set", "remove it before fit")
    finally:
        handle.remove()


def test_a_layer_that_sets_an_attribute() -> None:
    class Counts(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x

    module = Learner(net=nn.Sequential(nn.Linear(6, 8), Counts(), nn.Linear(8, 3)))
    assert_refused(module, "layer 'net.1' sets its attribute 'calls' (of Counts)", "register_buffer")


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"])
@pytest.mark.parametrize("deep", [False, True])
def test_a_layer_with_a_hook(kind: str, deep: bool) -> None:
    inner = nn.Linear(8, 8)
    layer = nn.Sequential(inner, nn.Tanh()) if deep else inner
    module = Learner(net=nn.Sequential(nn.Linear(6, 8), layer, nn.Linear(8, 3)))
    getattr(inner, kind)(lambda *_: None)
    name = "net.1.0" if deep else "net.1"
    assert_refused(module, f"layer '{name}' has a hook (on Linear)", "remove it")


def test_a_layer_that_changes_one_of_two_inputs_in_the_same_memory() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = -x if x.isnan().any() else x  # so that the net has no graph, in which both would be one layer
            return x, x.view(-1)

    class Doubles(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
            return pair[0].mul_(2.0) + pair[1].view_as(pair[0])

    module = Learner(net=nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), Twice(), Doubles(), nn.Linear(8, 3)))
    strategy = Pinned((0, 3), 2)
    assert_refused(module, "layers net.3 to net.4 changes its input in place", "several tensors", strategy=strategy)


def test_a_layer_with_a_generator_of_its_own() -> None:
    class Draws(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator()

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.rand(x.shape, generator=self.generator)

    module = Learner(net=nn.Sequential(nn.Linear(6, 8), Draws(), nn.Linear(8, 3)))
    assert_refused(module, "layer 'net.1' keeps a random generator of its own (in Draws)", "draw without it")


def test_a_layer_that_changes_its_own_weights() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(10, 6, max_norm=0.5)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.words(x.argmax(1))
            return y

    module = Learner(net=nn.Sequential(Words(), nn.Linear(6, 3)))
    assert_refused(module, "layer 'net.0' changes its own weights in forward", "in a callback")


def test_a_layer_that_cannot_be_copied() -> None:
    class Locked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.numbers = (number for number in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return -x if x.isnan().any() else x  # so that the net has no graph, and its layers are copied

    module = Learner(net=nn.Sequential(nn.Linear(6, 3), Locked()))
    assert_refused(module, "cannot be copied for weight stashing", "copy.deepcopy can copy")


def test_a_module_with_buffers_on_both_sides_of_a_cut() -> None:
    norm = nn.BatchNorm1d(6)
    module = Learner(net=nn.Sequential(norm, norm, nn.Linear(6, 3)))
    assert_refused(module, "layers net.0 and net.1 share a module", "stages=1", strategy=HetPipeStrategy(stages=3))
