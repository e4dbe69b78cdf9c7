"""Measuring leaves no trace: a fit that profiles its layers, and one that finds them on disk, train the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hetpipe import Cluster, HetPipeStrategy, Node
from tests.support.marks import quick
from tests.support.small import Learner, batches
from tests.support.trainers import quiet_trainer


def layers() -> nn.Sequential:
    """Statistics of batches, dropout, a part in evaluation mode and a frozen one."""
    return nn.Sequential(
        nn.Linear(6, 8).requires_grad_(False),
        nn.BatchNorm1d(8),
        nn.Dropout(0.3),
        nn.Linear(8, 8),
        nn.BatchNorm1d(8).eval(),
        nn.Linear(8, 3),
    )


class Captured(nn.Module):
    """No Sequential, so that its graph is captured."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = layers()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y


def trained(kind: type[nn.Module], precision: Any, **settings: Any) -> tuple[dict[str, Tensor], Tensor]:
    """Weights and buffers after a fit, and the next random numbers."""
    torch.manual_seed(3)
    learner = Learner(net=layers() if kind is nn.Sequential else kind())
    strategy = HetPipeStrategy(stages=2, in_flight=3, **settings)
    quiet_trainer(strategy, precision=precision).fit(learner, batches(6))
    return learner.state_dict(), torch.rand(4)


@quick("Sequential-bf16-mixed", "Captured-32-true")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("kind", [nn.Sequential, Captured])
def test_a_profile_leaves_no_trace(
    kind: type[nn.Module], precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HETPIPE_CACHE", str(tmp_path))
    cluster = Cluster([Node("box", ["cpu", "cpu"])])
    expected, chance = trained(kind, precision)
    for _ in range(2):
        found, drawn = trained(kind, precision, cluster=cluster)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert torch.equal(drawn, chance)
    assert len(list(tmp_path.rglob("*.json"))) == 1, "the second fit measured again"
