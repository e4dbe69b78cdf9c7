"""The ``module`` setting, and which Sequentials can be taken apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_hetpipe.capture.pieces import named_pieces
from lightning_hetpipe.errors import SettingError
from tests.capture.test_watch import Block, Watched, run_net


class TestNamedPieces:
    module = Watched(run_net, encoder=nn.Sequential(nn.Linear(4, 4)), block=Block(), linear=nn.Linear(4, 4))

    def test_none_are_found_later(self) -> None:
        assert named_pieces(self.module, None) is None

    @pytest.mark.parametrize(
        ("setting", "expected"),
        [("encoder", ["encoder"]), (["encoder", "block.body"], ["encoder", "block.body"]), (("encoder",), ["encoder"])],
    )
    def test_names(self, setting: str | list[str], expected: list[str]) -> None:
        assert named_pieces(self.module, setting) == expected

    def test_the_nearest_name_is_suggested(self) -> None:
        with pytest.raises(SettingError, match="module='encodr' is not a module of Watched; did you mean 'encoder'"):
            named_pieces(self.module, "encodr")

    @pytest.mark.parametrize("name", ["", "xyz"])
    def test_where_none_is_near_the_children_are_listed(self, name: str) -> None:
        with pytest.raises(SettingError, match=f"module='{name}' .*; its modules are encoder, block, linear"):
            named_pieces(self.module, name)

    def test_something_else_than_a_sequential(self) -> None:
        assert named_pieces(self.module, ["encoder", "linear"]) == ["encoder", "linear"]

    def test_one_without_parameters(self) -> None:
        module = Watched(run_net, net=nn.Sequential(nn.Tanh()))
        with pytest.raises(SettingError, match=r"module='net' has no parameters, .*; leave it out"):
            named_pieces(module, "net")

    def test_a_compiled_one(self) -> None:
        compiled: Any = torch.compile(nn.Sequential(nn.Linear(4, 4)), backend="eager")
        assert named_pieces(Watched(run_net, net=compiled), "net") == ["net._orig_mod"]
