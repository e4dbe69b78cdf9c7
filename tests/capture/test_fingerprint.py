"""The form of the live layers: what has changed since it was taken, and which changes are refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from lightning_hetpipe.capture.grouping import layers_of
from lightning_hetpipe.capture.pieces import Fingerprint, Piece
from lightning_hetpipe.capture.reached_values import SOURCES
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.pipeline.stage import Layer
from lightning_hetpipe.redirect import Redirect


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.alpha: float = 1.0
        self.table = torch.ones(2)

    def forward(self, x: Any) -> Any:
        return x * self.alpha


def piece(name: str = "net") -> Piece:
    net = nn.Sequential(
        nn.Linear(4, 4), Scaled(), nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5)), nn.LSTM(4, 4), nn.Linear(4, 2)
    )
    return Piece(name, net, [Layer(path, module) for path, module in layers_of(name, net)])


def normed() -> nn.Module:
    made: nn.Module = parametrizations.weight_norm(nn.Linear(4, 4))
    return made


# Changes that leave the form as it is.


def optimizer_step(net: Any) -> None:
    for parameter in net.parameters():
        parameter.data.add_(1.0)
        parameter.grad = torch.ones_like(parameter)


def freeze(net: Any) -> None:
    net[0].requires_grad_(False)


def evaluate(net: Any) -> None:
    net.eval()


def exchange_buffer(net: Any) -> None:
    net[2][0].running_mean = torch.ones(4)


def load(net: Any) -> None:
    net.load_state_dict({name: torch.zeros_like(value) for name, value in net.state_dict().items()})


def swap_data(net: Any) -> None:
    net[0].weight.data = torch.zeros(4, 4)


def hook_of_the_piece(net: Any) -> None:
    net.register_forward_hook(lambda *_: None)


def same_values(net: Any) -> None:
    net[1].alpha = 2.0 / 2.0
    net[2][1].p = float("0.5")


def run_recurrent(net: Any) -> None:
    """It rebuilds its list of weights."""
    net[3].flatten_parameters()


@pytest.mark.parametrize(
    "change",
    [
        optimizer_step,
        freeze,
        evaluate,
        exchange_buffer,
        load,
        swap_data,
        hook_of_the_piece,
        same_values,
        run_recurrent,
    ],
)
def test_the_form_stays(change: Callable[[Any], None]) -> None:
    own = piece()
    form = Fingerprint([own])
    change(own.module)
    assert form.changed() is None
    form.follow()


def test_a_redirect_changes_nothing() -> None:
    own = piece()
    form = Fingerprint([own])
    redirect = Redirect(own.module, "forward", lambda redirect, value: redirect.original(value))
    assert form.changed() is None
    redirect.remove()
    assert form.changed() is None


# Changes that copies follow.


def attribute(net: Any) -> None:
    net[1].alpha = 0.5


def new_attribute(net: Any) -> None:
    net[0].scale = 3


def deleted_attribute(net: Any) -> None:
    del net[1].alpha


def tensor_attribute(net: Any) -> None:
    net[1].table = torch.ones(2)


def nested_attribute(net: Any) -> None:
    net[2][1].p = 0.1


def statistics(net: Any) -> None:
    net[2][0].track_running_stats = False


def other_parameter(net: Any) -> None:
    net[4].weight = nn.Parameter(torch.zeros(2, 4))


def no_bias(net: Any) -> None:
    net[4].bias = None


def other_buffers(net: Any) -> None:
    net[2][0].register_buffer("seen", torch.zeros(1))


def prune_layer(net: Any) -> None:
    by_size: Any = prune.l1_unstructured
    by_size(net[0], "weight", amount=0.5)


def norm_layer(net: Any) -> None:
    parametrizations.weight_norm(net[4])


FOLLOWED: list[tuple[Callable[[Any], None], str]] = [
    (attribute, "net.1.alpha"),
    (new_attribute, "net.0.scale"),
    (deleted_attribute, "net.1.alpha"),
    (tensor_attribute, "net.1.table"),
    (nested_attribute, "net.2.1.p"),
    (statistics, "net.2.0.track_running_stats"),
    (other_parameter, "net.4"),
    (no_bias, "net.4"),
    (other_buffers, "net.2.0"),
    (prune_layer, "net.0"),
    (norm_layer, "net.4"),
]


@pytest.mark.parametrize(("change", "name"), FOLLOWED)
def test_a_change_that_copies_follow(change: Callable[[Any], None], name: str) -> None:
    own = piece()
    form = Fingerprint([piece("other"), own])
    change(own.module)
    assert form.changed() == name
    assert form.changed() == name, "looking twice sees the same"
    form.follow()
    form.take()
    assert form.changed() is None


def test_a_change_that_was_taken_back_is_none() -> None:
    own: Any = piece()
    form = Fingerprint([own])
    own.module[1].alpha = 0.5
    own.module[1].alpha = 1.0
    assert form.changed() is None


# Changes that are refused.


def replace(net: Any) -> None:
    net[1] = Scaled()


def replace_nested(net: Any) -> None:
    net[2][1] = nn.Identity()


def append(net: Any) -> None:
    net.append(nn.Tanh())


def remove(net: Any) -> None:
    del net[4]


def exchange(net: Any) -> None:
    net[0], net[4] = net[4], net[0]


def repeat(net: Any) -> None:
    """The same module in one more place."""
    net.append(net[1])


@pytest.mark.parametrize("change", [replace, replace_nested, append, remove, exchange, repeat])
def test_other_layers_are_refused(change: Callable[[Any], None]) -> None:
    own = piece()
    form = Fingerprint([own])
    change(own.module)
    changed = form.changed()
    assert changed is not None
    assert changed.startswith("net")
    with pytest.raises(SettingError, match="layers of 'net' were added, removed or replaced after the first minibatch"):
        form.follow()


@pytest.mark.parametrize("name", ["0", "2", "2.1", "3"])
@pytest.mark.parametrize("register", ["register_forward_hook", "register_full_backward_hook"])
def test_hooks_are_refused(register: str, name: str) -> None:
    own = piece()
    form = Fingerprint([own])
    getattr(own.module.get_submodule(name), register)(lambda *_: None)
    assert form.changed() == f"net.{name}"
    with pytest.raises(SettingError, match=rf"layer 'net\.{re.escape(name)}' has a hook"):
        form.follow()


def test_hooks_of_torchs_own_are_not() -> None:
    """Spectral norm and pruning compute a weight before each forward."""
    own: Any = piece()
    prune_layer(own.module)
    form = Fingerprint([own])
    prune_layer(own.module)  # again: its hook is another one now
    form.follow()
    own.module[0](torch.ones(2, 4))
    assert form.changed() is None


def test_a_layer_with_a_parametrization_stays_itself() -> None:
    own: Any = piece()
    own.module[0] = normed()
    own.layers[0] = Layer("net.0", own.module[0])
    form = Fingerprint([own])
    own.module[0](torch.ones(2, 4))
    optimizer_step(own.module)
    assert form.changed() is None


def test_all_of_very_many_tensors_beside_layers_are_watched() -> None:
    own: Any = piece()
    for number in range(SOURCES + 1):
        setattr(own.module[1], f"table_{number}", torch.zeros(1))
    form = Fingerprint([own])
    getattr(own.module[1], f"table_{SOURCES}").add_(1)
    assert form.changed() == f"net.1.table_{SOURCES}"
