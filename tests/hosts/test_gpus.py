"""Stages whose hosts compute on a real GPU: the bits of the same stages in threads on it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_hetpipe import HetPipeStrategy
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


def trained(strategy: HetPipeStrategy, name: str, draws: bool = False) -> list[torch.Tensor]:
    """Weights after each step."""
    found = fit(made(draws), **loaders(), strategy=strategy, accelerator="gpu", devices=[0], **SETTINGS[name])
    return [weight.cpu() for state in found.states for weight in state.weights.values()]


def at_a_host(hosts: Hosts) -> HetPipeStrategy:
    return stashing(plan=on_gpu("attic", "attic", "desk"), stage_hosts={"attic": hosts.address})


@pytest.mark.parametrize("name", SETTINGS)
def test_another_machine(name: str, hosts: Hosts) -> None:
    """Weights there look as ones on the CPU, whose steps take one operator for each.

    The first minibatch computes layers of hosts on the leader's CPU, on which the GPU's autocast does not hold.
    """
    here = trained(stashing(plan=on_gpu("desk", "desk", "desk")), name)
    there = trained(at_a_host(hosts), name)
    rtol, atol = (0.02, 0.005) if "precision" in SETTINGS[name] else (1.3e-6, 1e-5)
    for one, other in zip(here, there, strict=True):
        torch.testing.assert_close(other, one, rtol=rtol, atol=atol)


def test_draws(hosts: Hosts) -> None:
    """Dropout repeats. Its first draw is of the CPU, which the first minibatch computes such layers on."""
    for one, other in zip(*(trained(at_a_host(hosts), "plain", draws=True) for _ in range(2)), strict=True):
        assert torch.equal(one, other)


def test_a_gpu_that_is_not_there(hosts: Hosts) -> None:
    found = on_gpu("attic", "desk", "desk")
    (worker,) = found.virtual_workers
    first = replace(worker.stages[0], device=worker.stages[0].device.replace(":0", ":99"))
    found = replace(found, virtual_workers=(replace(worker, stages=(first, *worker.stages[1:])),))
    strategy = stashing(plan=found, stage_hosts={"attic": hosts.address})
    with pytest.raises(SettingError, match=r":99: it has cuda:0 \("):
        fit(task(), **loaders(), strategy=strategy, accelerator="gpu", devices=[0])
