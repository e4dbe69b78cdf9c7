"""Refusals of the watched step, by name, of what stages could not do; and what looks like that but passes."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hetpipe.capture.grouping import is_plain_sequential
from lightning_hetpipe.capture.watch import TrainingWatch
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.pipeline.random.generators import RandomGenerators
from tests.capture.test_watch import Block, Step, Watched, X, linear_net, names, run_net, watch
from tests.support.traces import shape_of


def refused(message: str, step: Step = run_net, names: list[str] | None = None, **children: nn.Module) -> None:
    with pytest.raises(SettingError, match=message):
        watch(Watched(step, **children), X, names)


class Bag(dict[str, Any]):
    """A dict that pytree does not know."""


@dataclasses.dataclass
class Out:
    """One that keeps more than its fields."""

    hidden: Tensor

    def __post_init__(self) -> None:
        self.size = len(self.hidden)


@dataclasses.dataclass
class Doubles:
    """One that is not made of its fields."""

    hidden: Tensor

    def __post_init__(self) -> None:
        self.hidden = self.hidden * 2


class Slotted:
    __slots__ = ("hidden",)

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class Gives(nn.Module):
    """Gives its output in something."""

    def __init__(self, around: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.around = around

    def forward(self, x: Tensor) -> Any:
        return self.around(self.linear(x))


class Takes(nn.Module):
    def forward(self, value: Any) -> Tensor:
        tensors: list[Tensor] = []
        for item in value.values() if isinstance(value, dict) else value:
            if isinstance(item, Tensor):
                tensors.append(item)
        return tensors[0]


AROUND: list[tuple[Callable[[Tensor], Any], str]] = [
    (Out, "Out"),
    (Doubles, "Doubles"),
    (Slotted, "Slotted"),
    (lambda x: Bag(hidden=x), "Bag"),
    (lambda x: (1, [types.SimpleNamespace(hidden={"x": (x,)})]), "SimpleNamespace"),
]


@pytest.mark.parametrize(("around", "kind"), AROUND)
def test_tensors_in_strange_objects(around: Callable[[Tensor], Any], kind: str) -> None:
    """They would cross a cut as they are, and their gradients would be lost without a word."""
    message = f"layer 'net.0' gives a {kind} that holds tensors, .*; put tensors into tuples, lists, dicts or plain"
    refused(message, net=nn.Sequential(Gives(around), Takes(), nn.Linear(4, 2)))
    refused(message, net=nn.Sequential(Gives(around)))


@pytest.mark.parametrize(("around", "kind"), AROUND)
def test_a_piece_that_is_given_strange_objects(around: Callable[[Tensor], Any], kind: str) -> None:
    def step(module: Any, x: Tensor) -> Tensor:
        loss: Tensor = module.net(around(x)).sum()
        return loss

    refused(
        f"the pipelined module 'net' is given a {kind} that holds tensors",
        step,
        net=nn.Sequential(Takes(), nn.Linear(4, 2)),
    )


def test_other_values_pass() -> None:
    others = (1, 0.5, "text", True, None, torch.float32, torch.device("cpu"), slice(1, 2), Out, torch.tanh)
    net = nn.Sequential(Gives(lambda x: {"x": x, "others": others}), Takes(), nn.Linear(4, 2))
    assert len(watch(Watched(run_net, net=net), X)) == 1


def test_packed_sequences_pass() -> None:
    def step(module: Any, x: Tensor) -> Tensor:
        output, _ = module.net(nn.utils.rnn.pack_sequence([x, x[:2]]))
        loss: Tensor = output.data.sum()
        return loss

    assert names(watch(Watched(step, net=nn.Sequential(nn.LSTM(4, 4))), X)[0]) == ["net.0"]


class Remembers(nn.Module):
    """Keeps something of its input in an attribute."""

    def __init__(self, keep: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.keep = keep
        self.stat: Any = None
        self.calls = 0
        self.history: list[float] = []
        self.by_size: dict[int, int] = {}
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.keep(self, x)
        return x


def keep_a_number(module: Any, x: Tensor) -> None:
    module.stat = x.sum().item()


def keep_a_tensor(module: Any, x: Tensor) -> None:
    module.stat = x.detach().sum()


def count(module: Any, x: Tensor) -> None:
    module.calls += 1


def append(module: Any, x: Tensor) -> None:
    module.history.append(1.0)


def tally(module: Any, x: Tensor) -> None:
    module.by_size[len(x)] = 1


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize(
    ("keep", "attribute"),
    [
        (keep_a_number, "stat"),
        (keep_a_tensor, "stat"),
        (count, "calls"),
        (append, "history"),
        (tally, "by_size"),
    ],
)
def test_a_layer_that_sets_its_attributes(keep: Callable[[Any, Tensor], None], attribute: str, deep: bool) -> None:
    """Stages run copies, so that the live layer's would be stale: its Sequential is taken apart."""

    def net() -> nn.Sequential:
        layer: nn.Module = Remembers(keep)
        if deep:
            block = Block()
            block.body.append(layer)
            layer = block
        return nn.Sequential(nn.Linear(4, 4), layer)

    message = rf"layer 'net.1' sets its attribute '{attribute}' \(of Remembers\) in forward, .*register_buffer"
    refused(message, names=["net"], net=net())
    assert watch(Watched(run_net, net=net()), X)[0].name == "net.0"


def test_a_layer_that_counts_in_a_buffer() -> None:
    def keep(module: Any, x: Tensor) -> None:
        module.seen = module.seen + 1

    module = Watched(run_net, net=nn.Sequential(nn.Linear(4, 4), Remembers(keep)))
    assert len(watch(module, X)) == 1
    assert module.get_buffer("net.1.seen").item() == 1


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        self.recurrent = nn.LSTM(4, 4, num_layers=2, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.recurrent(self.layer(x[None]))[0][0]
        return y


def test_torchs_own_modules_are_not_refused() -> None:
    old: Any = nn.utils.weight_norm
    spectral: Any = nn.utils.spectral_norm
    pruned: Any = nn.utils.prune.l1_unstructured
    parametrizations: Any = nn.utils.parametrizations
    net = nn.Sequential(
        Encoder(),
        nn.BatchNorm1d(4),
        old(nn.Linear(4, 4)),
        spectral(nn.Linear(4, 4)),
        pruned(nn.Linear(4, 4), "weight", amount=0.5),
        parametrizations.weight_norm(nn.Linear(4, 4)),
        parametrizations.spectral_norm(nn.Linear(4, 4)),
    )
    (piece,) = watch(Watched(run_net, net=net), X)
    assert names(piece)[:5] == ["net.0.layer", "net.0.recurrent", "net.1", "net.2", "net.3"]
    assert len(piece.layers) == 8


def test_layers_whose_output_is_a_view() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Flatten(), nn.Unflatten(1, (2, 2)), nn.Tanh(), nn.Identity(), nn.Flatten())
    (piece,) = watch(Watched(run_net, net=net), X)
    assert [layer.aliases_input for layer in piece.layers] == [False, True, True, False, True, True]


def test_a_piece_that_changes_its_input_through_a_view() -> None:
    """A view in one layer, and an in-place change in the next."""
    net = nn.Sequential(nn.Flatten(), nn.ReLU(inplace=True), nn.Linear(4, 2))
    refused("layer 'net.1' changes the input of the pipelined module 'net' in place, .*inplace=False", net=net)


def test_a_change_behind_the_first_new_tensor_passes() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.Flatten(), nn.ReLU(inplace=True))
    assert len(watch(Watched(run_net, net=net), X)) == 1


def test_the_input_by_name() -> None:
    def step(module: Any, x: Tensor) -> Tensor:
        loss: Tensor = module.net(input=x).sum()
        return loss

    assert len(watch(Watched(step, net=linear_net()), X)) == 1


def test_a_copy_that_was_made_while_its_forward_was_redirected() -> None:
    module = Watched(run_net, net=nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 2)))
    copies: list[Any] = []

    def step(module: Any, x: Tensor) -> Tensor:
        copies.append(copy.deepcopy(module))
        return run_net(module, x)

    module.step = step
    watch(module, X)
    copied = copies[0]
    copied.step = run_net
    assert "forward" in vars(copied.net)
    before = shape_of(copied)
    assert names(watch(copied, X)[0]) == ["net.0.0", "net.1"]
    assert shape_of(copied) == before


def test_a_forward_of_the_users_own_makes_no_plain_sequential() -> None:
    net = nn.Sequential(nn.Linear(4, 4))
    vars(net)["forward"] = lambda x: x * 2
    assert not is_plain_sequential(net)
    other = nn.Sequential(nn.Linear(4, 4))
    vars(net)["forward"] = other.forward
    assert not is_plain_sequential(net)


def test_hooks_on_all_modules() -> None:
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        refused("a hook on all modules is set .*; remove it before fit", net=linear_net())
    finally:
        handle.remove()


def test_a_compiled_layer() -> None:
    part: Any = torch.compile(nn.Linear(4, 4), backend="eager")
    net = nn.Sequential(nn.Linear(4, 4), part)
    refused(r"'net.1' holds a module that is compiled by torch.compile, .*; compile the whole", net=net)


def test_a_compiled_frozen_module_passes() -> None:
    def step(module: Any, x: Tensor) -> Tensor:
        loss: Tensor = module.net(module.teacher(x)).sum()
        return loss

    teacher: Any = torch.compile(nn.Sequential(nn.Linear(4, 4)).requires_grad_(False), backend="eager")
    module = Watched(step, net=linear_net(), teacher=teacher)
    assert [piece.name for piece in watch(module, X)] == ["net"]


def test_a_named_piece_that_is_not_called() -> None:
    def step(module: Any, x: Tensor) -> Tensor:
        loss: Tensor = module.net(x).sum()
        return loss

    message = r"module=\['net', 'head'\] names 'head', which training_step did not call"
    refused(message, step, ["net", "head"], net=linear_net(), head=nn.Sequential(nn.Linear(2, 2)))
    inner = nn.Sequential(nn.Linear(4, 4))
    refused(r"names 'net.0', .* only inside another", step, ["net", "net.0"], net=nn.Sequential(inner))


# Frozen Sequentials, which callbacks unfreeze later.


def through_backbone(module: Any, x: Tensor) -> Tensor:
    loss: Tensor = module.net(module.backbone(x)).sum()
    return loss


def frozen() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh()).requires_grad_(False)


def watch_frozen(step: Step, names: list[str] | None, frozen_too: bool) -> list[str]:
    module = Watched(step, backbone=frozen(), net=nn.Sequential(nn.Linear(4, 2)))
    seen = TrainingWatch(module, names, RandomGenerators(0), 1, frozen_too=frozen_too)
    with seen.watching():
        loss = module.training_step(X)
    seen.check(loss)
    return [piece.name for piece in seen.pieces]


def test_a_frozen_sequential_where_it_is_unfrozen_later() -> None:
    assert watch_frozen(through_backbone, None, frozen_too=True) == ["backbone", "net"]
    assert watch_frozen(through_backbone, None, frozen_too=False) == ["net"]


def test_a_named_frozen_sequential() -> None:
    assert watch_frozen(through_backbone, ["backbone", "net"], frozen_too=False) == ["backbone", "net"]


def test_a_frozen_sequential_that_is_called_several_times() -> None:
    def step(module: Any, x: Tensor) -> Tensor:
        loss: Tensor = module.net(module.backbone(x) + module.backbone(2 * x) + module.backbone(3 * x)).sum()
        return loss

    assert watch_frozen(step, None, frozen_too=True) == ["backbone", "net"]
    assert watch_frozen(step, None, frozen_too=False) == ["net"]


# Where the loss goes past a piece.


def test_a_leaf_below_a_piece() -> None:
    def step(module: Any, x: Tensor) -> Tensor:
        loss: Tensor = module.net(x.clone().requires_grad_() * 2).sum()
        return loss

    refused(r"a tensor of shape \(3, 4\) that requires a gradient and is no parameter", step, net=linear_net())


def test_pieces_one_after_the_other_with_views_and_in_place_changes_between() -> None:
    def step(module: Any, x: Tensor) -> Tensor:
        z = module.first(x)
        z += 1
        y = module.second(z[:, :2])
        y[:, 0] = 0.0
        loss: Tensor = (y * z[:, :1]).sum()
        return loss

    first = nn.Sequential(nn.Linear(4, 4), nn.Flatten())
    second = nn.Sequential(nn.Linear(2, 2), nn.Unflatten(1, (2,)))
    assert len(watch(Watched(step, first=first, second=second), X)) == 2


class Borrows(nn.Module):
    """Computes with a weight that it does not hold."""

    def __init__(self, lender: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.lender = [lender]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) @ self.lender[0].weight
        return y


@pytest.mark.parametrize(("sequential", "piece"), [(False, "net.linear"), (True, "net.0.linear")])
def test_a_module_that_computes_with_the_parameter_of_another_one(sequential: bool, piece: str) -> None:
    """It is taken apart: user code sees the minibatch's version of the parameter, which copies of it would not."""
    other = nn.Linear(4, 4)
    borrows = Borrows(other)
    net = nn.Sequential(borrows) if sequential else borrows
    assert [each.name for each in watch(Watched(run_net, net=net, other=other), X)] == [piece]
    refused("layer 'net' computes with the parameter 'other.weight'", names=["net"], net=net, other=other)


@pytest.mark.parametrize("make", [linear_net, Block])
def test_a_call_that_fails_shows_no_layers(make: Callable[[], nn.Module]) -> None:
    """It was a piece without layers."""

    def step(module: Any, x: Tensor) -> Tensor:
        with contextlib.suppress(RuntimeError):
            module.net(x[:, :1])
        loss: Tensor = module.other(x).sum()
        return loss

    assert [piece.name for piece in watch(Watched(step, net=make(), other=nn.Linear(4, 2)), X)] == ["other"]


def test_calls_in_both_modes() -> None:
    """The graph was said to give other values, by an attribute that others set."""

    def step(module: Any, x: Tensor) -> Tensor:
        module.net.eval()
        target = module.net(x).detach()
        module.net.train()
        loss: Tensor = (module.net(x) - target).square().sum()
        return loss

    refused(r"calls 'net' in training mode and in evaluation mode, and stages run it in one", step, net=linear_net())
