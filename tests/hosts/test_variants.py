"""Graphs for other inputs, which one thread captures while others send minibatches to a stage's host."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx

from lightning_hetpipe.hosts import remote_stage
from lightning_hetpipe.hosts.remote_stage import RemoteStage
from lightning_hetpipe.pipeline.graph_code import new_variants
from lightning_hetpipe.pipeline.graph_layer import GraphLayer, LayerGraph
from lightning_hetpipe.pipeline.stage import Layer


def graph(number: int) -> LayerGraph:
    found = fx.Graph()
    found.output(found.call_function(torch.ops.aten.add.Scalar, (found.placeholder("x"), number)))
    return LayerGraph(fx.GraphModule({}, found), [], None)


class Sending:
    """A stage of one layer as far as its graphs go, and the numbers of those that it has sent."""

    def __init__(self) -> None:
        self.layer = GraphLayer(torch.device("cpu"))
        self.add(0)
        self.sent: list[int] = []
        stage: Any = SimpleNamespace(layers=[Layer("x", self.layer)], _known=[1], _adding=threading.Lock())
        stage._variants = lambda: RemoteStage._variants(stage)
        stage._memory = SimpleNamespace(tell=self._tell)
        self._stage = stage

    def send_variants(self) -> None:
        RemoteStage._send_variants(self._stage)

    def add(self, number: int) -> None:
        self.layer.code.add(graph(number), [], [])

    def _tell(self, method: str, new: Any) -> None:
        for each in new[0]["graphs"]:
            (added,) = [node for node in each["graph"]["nodes"] if node[0] == "call_function"]
            self.sent.append(added[3][1])


def test_each_is_sent_once_while_more_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host has them by number: one that is sent twice would be run in the place of the next one."""
    sending = Sending()
    sending.add(1)

    def meanwhile(*args: Any) -> Any:
        monkeypatch.setattr(remote_stage, "new_variants", new_variants)
        sending.add(2)
        return new_variants(*args)

    monkeypatch.setattr(remote_stage, "new_variants", meanwhile)
    sending.send_variants()
    sending.add(3)
    sending.send_variants()
    assert sending.sent == [1, 2, 3]
