"""Parameters and pieces that a loss reaches past all pieces."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_hetpipe.capture.observation import refuse_leaves
from lightning_hetpipe.errors import SettingError
from tests.capture.test_watch import Watched, X, run_net


def test_a_parameter_is_named() -> None:
    module = Watched(run_net, net=nn.Linear(4, 2))
    with pytest.raises(
        SettingError, match=r"gives the parameter 'net\.(weight|bias)' to a compiled function, .* net\..*\.clone"
    ):
        refuse_leaves(module, (), module.training_step(X))


def test_those_inside_pass() -> None:
    module = Watched(run_net, net=nn.Linear(4, 2))
    refuse_leaves(module, {id(p) for p in module.parameters()}, module.training_step(X))


def test_frozen_ones_pass() -> None:
    module = Watched(run_net, net=nn.Linear(4, 2).requires_grad_(False))
    refuse_leaves(module, (), module.training_step(X))


def test_a_parameter_that_the_loss_does_not_reach_passes() -> None:
    module = Watched(run_net, net=nn.Linear(4, 2), idle=nn.Linear(4, 4))
    refuse_leaves(module, {id(p) for p in module.get_submodule("net").parameters()}, module.training_step(X))


def test_a_parameter_that_is_registered_nowhere() -> None:
    """One in a plain list, which only the optimizer knows."""
    scale = nn.Parameter(torch.ones(3))
    with pytest.raises(SettingError, match=r"a tensor of shape \(3,\) .* is no parameter of Watched"):
        refuse_leaves(Watched(run_net), (), (scale * 2).sum())


def test_ours_pass() -> None:
    anchor = torch.ones((), requires_grad=True)
    refuse_leaves(Watched(run_net), {id(anchor)}, anchor * 2)


def test_a_loss_that_is_a_leaf() -> None:
    module = Watched(run_net)
    module.register_parameter("loss", nn.Parameter(torch.ones(())))
    with pytest.raises(SettingError, match=r"the parameter 'loss' to a compiled function"):
        refuse_leaves(module, (), module.get_parameter("loss"))
