"""Stages whose hosts compute on accelerators: the same bits as in threads on these, and one clear error for a fault."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe.accelerator import default_generators
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.hosts.remote_tensor import RemoteTensor
from lightning_hetpipe.pipeline.segment_runner import SegmentRunner
from lightning_hetpipe.planning.plan.document import Plan
from lightning_hetpipe.planning.plan.planned_worker import PlannedMember
from tests.exact.pipelines import even
from tests.exact.running import assert_equal, assert_same_run, expect, fit
from tests.exact.test_captured import CASES, made
from tests.hosts.elsewhere import NEAR, Hosts, away, serving
from tests.hosts.host_threads import HostThread
from tests.hosts.test_other_machines import check_two, plan, refused, task
from tests.support.accelerator import NAME, TestAccelerator, missing, set_limit
from tests.support.equality import assert_same
from tests.support.marks import slow_except
from tests.support.models import SGD, Task, vectors, whole_batches
from tests.support.strategies import stashing


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """hetpipe-host on a machine with accelerators, beside this one, which has none."""
    if (reason := missing()) is not None:
        pytest.skip(reason)
    with serving({}, "tests.hosts.accelerated_host", str(1 << 30)) as found:
        assert found.process.stdout is not None
        told = found.process.stdout.readline()
        assert told.startswith(
            "hetpipe-host: besides its CPU, this machine has testacc:0 (test accelerator, 1.0 GiB), "
        )
        yield found


def planned(*nodes: str) -> Any:
    return plan(*nodes, device="test accelerator")


def test_devices_of_another_machine_have_the_oracles_bits(hosts: Hosts) -> None:
    strategy = stashing(
        plan=planned("attic", "cellar", "desk"), stage_hosts=dict.fromkeys(("attic", "cellar"), hosts.address)
    )
    assert_equal(expect(task(), vectors(40, 4), 3), fit(task(), vectors(40, 4), strategy=strategy))


@pytest.mark.slow
def test_two_virtual_workers_with_devices_of_another_machine(hosts: Hosts, tmp_path: Path) -> None:
    """Waves of weights that are on accelerators, whose updates are in blocks that servers see."""
    check_two(hosts, "test accelerator", tmp_path)


def grouped(
    device: str = "test accelerator", nodes: Sequence[str] = ("attic", "cellar", "desk"), second: int = 3
) -> Plan:
    """A plan whose first stage lies on two devices of its node, the other one with number ``second``."""
    whole = plan(*nodes, device=device)
    (worker,) = whole.virtual_workers
    first, *others = worker.stages
    group = (PlannedMember(first.node, first.device, 2.0), PlannedMember(first.node, f"{device}:{second}", 1.0))
    return replace(whole, virtual_workers=(replace(worker, stages=(replace(first, group=group), *others)),))


def test_a_device_that_a_host_lacks(hosts: Hosts) -> None:
    other = plan("attic", "desk", "desk", device="RTX-3090")
    text = refused(stashing(plan=other, stage_hosts={"attic": hosts.address}))
    assert f"host {hosts.address} has no RTX-3090:0: it has testacc:0 (test accelerator, 1.0 GiB), testacc:1" in text


def test_a_member_that_a_host_lacks(hosts: Hosts) -> None:
    text = refused(stashing(plan=grouped(second=7), stage_hosts=dict.fromkeys(("attic", "cellar"), hosts.address)))
    assert f"host {hosts.address} has no test accelerator:7: it has testacc:0 (test accelerator, 1.0 GiB)" in text


# What they are given is a part of something larger, whose strides, and so last bits, a copy on any device has not got.
STRIDED = {"clip", "towers"}


@pytest.mark.parametrize("name", slow_except([(name,) for name in CASES if name not in STRIDED], ("gpt",), ("resnet",)))
def test_models_that_were_captured_on_a_cpu(
    name: str, accelerator: TestAccelerator, host_threads: list[HostThread]
) -> None:
    """As a stage of another machine is."""
    _, loader, layers = CASES[name]
    if name == "gpt":
        loader = whole_batches(loader)
    expected = expect(made(name), loader, 3, draws=name == "noise between")
    on_second = {stage: [(1, "test accelerator")] for stage in range(2)}
    strategy = away(even(layers, min(3, layers), 3), accelerators=on_second)
    assert_equal(expected, fit(made(name), loader, strategy=strategy))
    assert torch.accelerator.max_memory_allocated(1) > 0


class Seen(L.Callback):
    """Notes how weights, gradients and states look while training runs, and that they are tensors at hosts."""

    def __init__(self) -> None:
        self.devices: dict[str, str] = {}

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: Any) -> None:
        for name, parameter in pl_module.named_parameters():
            states = [each for each in optimizer.state[parameter].values() if each.dim()]
            every = [parameter, parameter.grad, *states]
            if all(isinstance(each, RemoteTensor) for each in every):
                (self.devices[name],) = {str(each.device) for each in every}


FITS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    "clipped by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
}


def there() -> HetPipeStrategy:
    return stashing(plan=planned("attic", "attic", "desk"), stage_hosts={"attic": NEAR})


def here() -> HetPipeStrategy:
    return stashing(plan=plan("desk", "desk", "desk"))


@pytest.mark.parametrize("name", [*FITS, "mixed"])
def test_fits_with_stages_of_another_machine(
    name: str, accelerator: TestAccelerator, host_threads: list[HostThread]
) -> None:
    """This process sees their weights on the CPU."""
    settings = FITS.get(name, {"precision": "bf16-mixed"})
    loaders: dict[str, Any] = {"loader": vectors(40, 4), "val_loader": vectors(12, 4)}
    expected, seen = fit(task(), strategy=here(), **loaders, **settings), Seen()
    found = fit(task(), callbacks=[seen], strategy=there(), **loaders, **settings)
    assert_same_run(expected, found)
    assert seen.devices == dict.fromkeys(OWNED, "cpu")
    assert found.trainer is not None
    assert expected.trainer is not None
    assert found.trainer.callback_metrics == expected.trainer.callback_metrics


OWNED = ["net.0.weight", "net.0.bias", "net.1.weight", "net.1.bias", "net.3.weight", "net.3.bias"]
"""Weights of the first two stages."""


class Limits(L.Callback):
    """Leaves no room on the first device from the third step on."""

    def on_before_optimizer_step(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            set_limit(0, 0)


def test_a_group_of_devices_of_another_machine(accelerator: TestAccelerator, host_threads: list[HostThread]) -> None:
    """Up to rounding as one of CPUs of this machine, whose members see gradients with other strides."""
    elsewhere = dict.fromkeys(("attic", "cellar"), NEAR)
    strategies = stashing(plan=grouped("cpu", ("desk",) * 3)), stashing(plan=grouped(), stage_hosts=elsewhere)
    here, there = [fit(Task(task().net, SGD), vectors(40, 4), strategy=each) for each in strategies]
    assert torch.accelerator.max_memory_allocated(3) > 0
    for one, other in zip(here.states, there.states, strict=True):
        for key, weight in one.weights.items():
            torch.testing.assert_close(other.weights[key], weight)


def out_of_memory(loader: Any, *callbacks: L.Callback) -> tuple[str, str]:
    """The error of a fit that runs out of memory at a host of another machine, and the one note on it."""
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fit(task(), loader, callbacks, strategy=there())
    (note,) = caught.value.__notes__
    return str(caught.value), str(note)


@pytest.mark.parametrize("work", ["forward", "backward"])
def test_a_stage_runs_out_of_memory(
    work: str, accelerator: TestAccelerator, host_threads: list[HostThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = getattr(SegmentRunner, work)

    def wanting(runner: SegmentRunner, message: Any, *args: Any) -> Any:
        if (message.minibatch, message.segment) == (4, 1):
            torch.empty(1 << 40, device=f"{NAME}:1")
        return run(runner, message, *args)

    monkeypatch.setattr(SegmentRunner, work, wanting)
    said, note = out_of_memory(vectors(40, 4))
    assert said.startswith("testacc:1 out of memory")
    assert note.startswith("HetPipeStrategy: stage 1 ran out of memory on testacc:1 of process ")
    assert f" in the {work} of minibatch 4 (layer" in note
    assert all(each in note for each in ("of weight versions", "set in_flight below 3, recompute=True"))


def test_weights_that_a_device_has_no_room_for(accelerator: TestAccelerator, host_threads: list[HostThread]) -> None:
    set_limit(0, 100)
    said, note = out_of_memory(vectors(40, 4))
    assert said.startswith("the process of stage 0 (process ")
    assert "cannot go on: testacc:0 out of memory" in said
    assert "the stages were being set up" in note


def test_a_step_that_a_device_has_no_room_for(accelerator: TestAccelerator, host_threads: list[HostThread]) -> None:
    said, note = out_of_memory(vectors(40, 4), Limits())
    assert "cannot go on: testacc:0 out of memory" in said
    assert "memory ran out in user code or a step of Lightning's; stages held" in note
    assert re.search(r"\n  stage 0 on test accelerator:0 of process \d+: .* of weight versions", note)


def test_a_number_that_a_host_lacks(accelerator: TestAccelerator, host_threads: list[HostThread]) -> None:
    other = replace(planned("attic", "desk"), layers=plan("attic", "desk", "desk").layers)
    (worker,) = other.virtual_workers
    first, last = worker.stages
    stages = replace(first, device="test accelerator:4"), replace(last, last_layer=5)
    other = replace(other, virtual_workers=(replace(worker, stages=stages),))
    learner = task()
    with pytest.raises(SettingError) as caught:
        fit(learner, vectors(8, 4), strategy=stashing(plan=other, stage_hosts={"attic": NEAR}))
    assert "has no test accelerator:4: it has testacc:0 (test accelerator, 16.0 GiB), " in str(caught.value)
    assert str(caught.value).endswith("; plan for what is there")
    assert_same([*task().parameters()], [*learner.parameters()])  # no weight has left


def test_fused_operators_draw_by_the_seed_of_the_run(
    accelerator: TestAccelerator, host_threads: list[HostThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take no generator but their device's."""
    seeds = []
    for seed in ("1", "1", "2"):
        monkeypatch.setenv("PL_GLOBAL_SEED", seed)
        fit(task(), vectors(8, 4), strategy=there())
        seeds.append([default_generators()[index].initial_seed() for index in range(2)])
    assert seeds[0] == seeds[1]
    assert len({*seeds[1], *seeds[2]}) == 4
