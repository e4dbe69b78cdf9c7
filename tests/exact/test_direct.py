"""Parameters that ``training_step`` uses itself, beside its calls of pipelined modules."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe.errors import SettingError
from tests.exact.pipelines import Pinned, delayed, even
from tests.exact.running import assert_equal, assert_same_run, expect, fit
from tests.oracle import Batch, Outputs, Recipe
from tests.support.marks import quick, slow_except
from tests.support.models import ADAMW, CLASSES, SGD, Learner, Pieces, Task, vectors
from tests.support.small import assert_refused, pipeline


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES))


class Temperature(Task):
    """Learns a parameter above the pipelined model."""

    def __init__(self, recipe: Recipe = SGD) -> None:
        super().__init__(net(), recipe)
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def compute(self, batch: Batch) -> Outputs:
        x, y = batch
        return {"loss": F.cross_entropy(self.net(x) * self.temperature.exp(), y)}


class Penalty(Task):
    """Adds a term of its own on a weight that is inside of the pipelined model."""

    def __init__(self, recipe: Recipe = SGD) -> None:
        super().__init__(net(), recipe)

    def compute(self, batch: Batch) -> Outputs:
        x, y = batch
        weights = [p.square().sum() for name, p in self.net.named_parameters() if name.endswith("weight")]
        return {"loss": F.cross_entropy(self.net(x), y) + 0.1 * torch.stack(weights).sum()}


class Prompt(Task):
    """Learns a part of the model's input."""

    def __init__(self, recipe: Recipe = SGD) -> None:
        super().__init__(net(), recipe)
        self.prompt = nn.Parameter(torch.linspace(-1, 1, 6))

    def compute(self, batch: Batch) -> Outputs:
        x, y = batch
        return {"loss": F.cross_entropy(self.net(x + self.prompt), y)}


class Query(Prompt):
    """Gives the model nothing but a parameter."""

    def compute(self, batch: Batch) -> Outputs:
        _, y = batch
        logits: Tensor = self.net(self.prompt)
        return {"loss": F.cross_entropy(logits.expand(len(y), -1), y)}


class Around(Pieces):
    """Parameters below, between and above two pieces, and one that is used in all these places."""

    def __init__(self, recipe: Recipe = SGD) -> None:
        super().__init__(recipe)
        self.below = nn.Parameter(torch.ones(6))
        self.between = nn.Parameter(torch.zeros(8))
        self.above = nn.Parameter(torch.ones(6))

    def compute(self, batch: Batch) -> Outputs:
        x, _ = batch
        z = self.encoder(x * self.below)
        y = self.decoder(z + self.between)
        return {"loss": F.mse_loss(y * self.above, x) + self.between.square().sum(), "z": z.detach()}


class Beside(Task):
    """A module beside the pipelined one, which `module=` leaves out, runs in training_step itself."""

    def __init__(self, recipe: Recipe = SGD) -> None:
        super().__init__(net(), recipe)
        self.head = nn.LSTM(CLASSES, CLASSES)

    def compute(self, batch: Batch) -> Outputs:
        x, y = batch
        return {"loss": F.cross_entropy(self.head(self.net(x))[0], y)}


class Momentum(Task):
    """Reads the model's weights without a gradient, as momentum encoders do."""

    def __init__(self, recipe: Recipe = SGD) -> None:
        super().__init__(net(), recipe)

    def compute(self, batch: Batch) -> Outputs:
        x, y = batch
        with torch.no_grad():
            norm = torch.cat([p.detach().flatten() for p in self.net.parameters()]).norm()
            first = self.get_parameter("net.0.weight").data.clone()
        return {"loss": F.cross_entropy(self.net(x), y) / norm, "norm": norm, "first": first}


class Tied(Task):
    """Uses a weight of the model again, twice in one product, and calls one of its layers again."""

    def __init__(self, recipe: Recipe = SGD) -> None:
        super().__init__(net(), recipe)

    def compute(self, batch: Batch) -> Outputs:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        weight = self.get_parameter("net.2.weight")
        return {"loss": loss + F.linear(weight, weight).mean() + self.net[0](x).square().mean()}


class Later(Temperature):
    """Needs its parameter only in a few minibatches."""

    def compute(self, batch: Batch) -> Outputs:
        x, y = batch
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits * self.temperature if x[0, 0] > 0 else logits, y)}


KINDS: dict[str, tuple[Callable[[Recipe], Learner], int, dict[str, Any]]] = {
    "temperature": (Temperature, 5, {}),
    "penalty": (Penalty, 5, {}),
    "prompt": (Prompt, 5, {}),
    "query": (Query, 5, {}),
    "around": (Around, 7, {}),
    "beside": (Beside, 5, {"module": "net"}),
    "momentum": (Momentum, 5, {}),
    "tied": (Tied, 5, {}),
    "later": (Later, 5, {}),
}


@quick(
    "temperature-1-3",
    "temperature-4-3",
    "penalty-4-3",
    "prompt-4-3",
    "query-4-3",
    "around-4-3",
    "beside-4-3",
    "momentum-1-3",
    "tied-4-3",
    "later-4-3",
)
@pytest.mark.parametrize(("in_flight", "stages"), [(1, 1), (2, 1), (4, 1), (1, 3), (2, 3), (4, 3)])
@pytest.mark.parametrize("kind", KINDS)
def test_direct_use_equals_the_oracle(kind: str, in_flight: int, stages: int) -> None:
    make, layers, settings = KINDS[kind]
    task, loader = make(ADAMW if stages == 1 else SGD), vectors(18, 4)
    assert_equal(
        expect(task, loader, in_flight), fit(task, loader, strategy=even(layers, stages, in_flight, **settings))
    )


@pytest.mark.parametrize("kind", ["temperature", "around"])
def test_with_accumulation_and_clipping(kind: str) -> None:
    make, layers, settings = KINDS[kind]
    task, loader = make(SGD), vectors(30, 4)
    expected = expect(task, loader, 3, accumulate=3, clip_norm=0.1)
    options: dict[str, Any] = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}
    assert_equal(expected, fit(task, loader, strategy=even(layers, 2, 3, **settings), **options))


@quick("around", "tied", "later")
@pytest.mark.parametrize("kind", KINDS)
def test_it_repeats_under_delays(kind: str) -> None:
    make, layers, settings = KINDS[kind]
    runs = []
    for seed in (1, 2):
        torch.manual_seed(3)
        strategy = delayed(even(layers, 3, 4, **settings), seed)
        runs.append(fit(make(SGD), vectors(18, 4), strategy=strategy))
    assert_same_run(*runs)


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        return gradient * scale, (gradient * x).sum()


class Scaled(Temperature):
    """Scales with what is no function of torch's."""

    def __init__(self, product: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.product = product

    def compute(self, batch: Batch) -> Outputs:
        x, y = batch
        return {"loss": F.cross_entropy(self.product(self.net(x), self.temperature), y)}


@quick("own-3")
@pytest.mark.parametrize("in_flight", [1, 3])
@pytest.mark.parametrize("kind", ["own", "compiled"])
def test_what_is_no_function_of_torchs(kind: str, in_flight: int) -> None:
    product: Any = Own.apply if kind == "own" else torch.compile(torch.mul, backend="aot_eager")
    torch.compiler.reset()  # it gives up on what other tests have had compiled too often
    product(torch.ones(2), torch.ones(()))  # it keeps a thread
    task, loader = Scaled(product), vectors(18, 4)
    assert_equal(expect(task, loader, in_flight), fit(task, loader, strategy=Pinned((0, 1), in_flight)))


def refuse(task: Learner, in_flight: int, *fragments: str) -> None:
    assert_refused(task, *fragments, strategy=pipeline(in_flight), loader=vectors(18, 4))


class Acts(Task):
    """Does something with its weights and buffers from the second minibatch on."""

    def __init__(self, act: Callable[[Any], Any], first: int = 1) -> None:
        layers = [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, CLASSES)]
        super().__init__(nn.Sequential(*layers))
        self.act, self.first = act, first
        self.net.register_buffer("constant", torch.ones(2))
        self.net[1].register_buffer("constant", torch.ones(2))

    def training_step(self, batch: Batch, batch_idx: int) -> Outputs:
        if batch_idx >= self.first:
            with torch.no_grad():
                self.act(self)
        return self.compute(batch)


def halve(task: Any) -> None:
    task.net[0].weight.mul_(0.5)


def halve_data(task: Any) -> None:
    task.net[0].weight.data.mul_(0.5)


def halve_alias(task: Any) -> None:
    task.net[0].weight.detach().view(-1)[:3] *= 0.5


def halve_at_once(task: Any) -> None:
    torch._foreach_mul_(list(task.net.parameters()), 0.5)


def set_item(task: Any) -> None:
    task.net[0].weight[0] = 0


def into(task: Any) -> None:
    torch.zeros(8, 6, out=task.net[0].weight)


def exchange(task: Any) -> None:
    task.net[0].weight.data = torch.zeros(8, 6)


def freeze(task: Any) -> None:
    task.net[0].weight.requires_grad_(False)


def hook(task: Any) -> None:
    task.net[0].weight.register_hook(lambda gradient: gradient)


@pytest.mark.parametrize("in_flight", slow_except([1, 3], 3))
@pytest.mark.parametrize("act", [halve, halve_data, halve_alias, halve_at_once, set_item, into])
def test_weights_that_training_step_changes(act: Callable[[Any], Any], in_flight: int) -> None:
    refuse(Acts(act), in_flight, "training_step changes the parameter 'net.0.weight' in place")


@pytest.mark.parametrize("in_flight", slow_except([1, 3], 3))
@pytest.mark.parametrize(
    ("act", "what"),
    [(exchange, "sets data of"), (freeze, "calls requires_grad_() of"), (hook, "calls register_hook() of")],
)
def test_what_one_copy_would_keep(act: Callable[[Any], Any], what: str, in_flight: int) -> None:
    refuse(Acts(act), in_flight, f"training_step {what} the parameter 'net.0.weight', which stages would not see")


def clear(task: Any) -> None:
    task.optimizers().zero_grad()


def count(task: Any) -> None:
    task.norm = sum(p.grad.norm() for p in task.parameters() if p.grad is not None)


@pytest.mark.parametrize("act", [clear, count])
def test_gradients_that_training_step_uses(act: Callable[[Any], Any]) -> None:
    refuse(Acts(act), 3, "uses the gradient of 'net.0.weight'", "on_before_optimizer_step", "set in_flight=1")


@pytest.mark.parametrize("act", [clear, count])
def test_one_in_flight_uses_gradients_as_the_plain_trainer_does(act: Callable[[Any], Any]) -> None:
    torch.manual_seed(5)
    task = Acts(act)
    plain, one = (
        fit(copy.deepcopy(task), vectors(18, 4), strategy=strategy, accumulate_grad_batches=2)
        for strategy in ("auto", Pinned((0, 2), 1))
    )
    assert_same_run(plain, one)


def read_statistics(task: Any) -> None:
    task.mean = task.net[1].running_mean.sum()


def reset_statistics(task: Any) -> None:
    task.net[1].running_mean.zero_()


def read_constants(task: Any) -> None:
    assert task.net[1].running_mean.shape == (8,)
    assert task.net[1].constant.sum() == 2


def change_constant(task: Any) -> None:
    task.net[1].constant.add_(1)


class Halved(L.Callback):
    """Changes a buffer of the pipelined module after each step."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        pl_module.encoder[1].running_var.mul_(0.5)


class ReadsStatistics(Pieces):
    """Reads buffers of two pieces before, between and after their calls."""

    encoder: Any
    decoder: Any

    def __init__(self) -> None:
        super().__init__(SGD)
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8))
        self.decoder = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 6))

    def statistics(self) -> Tensor:
        norms = self.encoder[1], self.encoder[3], self.decoder[1]
        return torch.stack([torch.stack([norm.running_mean.sum(), norm.running_var.prod()]) for norm in norms])

    def compute(self, batch: Batch) -> Outputs:
        x, _ = batch
        read = [self.statistics()]
        z = self.encoder(x)
        read.append(self.statistics())
        y = self.decoder(z * read[-1].mean())
        read.append(self.statistics())
        return {"loss": F.mse_loss(y, x) * read[-1].mean(), "read": torch.stack(read)}


@pytest.mark.parametrize("strategy", [even(7, 3, 3, weights="sync"), Pinned((0, 2), 1)], ids=["sync", "one in flight"])
def test_nothing_that_runs_ahead_reads_and_changes_buffers_as_the_plain_trainer_does(strategy: Pinned) -> None:
    torch.manual_seed(5)
    task = ReadsStatistics()
    runs = [fit(copy.deepcopy(task), vectors(18, 4), [Halved()], strategy=each) for each in ("auto", strategy)]
    assert_same_run(*runs)


class ReadsViews(ReadsStatistics):
    """Reads them by views from before the fit, which are no buffers: they had what the step before left."""

    def __init__(self) -> None:
        super().__init__()
        norms = self.encoder[1], self.encoder[3], self.decoder[1]
        self.views = [(norm.running_mean[:], norm.running_var[:]) for norm in norms]

    def statistics(self) -> Tensor:
        return torch.stack([torch.stack([mean.sum(), var.prod()]) for mean, var in self.views])


def test_views_of_buffers_are_read_as_the_plain_trainer_does() -> None:
    runs = []
    for strategy in ("auto", even(7, 3, 3, weights="sync")):
        torch.manual_seed(5)
        runs.append(fit(ReadsViews(), vectors(18, 4), strategy=strategy))
    assert_same_run(*runs)


def test_memory_of_weights_that_training_step_uses() -> None:
    """Such tensors held what the optimizer was writing at that moment."""

    def act(task: Any) -> None:
        task.norm = task.earlier.norm()

    def acts_in_place(task: Any) -> None:
        task.earlier.mul_(0.5)

    task: Any = Acts(act)
    task.earlier = task.net[0].weight.data[:2]
    refuse(task, 3, "uses the memory of the parameter 'net.0.weight'", "use the parameter itself")
    task.act = acts_in_place
    refuse(task, 1, "changes 'net.0.weight'", "in place")


def test_buffers_that_training_step_uses() -> None:
    refuse(Acts(read_statistics), 3, "uses the buffer 'net.1.running_mean'", "in on_train_batch_end")
    refuse(Acts(reset_statistics), 1, "changes 'net.1.running_mean'", "in place")
    for in_flight in (1, 3):
        refuse(Acts(change_constant), in_flight, "changes 'net.1.constant'", "in place")


@pytest.mark.parametrize(("act", "in_flight"), [(read_statistics, 1), (read_constants, 3)])
def test_buffers_that_it_may_read(act: Callable[[Any], Any], in_flight: int) -> None:
    task, loader = Acts(act), vectors(18, 4)
    assert_equal(expect(task, loader, in_flight), fit(task, loader, strategy=Pinned((0, 2), in_flight)))


class Recomputes(Task):
    """Reads parameters in its backward pass: in a hook, and where a checkpoint computes again."""

    def __init__(self, recipe: Recipe = SGD) -> None:
        super().__init__(net(), recipe)
        self.scale, self.slope = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(CLASSES))

    def compute(self, batch: Batch) -> Outputs:
        x, y = batch
        logits = self.net(x)
        if logits.requires_grad:
            logits.register_hook(lambda gradient: gradient * self.scale.detach())
        again: Any = checkpoint(lambda z: torch.tanh(z * self.slope) * self.scale, logits, use_reentrant=False)
        return {"loss": F.cross_entropy(again, y)}


@pytest.mark.parametrize("in_flight", slow_except([1, 3], 3))
def test_parameters_that_the_backward_pass_reads(in_flight: int) -> None:
    task, loader = Recomputes(), vectors(18, 4)
    assert_equal(expect(task, loader, in_flight), fit(task, loader, strategy=even(5, 3, in_flight)))


class Hooked(Around):
    """Counts its hooks' calls: above, between and below the pieces."""

    def __init__(self, recipe: Recipe = SGD) -> None:
        super().__init__(recipe)
        self.calls: list[str] = []

    def compute(self, batch: Batch) -> Outputs:
        x, _ = batch
        given = x * self.below
        z = self.encoder(given) + self.between
        y = self.decoder(z) * self.above
        for name, tensor in (("given", given), ("z", z), ("y", y)):
            tensor.register_hook(lambda gradient, name=name: self.calls.append(name))
        return {"loss": F.mse_loss(y, x)}


@pytest.mark.parametrize("in_flight", slow_except([1, 3], 3))
def test_hooks_of_tensors_run_once(in_flight: int) -> None:
    """They ran twice where a parameter was used below a piece."""
    task, loader = Hooked(), vectors(18, 4)
    expected = expect(task, loader, in_flight)
    assert_equal(expected, fit(task, loader, strategy=even(7, 3, in_flight)))
    assert sorted(task.calls) == sorted(["given", "z", "y"] * 10)


class Mapped(Penalty):
    """Gives a weight to a function of torch.func, or in a named tuple."""

    def __init__(self, use: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.use = use

    def compute(self, batch: Batch) -> Outputs:
        x, y = batch
        weight = self.get_parameter("net.0.weight")
        with torch.no_grad():
            norm = self.use(weight)
        return {"loss": F.cross_entropy(self.net(x), y) / (1 + norm), "norm": norm}


class Pair(NamedTuple):
    one: Tensor
    other: Tensor


@pytest.mark.parametrize("in_flight", slow_except([1, 3], 3))
def test_what_torch_func_is_given(in_flight: int) -> None:
    def each(weight: Any) -> Tensor:
        found: Tensor = torch.vmap(torch.sum)(weight).sum()
        return found

    refuse(Mapped(each), in_flight, "'net.0.weight' is used in a function of torch.func", "net.0.weight.clone()")
    task, loader = Mapped(lambda weight: each(weight.clone())), vectors(18, 4)
    assert_equal(expect(task, loader, in_flight), fit(task, loader, strategy=even(5, 2, in_flight)))


class Derivative(nn.Sequential):
    """Adds the derivative of a layer's output, as ``torch.func`` computes it."""

    def __init__(self, cloned: bool) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, CLASSES)
        self.cloned = cloned

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        weights = {name: each.clone() for name, each in self.layer.named_parameters()} if self.cloned else {}

        def norm(row: Tensor) -> Tensor:
            found: Any = torch.func.functional_call(self.layer, weights, (row,)) if weights else self.layer(row)
            total: Tensor = found.tanh().sum()
            return total

        out: Tensor = self.last(h + torch.vmap(torch.func.grad(norm))(h))
        return out


def test_layers_within_a_function_of_torch_func() -> None:
    """Copies of their weights would be tensors of that function; to watch the layers read storages that it hides."""

    def pipelined() -> HetPipeStrategy:
        return HetPipeStrategy(stages=2, in_flight=3, weights="stash")

    loader, task = vectors(18, 4), Task(Derivative(cloned=True))
    with pytest.raises(SettingError, match=r"'net.layer.weight' is used in a function of torch.func.*in_flight=1"):
        fit(Task(Derivative(cloned=False)), loader, strategy=pipelined())
    assert_equal(expect(task, loader, 3), fit(task, loader, strategy=pipelined()))


class Recomputed(torch.autograd.Function):
    """Runs two layers, and once more for their gradients, as blocks that can be reversed do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: nn.ModuleList, *weights: Tensor) -> Tensor:
        ctx.layers = layers
        ctx.save_for_backward(x.detach())
        return Recomputed.run(layers, x)

    @staticmethod
    def run(layers: nn.ModuleList, x: Tensor) -> Tensor:
        one, other = layers
        between = x + one(x)
        out: Tensor = between + other(between)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].requires_grad_()
            found = torch.autograd.grad(Recomputed.run(ctx.layers, x), [x, *ctx.layers.parameters()], gradients[0])
        return found[0], None, *found[1:]


class Recomputing(nn.Sequential):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, CLASSES)
        self.layers = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])

    def forward(self, x: Tensor) -> Tensor:
        run: Any = Recomputed.apply
        out: Tensor = self.last(run(self.first(x), self.layers, *self.layers.parameters()))
        return out


def test_layers_that_a_function_of_the_users_own_runs() -> None:
    """Stages cannot run them, as no graph of autograd leads through it: it raised torch's own error."""
    with pytest.raises(
        SettingError, match=r"asks for the gradient of the parameter 'net.layers.0.weight'.*in_flight=1"
    ):
        fit(Task(Recomputing()), vectors(18, 4), strategy=HetPipeStrategy(stages=2, in_flight=3, weights="stash"))


def test_parameters_in_named_tuples() -> None:
    task, loader = Mapped(lambda weight: torch.cat(cast(Any, Pair(weight, weight))).norm()), vectors(18, 4)
    assert_equal(expect(task, loader, 3), fit(task, loader, strategy=even(5, 2, 3)))
