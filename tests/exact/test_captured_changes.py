"""Captured models follow what changes at the borders of epochs, evaluate as they are, and are refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.exact.pipelines import Pinned, delayed, even
from tests.exact.running import Record, assert_equal, assert_same_run, expect, fit
from tests.exact.test_captured import CASES, made
from tests.exact.test_live_changes import Edit
from tests.oracle import Batch, Outputs
from tests.support.captured_models import Tower, Whole, Words
from tests.support.equality import assert_same, difference
from tests.support.marks import quick, slow_except
from tests.support.models import ADAMW, CLASSES, SGD, WORDS, Learner, vectors, words
from tests.support.small import assert_refused


def run(make: Callable[[], Learner], loader: Any, strategy: Any, callbacks: Any = list, **settings: Any) -> Record:
    torch.manual_seed(7)
    return fit(make(), loader, callbacks(), strategy=strategy, **settings)


@pytest.mark.parametrize(
    "name",
    slow_except(["resnet", "gpt", "translator", "pieces", "towers", "noise between"], "towers"),
)
def test_one_in_flight_is_the_plain_trainer(name: str) -> None:
    _, loader, layers = CASES[name]
    assert_same_run(fit(made(name), loader, strategy="auto"), fit(made(name), loader, strategy=even(layers, 3, 1)))


def test_validation_evaluates_the_model_itself() -> None:
    class Validates(Whole):
        def validation_step(self, batch: Batch, batch_idx: int) -> None:
            assert not self.model.training
            self.log("val_loss", self.compute(batch)["loss"])

    task, loader, val_loader = Validates(Slope()), vectors(18, 4), vectors(9, 3)
    expected = expect(task, loader, 4)
    record = fit(task, loader, val_loader=val_loader, strategy=even(3, 2, 4), val_check_interval=2)
    assert_equal(expected, record)
    assert record.trainer is not None
    version = copy.deepcopy(task).eval()  # the last validation is within the last epoch
    version.load_state_dict({**expected.states[9].weights, **expected.states[9].buffers})
    with torch.no_grad():
        losses = torch.stack([version.compute(batch)["loss"] for batch in val_loader])
    assert torch.allclose(losses.mean(), record.trainer.callback_metrics["val_loss"], rtol=1e-6)


class Slope(nn.Module):
    """Reads a plain attribute in forward."""

    slope: float

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES)
        self.slope = 0.1

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.two(F.leaky_relu(self.norm(self.one(x)), self.slope))
        return y


def bend(model: Any) -> None:
    model.slope = 0.9


def exchange(model: Any) -> None:
    model.norm.running_mean = torch.ones(8)
    model.norm.eval()


class EditModel(Edit):
    def _edit(self, trainer: Any, pl_module: Any, at_start: bool) -> None:
        if (trainer.current_epoch, at_start) == (self.epoch, self.at_start):
            self.edit(pl_module.model)


@quick("3-exchange")
@pytest.mark.parametrize("edit", [bend, exchange])
@pytest.mark.parametrize("in_flight", [1, 3])
def test_changes_between_epochs_are_captured_again(edit: Callable[[Any], None], in_flight: int) -> None:
    task, loader = Whole(Slope()), vectors(20, 4)
    same = expect(task, loader, in_flight)
    expected = expect(task, loader, in_flight, edit=lambda p, module: edit(module.model) if p == 5 else None)
    record = fit(task, loader, [EditModel(edit, 1)], strategy=delayed(Pinned((0, 1, 2), in_flight), 1))
    assert_same(expected.outputs, record.outputs, "outputs")
    assert_same(expected.states[-1], record.end, "end")
    assert difference(same.states[-1], record.end) is not None


@pytest.mark.slow  # test_captured and tests/pipeline/test_random_operators.py have such draws
def test_attention_dropout_does_not_depend_on_the_cut() -> None:
    """torch's own attention, whose dropout is no module."""

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.qkv, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, 24), nn.Linear(8, WORDS)

        def forward(self, ids: Tensor) -> Tensor:
            q, k, v = self.qkv(self.words(ids)).unsqueeze(1).chunk(3, -1)
            x = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5 if self.training else 0.0, is_causal=True)
            y: Tensor = self.head(F.dropout(x.squeeze(1), 0.2, self.training))
            return y

    def make() -> Learner:
        return Words(Attends(), ADAMW)

    one = run(make, words(14, 4), delayed(Pinned((0,), 3), 1))
    assert_same_run(one, run(make, words(14, 4), delayed(Pinned((0, 1, 2), 3), 2)))
    assert not torch.equal(one.outputs[0]["logits"], one.outputs[4]["logits"])  # of the same batch


# Refused.


class Hidden(nn.Module):
    """Depends on what no graph sees: how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, CLASSES)
        self.calls = [0]

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0] += 1
        y: Tensor = self.linear(x) * self.calls[0]
        return y


class Remembers(nn.Module):
    """As above, in the class."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        y: Tensor = self.linear(x) * type(self).calls
        return y


class Decides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y if y.sum() > 0 else -y


class Straight(torch.autograd.Function):
    """Rounds, and lets gradients pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0]


class Quantized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        straight: Any = Straight.apply  # torch has no types here
        y: Tensor = self.two(straight(self.one(x)))
        return y


@pytest.mark.parametrize(
    ("model", "fragments"),
    [
        (Quantized, ["'model' has a backward pass of its own, the torch.autograd.Function Straight"]),
        (Hidden, ["layer 'model' sets its attribute 'calls' (of Hidden) in forward"]),
        (Remembers, ["'model' changes 'Remembers.calls' in forward", "`type(self).calls += 1`"]),
        (Decides, ["'model' decides by the values of its data", "return y if y.sum() > 0 else -y", "torch.where"]),
    ],
)
def test_what_no_graph_can_do(model: Callable[[], nn.Module], fragments: list[str]) -> None:
    strategy = Pinned((0,), 3, module="model")  # else it is taken apart
    assert_refused(Whole(model()), *fragments, strategy=strategy, loader=vectors(20, 4))


@pytest.mark.parametrize("model", [Quantized, Hidden, Decides])
def test_one_stage_with_one_in_flight_needs_no_graph(model: Callable[[], nn.Module]) -> None:
    """Lightning's own steps run there."""
    plain = run(lambda: Whole(model()), vectors(20, 4), "auto")
    assert_same_run(plain, run(lambda: Whole(model()), vectors(20, 4), Pinned((0,), 1)))


def test_a_backward_of_ones_own_between_two_modules() -> None:
    """It is user code, and stays as it is."""

    class Between(Learner):
        def __init__(self) -> None:
            super().__init__(SGD)
            self.one, self.two = Tower(6), Tower(4)

        def compute(self, batch: Batch) -> Outputs:
            straight: Any = Straight.apply  # torch has no types here
            return {"loss": self.two(straight(self.one(batch[0]) * 3)).square().mean() + batch[0].mean()}

    plain = run(Between, vectors(20, 4), "auto")
    assert_same_run(plain, run(Between, vectors(20, 4), Pinned((0, 2), 1)))


def test_a_hook_inside_is_refused() -> None:
    module = Whole(Tower(6))
    cast(Any, module.model).hidden.register_forward_hook(lambda *_: None)
    assert_refused(
        module,
        "layer 'model' has a hook (on 'model.hidden', a Linear)",
        strategy=Pinned((0,), 2, module="model"),
        loader=vectors(20, 4),
    )


@pytest.mark.parametrize("in_flight", slow_except([1, 3], 3))
def test_a_tensor_that_is_given_twice_in_some_calls(in_flight: int) -> None:
    """Attention of a sequence to itself is another graph than that to another one, and computes by other operators."""

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(6, 2)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            z: Tensor = self.attention(x, y, y)[0]
            return z

    class Meets(Learner):
        def __init__(self) -> None:
            super().__init__(SGD)
            self.model = Attends()

        def compute(self, batch: Batch) -> Outputs:
            x = torch.tanh(batch[0])
            return {"loss": self.model(x, x if self.is_first(x) else x.flip(1)).square().mean()}

        def is_first(self, x: Tensor) -> bool:
            return bool(x[0, 0] == self.firsts[0, 0]) or bool(x[0, 0] > 0)

        firsts = torch.tanh(next(iter(vectors(28, 4)))[0])

    task, loader = Meets(), vectors(28, 4)
    firsts = [task.is_first(torch.tanh(x)) for x, _ in loader]
    assert firsts[0]
    assert not all(firsts)
    assert_equal(expect(task, loader, in_flight), fit(task, loader, strategy=even(1, 1, in_flight)))


def test_inputs_of_too_many_kinds() -> None:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, CLASSES)

        def forward(self, x: Tensor, times: int) -> Tensor:
            for _ in range(times):
                x = torch.tanh(x)
            y: Tensor = self.linear(x)
            return y

    class Counts(Whole):
        def training_step(self, batch: Batch, batch_idx: int) -> Outputs:
            return {"loss": self.model(batch[0], batch_idx % self.kinds).square().mean()}

        kinds = 5

    expected = run(lambda: Counts(Takes()), vectors(48, 4), "auto")
    assert_same_run(expected, run(lambda: Counts(Takes()), vectors(48, 4), Pinned((0,), 1)))
    Counts.kinds = 12
    message = "'model' was given inputs of more than 10 kinds, each of which needs its own graph"
    assert_refused(Counts(Takes(), SGD), message, strategy=Pinned((0,), 3), loader=vectors(48, 4))


class Averages(nn.Module):
    """Changes a buffer in later calls only, so that its first graph leaves it alone."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, CLASSES)
        self.register_buffer("average", torch.zeros(CLASSES))

    def forward(self, x: Tensor, update: bool) -> Tensor:
        y: Tensor = self.linear(x)
        if update:
            self.average.lerp_(y.detach().mean(0), 0.5)
        return y * (1 + self.average)


def test_a_buffer_that_later_graphs_change() -> None:
    """It was one tensor for all minibatches in flight, as long as none changed it."""

    loader = DataLoader(TensorDataset(torch.randn(60, 6), torch.arange(60)), 4)

    class Updates(Whole):
        def compute(self, batch: Batch) -> Outputs:
            return {"loss": self.model(batch[0], bool(batch[1][0] > 24)).square().mean()}

    def made() -> Updates:
        torch.manual_seed(5)
        return Updates(Averages(), SGD)

    assert_equal(expect(made(), loader, 3), fit(made(), loader, strategy=Pinned((0,), 3)))


@pytest.mark.parametrize("memory", [False, True], ids=["module", "memory"])
def test_a_norm_that_two_pieces_share_is_refused_where_they_are_cut(memory: bool) -> None:
    norm, other = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    other.running_mean = norm.running_mean[:]  # type: ignore[index]  # it has one

    class Normed(nn.Module):
        def __init__(self, inputs: int, norm: nn.Module) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(inputs, 4), norm

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.norm(self.linear(x))
            return y

    class Two(Learner):
        def __init__(self) -> None:
            super().__init__(SGD)
            self.first, self.second = Normed(6, norm), Normed(4, other if memory else norm)

        def compute(self, batch: Batch) -> Outputs:
            return {"loss": self.second(self.first(batch[0])).square().mean()}

    message = "layers first.norm and second.norm share a module that has buffers"
    assert_refused(Two(), message, strategy=Pinned((0, 2), 2), loader=vectors(20, 4))
