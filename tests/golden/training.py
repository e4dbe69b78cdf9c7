"""Refusals found while a pipeline trains: each leaves no thread and no stand-in behind.

Cases whose sentence does not depend on the number in flight are run with one and with several.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset

from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe.errors import PipelineRefusal, SettingError
from tests.exact.pipelines import Pinned
from tests.golden.cases import Case, Place
from tests.run.test_refused_layers import Gaussian, ReadFirst, Teacher, counts, distil, follows, likely, replaces
from tests.support.small import Learner, assert_clean, batches, layers, pipeline, plain_step
from tests.support.trainers import quiet_trainer

ONE = "in_flight=1"
Make = Callable[[], L.LightningModule]


def fitted(make: Make, strategy: Callable[[], Any], loader: Callable[[], Any], **trainer: Any) -> None:
    """Fit, and see whether an error leaves the module, the Trainer, threads and torch as they were."""
    module, fits = make(), quiet_trainer(strategy(), **trainer)
    before = {*threading.enumerate()}
    torch.set_num_threads(2)
    try:
        fits.fit(module, loader())
    except SettingError:
        assert_clean(fits, module)
        assert [thread.name for thread in threading.enumerate() if thread not in before] == []
        assert torch.get_num_threads() == 2
        raise
    finally:
        torch.set_num_threads(1)


def fit(
    make: Make,
    what: str,
    value: str,
    *way_out: str,
    error: type[SettingError] = PipelineRefusal,
    loader: Callable[[], Any] = batches,
    strategy: Callable[[], Any] = lambda: pipeline(3),
    name: str = "",
    **trainer: Any,
) -> Case:
    def run(_: Place) -> None:
        fitted(make, strategy, loader, **trainer)

    return Case(name or f"{what} {value} {way_out[0]}"[:90], run, what, value, way_out, error)


def fit_each(make: Make, what: str, value: str, *way_out: str, name: str = "", **settings: Any) -> list[Case]:
    """Cases with one minibatch and with three in flight."""
    error: type[SettingError] = settings.pop("error", PipelineRefusal)
    return [
        fit(
            make,
            what,
            value,
            *way_out,
            error=error,
            strategy=lambda count=count: pipeline(count, **settings),  # type: ignore[misc]
            name=f"{name or what}, {count} in flight"[:90],
        )
        for count in (1, 3)
    ]


def later(step: Callable[..., Any], first: int, before: Callable[..., Any] = plain_step) -> Callable[..., Any]:
    """Step that is another one from minibatch ``first`` on."""

    def run(module: Any, x: Tensor, y: Tensor, batch_idx: int) -> Any:
        return (step if batch_idx >= first else before)(module, x, y, batch_idx)

    return run


def net(*modules: nn.Module, step: Any = plain_step) -> Make:
    return lambda: Learner(step, net=nn.Sequential(*modules))


def stepping(step: Callable[..., Any], **children: Callable[[], nn.Module]) -> Make:
    return lambda: Learner(step, **{name: make() for name, make in children.items()})


# How it is optimized.


def manual() -> L.LightningModule:
    module = Learner()
    module.automatic_optimization = False
    return module


class Two(Learner):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([parameter], lr=0.1) for parameter in [*self.parameters()][:2]]


class Newton(Learner):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Twice(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step(closure)


class Again(Learner):
    def configure_optimizers(self) -> Any:
        return Twice(self.parameters(), lr=0.1)


class Backward(Learner):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss, *args, **kwargs)


class Iterating(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = layers()

    def training_step(self, dataloader_iter: Iterator[Any]) -> Tensor:
        (x, _), _, _ = next(dataloader_iter)
        loss: Tensor = self.net(x).sum()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Gaps(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for index, batch in enumerate(batches()):
            yield None if index == 2 else batch


class Special(Precision):
    pass


SIX = [f"'{each}'" for each in ("32-true", "64-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true")]
MODULES = [
    fit(manual, "Learner", "manual optimization", "automatic_optimization=True", ONE, error=SettingError),
    fit(Two, "configure_optimizers", "several optimizers", "several parameter groups", ONE, error=SettingError),
    fit(Newton, "LBFGS", "", "another optimizer", ONE, error=SettingError),
    *fit_each(Again, "Twice", "", "another optimizer"),
    fit(Backward, "Backward", "overrides backward", "remove the override", ONE, error=SettingError),
    fit(Iterating, "Iterating.training_step", "dataloader_iter", "(batch, batch_idx)", ONE, error=SettingError),
    fit(lambda: Learner(head=nn.LazyLinear(3)), "parameter", "'head.weight'", "setup", "nn.LazyLinear",
            error=SettingError),
    fit(Learner, "train_dataloader", "None", "leave such batches out", ONE, error=SettingError,
        loader=lambda: DataLoader(Gaps(), batch_size=None)),
    fit(lambda: Learner(head=nn.Linear(3, 3)), "module", "['net', 'head']", "'head'", "leave it out of module",
        strategy=lambda: pipeline(3, module=["net", "head"])),
    fit(Learner, "stages", "5", "4 layers", "at most 4", error=SettingError,
            strategy=lambda: HetPipeStrategy(stages=5)),
    fit(net(nn.Linear(6, 3)), "stages", "5", "1 layer", "at most 1", error=SettingError,
        strategy=lambda: HetPipeStrategy(stages=5)),
    fit(lambda: Learner(head=nn.Linear(3, 3)), "module", "['head']", "'head'", "leave it out of module",
        strategy=lambda: HetPipeStrategy(module="head")),
    fit(Learner, "module", "'nte'", "Learner", "did you mean 'net'?", error=SettingError,
        strategy=lambda: HetPipeStrategy(module="nte")),
    fit(lambda: Learner(head=nn.Linear(3, 3)), "module", "'zzzzzz'", "net, head", error=SettingError,
        strategy=lambda: HetPipeStrategy(module=["net", "zzzzzz"])),
    fit(Learner, "num_nodes", "2", "MASTER_ADDR", "MASTER_PORT", error=SettingError, num_nodes=2),
    fit(Learner, "sync_batchnorm", "True", "leave it out", error=SettingError, sync_batchnorm=True),
    fit(Learner, "precision plugin", "Special", *SIX, error=SettingError, plugins=[Special()]),
]  # fmt: skip

# What training_step returns.


def returning(value: Callable[[Tensor], Any], when: int) -> Make:
    def step(module: Any, x: Tensor, y: Tensor, batch_idx: int) -> Any:
        loss = plain_step(module, x, y, batch_idx)
        return value(loss) if batch_idx == when else loss

    return lambda: Learner(step)


NO_LOSS = [
    *[case for when in (0, 1, 4) for case in fit_each(returning(lambda _: None, when), "training_step", "None",
            "a loss",
                                                      ONE, error=SettingError, name=f"no loss, {when}")],
    *[case for when in (0, 2) for case in fit_each(returning(Tensor.detach, when), "loss", "", "requires a gradient",
                                                   "detach()", error=SettingError, name=f"detached, {when}")],
    *[case for when in (0, 2) for case in fit_each(returning(lambda loss: loss.expand(3), when), "loss", "(3,)",
                                                   "a single number", error=SettingError, name=f"a vector, {when}")],
]  # fmt: skip

# Which modules it calls, and with what.


class Recomputes(nn.Module):
    """Computes its layers again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.layers, x.requires_grad_(), use_reentrant=True)


def recomputing(module: Any, x: Tensor, y: Tensor, batch_idx: int) -> Any:
    return F.cross_entropy(module.net[3](checkpoint(module.net[2], module.net[:2](x), use_reentrant=True)), y)


def parts(module: Any, x: Tensor, y: Tensor, batch_idx: int) -> Any:
    return F.cross_entropy(module.net[3](module.net[2](module.net[:2](x))), y)


def functional(module: Any, x: Tensor, y: Tensor, batch_idx: int) -> Any:
    return F.cross_entropy(F.linear(x, module.net[0].weight), y)


def clamps(module: Any, x: Tensor, y: Tensor, batch_idx: int) -> Any:
    with torch.no_grad():
        module.net[0].weight.clamp_(-0.1, 0.1)
    return plain_step(module, x, y, batch_idx)


def part_then_whole(module: Any, x: Tensor, y: Tensor, batch_idx: int) -> Any:
    return module.net[0](x).square().mean() + F.cross_entropy(module.net(x), y)


def both_modes(module: Any, x: Tensor, y: Tensor, batch_idx: int) -> Any:
    module.net.eval()
    with torch.no_grad():
        target = module.net(x).softmax(-1)
    module.net.train()
    return F.mse_loss(module.net(x).softmax(-1), target)


def calls_twice(module: Any, x: Tensor, y: Tensor, batch_idx: int) -> Any:
    return F.cross_entropy(module.net(x), y) + module.net(x).square().mean()


def in_order(module: Any, x: Tensor, y: Tensor, batch_idx: int) -> Any:
    return F.cross_entropy(module.decoder(module.net(x)), y)


def out_of_order(module: Any, x: Tensor, y: Tensor, batch_idx: int) -> Any:
    return F.cross_entropy(module.decoder(x[:, :3]), y) + module.net(x).square().mean()


def decoder() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh())


def with_others(module: Any, x: Tensor, y: Tensor, batch_idx: int) -> Any:
    """Call the module with other parameters."""
    others = {name: each * 2 for name, each in module.net.named_parameters()}
    return F.cross_entropy(torch.func.functional_call(module.net, others, (x,)), y)


def in_evaluation_mode(module: Any, x: Tensor, y: Tensor, batch_idx: int) -> Any:
    module.net[1].eval()
    return plain_step(module, x, y, batch_idx)


REENTRANT = ("torch.utils.checkpoint", "use_reentrant=True", "use_reentrant=False", ONE)
CALLS = [
    *fit_each(lambda: Learner(net=Recomputes()), *REENTRANT, error=SettingError, name="checkpoint"),
    *fit_each(lambda: Learner(net=Recomputes()), *REENTRANT, error=SettingError, name="named checkpoint",
            module=["net"]),
    *fit_each(lambda: Learner(net=nn.Sequential(Recomputes(), nn.Linear(3, 3))), *REENTRANT, error=SettingError,
              name="checkpoint in a layer"),
    *fit_each(stepping(later(recomputing, 0, parts)), *REENTRANT, error=SettingError, name="checkpoint in the step"),
    *fit_each(stepping(later(recomputing, 2, parts)), *REENTRANT, error=SettingError, name="checkpoint later"),
    fit(stepping(functional), "training_step", "no module with trainable parameters", "call one", ONE),
    *fit_each(stepping(clamps), "parameter", "'net.0.weight'", "callback or hook", "on_train_batch_end"),
    fit(stepping(part_then_whole), "'net'", "'net.0'", "call the whole", "parts"),
    fit(stepping(both_modes), "'net'", "training mode and in evaluation mode", "one of them", ONE),
    *fit_each(stepping(later(calls_twice, 2)), "'net'", "more often than once", "as in the first minibatch"),
    *fit_each(stepping(later(plain_step, 2, calls_twice)), "'net'", "once, and twice", "as often in every minibatch"),
    *fit_each(stepping(later(with_others, 2)), "'net'", "other parameters", "call it with its own"),
    *fit_each(stepping(later(in_evaluation_mode, 2)), "'net'", "'net.1.training'", "argument", "callback"),
    *fit_each(stepping(later(out_of_order, 2, in_order), decoder=decoder), "'decoder'", "out of order",
              "as in the first minibatch"),
    *fit_each(stepping(later(plain_step, 2, in_order), decoder=decoder), "'decoder'", "did not call",
              "same modules in every minibatch"),
]  # fmt: skip

# Leaves that the loss reaches, and gradients of the user's own.


class Unregistered(Learner):
    """Keeps a parameter in a plain list, which only its optimizer knows."""

    def __init__(self, step: Callable[..., Any]) -> None:
        super().__init__(step)
        self.scales = [nn.Parameter(torch.ones(3))]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), *self.scales], lr=0.1)


def scaled(module: Any, x: Tensor, y: Tensor, batch_idx: int) -> Any:
    return F.cross_entropy(module.net(x) * module.scales[0], y)


def input_gradients(module: Any, x: Tensor, y: Tensor, batch_idx: int) -> Any:
    return F.cross_entropy(module.net(x.requires_grad_()), y)


def gradient(module: Any, x: Tensor, y: Tensor, batch_idx: int) -> Any:
    """With allow_unused=True it would be None, silently: the weights are not in the graph around the pipeline."""
    loss = F.cross_entropy(module.net(x), y)
    torch.autograd.grad(loss, list(module.net.parameters()), retain_graph=True, allow_unused=True)
    return loss


LEAVES = [
    *[
        case
        for first in (0, 2)
        for step, shape in ((scaled, "(3,)"), (input_gradients, "(4, 6)"))
        for case in fit_each(
            lambda step=step, first=first: Unregistered(later(step, first)),  # type: ignore[misc]
            "the loss",
            shape,
            "requires a gradient",
            "register a parameter",
            name=f"a leaf of shape {shape}, {first}",
        )
    ],
    *fit_each(stepping(later(gradient, 2)), "parameter", "'net.0.weight'", "on_before_optimizer_step"),
]

# State outside of the pieces that changes while minibatches are in flight.


def with_buffer(step: Callable[..., Any]) -> Make:
    def make() -> L.LightningModule:
        module = Learner(step)
        module.register_buffer("seen", torch.zeros(()))
        return module

    return make


def frozen() -> nn.Module:
    return layers().requires_grad_(False)


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)).requires_grad_(False)


class Resets(L.Callback):
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            pl_module.net[1].reset_running_stats()


TWO = "module=['net', 'teacher']"
STATE = [
    *[fit(with_buffer(step), "'seen'", "changed by training_step", ONE, "weights='sync'", error=SettingError,
            name=f"buffer: {step.__name__}")
      for step in (counts, replaces)],
    fit(stepping(distil, teacher=frozen), "'teacher.0.weight'", "after minibatch", ONE, "weights='sync'",
            error=SettingError,
        callbacks=[Teacher()]),
    fit(stepping(follows, teacher=frozen), "'teacher.0.weight'", "changed by training_step", ONE, "weights='sync'",
            "on_train_batch_end",
        TWO, error=SettingError),
    fit(stepping(distil, teacher=normed), "'teacher.1.running_mean'", "changed by training_step", ONE,
            "weights='sync'", TWO,
        error=SettingError),
    fit(net(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)), "'running_mean'", "after minibatch 3", "BatchNorm1d",
        ONE, "end of an epoch", error=SettingError, callbacks=[Resets()]),
    fit(lambda: Learner(net=ReadFirst()), "stages", "2", "'net.mean'", "joins 3", "weights='sync'",
        "module=['net.first', 'net.second', 'net.third']"),
]  # fmt: skip

# Layers that cannot be run elsewhere.


class Profiled(L.Callback):
    """Has a profiler name modules by hooks, as PyTorchProfiler(record_module_names=True) does when profiling starts."""

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        pl_module.net[1].register_forward_pre_hook(lambda *_: None)


def hooks_on_all(_: Place) -> None:
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        fitted(Learner, lambda: pipeline(3), batches)
    finally:
        handle.remove()


def hooked(kind: str, deep: bool) -> Make:
    def make() -> L.LightningModule:
        inner = nn.Linear(8, 8)
        layer = nn.Sequential(inner, nn.Tanh()) if deep else inner
        getattr(inner, kind)(lambda *_: None)
        return Learner(net=nn.Sequential(nn.Linear(6, 8), layer, nn.Linear(8, 3)))

    return make


class Counts(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = -x if x.isnan().any() else x  # so that the net has no graph, in which both would be one layer
        return x, x.view(-1)


class InPlace(nn.Module):
    def forward(self, pair: Sequence[Tensor]) -> Tensor:
        return pair[0].mul_(2.0) + pair[1].view_as(pair[0])


class Draws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(x.shape, generator=self.generator)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 6, max_norm=0.5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.words(x.argmax(1))
        return y


class ViewOfBuffer(nn.Module):
    """Changes a buffer, in whose memory another one lies."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.mean: Tensor
        self.first: Tensor
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("first", self.mean[:1])

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        self.mean += 0.1
        y: Tensor = self.last(h + self.first)
        return y


class Scales(nn.Module):
    """Changes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x.mul_(2.0))
        return y


class Locked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = (number for number in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return -x if x.isnan().any() else x  # so that the net has no graph, and its layers are copied


def shared_norm() -> L.LightningModule:
    norm = nn.BatchNorm1d(6)
    return Learner(net=nn.Sequential(norm, norm, nn.Linear(6, 3)))


def compiled_part() -> L.LightningModule:
    part: Any = torch.compile(nn.Linear(6, 6), backend="eager")
    return Learner(net=nn.Sequential(nn.Linear(6, 6), part, nn.Linear(6, 3)))


def scripted() -> L.LightningModule:
    jit: Any = torch.jit
    part = jit.trace(nn.Linear(6, 6), torch.ones(2, 6))
    return Learner(net=nn.Sequential(part, nn.Linear(6, 3)))


KINDS = ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook")
LAYERS = [
    fit(lambda: Learner(likely, net=Gaussian()), "'net'", "Normal", "'log_prob'", "module=[...]"),
    fit(lambda: Learner(net=ViewOfBuffer()), "'net'", "'net.mean'", "'net.first'", "compute one of them in forward",
        strategy=lambda: pipeline(3, module="net")),
    fit(lambda: Learner(net=Scales()), "layer 'net'", "'net' in place", "out of place",
        strategy=lambda: pipeline(3, module="net")),
    fit(net(nn.ReLU(inplace=True), nn.Linear(6, 3)), "layer 'net.0'", "'net' in place", "inplace=False"),
    fit(Learner, "layer 'net.1'", "hook (on Tanh)", "PyTorchProfiler(record_module_names=False)",
        strategy=lambda: pipeline(3, module="net"), callbacks=[Profiled()]),
    Case("a hook on all modules", hooks_on_all, "hook on all modules", "", ("remove it before fit",), PipelineRefusal),
    *[fit(hooked(kind, deep), f"layer 'net.1{'.0' * deep}'", "hook (on Linear)", "remove it", name=f"{kind} {deep}",
          strategy=lambda: pipeline(3, module="net"))
      for kind in KINDS for deep in (False, True)],
    fit(net(nn.Linear(6, 8), Counts(), nn.Linear(8, 3)), "layer 'net.1'", "'calls' (of Counts)", "register_buffer",
        "return it", strategy=lambda: pipeline(3, module="net")),
    fit(net(nn.Linear(6, 8), nn.Linear(8, 8), Doubled(), InPlace(), nn.Linear(8, 3)), "layers net.3 to net.4",
        "several tensors", "inplace=False", strategy=lambda: Pinned((0, 3), 2)),
    fit(net(nn.Linear(6, 8), Draws(), nn.Linear(8, 3)), "layer 'net.1'", "generator", "in Draws", "draw without it"),
    fit(net(Words(), nn.Linear(6, 3)), "layer 'net.0'", "changes its own weights", "callback"),
    fit(net(nn.Linear(6, 3), Locked()), "layers", "'generator' object", "copy.deepcopy"),
    fit(shared_norm, "layers net.0 and net.1", "share a module", "a module of its own", ONE,
        strategy=lambda: HetPipeStrategy(stages=3)),
    fit(compiled_part, "layer 'net.1'", "torch.compile", "compile the whole nn.Sequential"),
    fit(scripted, "TorchScript", "'net.0'", "nn.Module", ONE, error=SettingError),
]  # fmt: skip

CASES = [*MODULES, *NO_LOSS, *CALLS, *LEAVES, *STATE, *LAYERS]
