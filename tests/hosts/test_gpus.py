"""Stages whose hosts compute on a real GPU: the bits of the same stages in threads on it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.hosts.host_device import name_of
from lightning_hetpipe.planning.plan.document import Plan
from tests.exact.running import fit
from tests.hosts.elsewhere import Hosts, serving
from tests.hosts.test_other_machines import net, plan, task
from tests.support.models import SGD, Task, vectors
from tests.support.strategies import stashing

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    "bf16": {"precision": "bf16-mixed"},
    "scaled": {"precision": "16-mixed"},
}


def loaders() -> dict[str, Any]:
    return {"loader": vectors(40, 4), "val_loader": vectors(12, 4)}


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with serving({}) as found:
        assert found.process.stdout is not None
        assert "cuda:0 (" in found.process.stdout.readline()
        yield found


def made(draws: bool = False) -> Task:
    """A task with SGD: Adam's first steps are as long for a gradient of rounding errors as for any other."""
    layers = [layer for layer in net() if draws or not isinstance(layer, nn.Dropout)]
    return Task(nn.Sequential(*layers, *[nn.Identity()] * (6 - len(layers))), SGD)


def on_gpu(*nodes: str) -> Plan:
    """A plan of stages on the one GPU of each node."""
    found = plan(*nodes)
    (worker,) = found.virtual_workers
    name = name_of(torch.device("cuda", 0))
    stages = tuple(replace(stage, device=f"{name}:0") for stage in worker.stages)
    return replace(found, virtual_workers=(replace(worker, stages=stages),))


@pytest.mark.parametrize(("name", "draws"), [*((name, False) for name in SETTINGS), ("plain", True)])
def test_another_machine(name: str, draws: bool, hosts: Hosts) -> None:
    """Weights there look as ones on the CPU, whose steps take one operator for each."""
    settings: dict[str, Any] = {"accelerator": "gpu", "devices": [0], **SETTINGS[name]}
    here = fit(made(draws), **loaders(), strategy=stashing(plan=on_gpu("desk", "desk", "desk")), **settings)
    strategy = stashing(plan=on_gpu("attic", "attic", "desk"), stage_hosts={"attic": hosts.address})
    there = fit(made(draws), **loaders(), strategy=strategy, **settings)
    for one, other in zip(here.states, there.states, strict=True):
        for key, weight in one.weights.items():
            torch.testing.assert_close(other.weights[key].cpu(), weight.cpu())


def test_a_gpu_that_is_not_there(hosts: Hosts) -> None:
    found = on_gpu("attic", "desk", "desk")
    (worker,) = found.virtual_workers
    first = replace(worker.stages[0], device=worker.stages[0].device.replace(":0", ":99"))
    found = replace(found, virtual_workers=(replace(worker, stages=(first, *worker.stages[1:])),))
    strategy = stashing(plan=found, stage_hosts={"attic": hosts.address})
    with pytest.raises(SettingError, match=r":99: it has cuda:0 \("):
        fit(task(), **loaders(), strategy=strategy, accelerator="gpu", devices=[0])
