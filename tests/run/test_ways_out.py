"""Refusals with several in flight whose ways out are tried: each message names them, and each of them trains."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe.errors import SettingError
from tests.support.small import Learner, batches
from tests.support.trainers import quiet_trainer


class Varies(nn.Module):
    """Uses more of its layers later than in its first call."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.calls = kind, 0
        self.a = nn.Linear(6, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.heads = nn.ModuleDict({name: nn.Linear(8, 3) for name in "ab"})

    def forward(self, x: Tensor, step: int) -> Tensor:
        frozen = self.kind == "thaws" and step < 2
        with torch.no_grad() if frozen else nullcontext():
            h = torch.relu(self.a(x))
        for _ in range(1 + step % 2 if self.kind == "loops" else 1):
            h = h + self.block(h)
        scores: Tensor = self.heads["ab"[step % 2] if self.kind == "heads" else "a"](h)
        return scores


class Branches(Varies):
    def forward(self, x: Tensor, step: int) -> Tensor:
        h = torch.relu(self.a(x))
        h = h + self.block(h) if h.sum() > 10 * step else h * 2
        found: Tensor = self.heads["a"](h)
        return found


def varying(module: Any, x: Tensor, y: Tensor, batch_idx: int) -> Any:
    return F.cross_entropy(module.net(x, batch_idx), y)


def of_varying(kind: str) -> Callable[[], L.LightningModule]:
    return lambda: Learner(varying, Varies(kind))


def forces(module: Any, x: Tensor, y: Tensor, batch_idx: int) -> Any:
    """Potentials of molecules learn from gradients with respect to inputs."""
    x = x.requires_grad_()
    return torch.autograd.grad(module.net(x).sum(), x, create_graph=True)[0].square().mean()


def pseudo_labels(module: Any, x: Tensor, y: Tensor, batch_idx: int) -> Any:
    module.net.eval()
    with torch.no_grad():
        target = module.net(x).softmax(-1)
    module.net.train()
    return F.mse_loss(module.net(x).softmax(-1), target) + F.cross_entropy(module.net(x), y)


def data_dependent(module: Any, x: Tensor, y: Tensor, batch_idx: int) -> Any:
    """ActNorm takes its scale from the first batch."""
    if not batch_idx:
        with torch.no_grad():
            module.scale.fill_(1 / x.std())
    return F.cross_entropy(module.net(x * module.scale), y)


class Sharpness(Learner):
    def configure_optimizers(self) -> Any:
        class Twice(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                closure()
                return super().step(closure)

        return Twice(self.parameters(), lr=0.1)


CASES: dict[str, Callable[[], L.LightningModule]] = {
    "loops": of_varying("loops"),
    "heads": of_varying("heads"),
    "thaws": of_varying("thaws"),
    "branches": lambda: Learner(varying, Branches("branches")),
    "forces": lambda: Learner(forces),
    "pseudo labels": lambda: Learner(pseudo_labels),
    "data-dependent": lambda: Learner(data_dependent, scale=nn.Parameter(torch.ones(()))),
    "sharpness": Sharpness,
}


def trained(make: Callable[[], L.LightningModule], strategy: Any) -> list[Tensor]:
    L.seed_everything(0, verbose=False)
    module = make()
    quiet_trainer(strategy).fit(module, batches())
    return [parameter.detach() for parameter in module.parameters()]


@pytest.mark.parametrize("case", CASES)
def test_ways_out_are_named_and_train(case: str) -> None:
    make = CASES[case]
    plain = trained(make, "auto")
    with pytest.raises(SettingError, match=r", or set in_flight=1$") as refusal:
        trained(make, HetPipeStrategy(stages=2, in_flight=3, weights="sync"))
    settings: list[dict[str, Any]] = [{"in_flight": 1}]
    if named := re.search(r"module=(\[.+?\])", str(refusal.value)):
        names = re.findall(r"'(.+?)'", named.group(1))
        settings.append({"in_flight": 3, "weights": "sync", "module": names})
    assert len(settings) == 1 + (case in ("loops", "heads", "thaws", "branches"))
    for each in settings:
        found = trained(make, HetPipeStrategy(stages=2, **each))
        assert all(map(torch.equal, found, plain)), each


def test_what_is_left_out_beside_one_in_flight() -> None:
    """With one in flight a stage that computes forwards again is refused, too."""
    with pytest.raises(SettingError, match=r", or set in_flight=1 and leave recompute out$"):
        trained(CASES["pseudo labels"], HetPipeStrategy(stages=2, in_flight=3, recompute=True))
