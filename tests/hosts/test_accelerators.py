"""Stages whose hosts compute on accelerators: the same bits as in threads on these, and one clear error for a fault."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import nn

from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe.accelerator import default_generators
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.hosts.owned_stage import Accelerator
from lightning_hetpipe.hosts.remote_tensor import RemoteTensor
from lightning_hetpipe.pipeline.segment_runner import SegmentRunner
from lightning_hetpipe.planning.plan.document import Plan
from lightning_hetpipe.planning.plan.planned_worker import PlannedMember
from tests.exact.pipelines import even
from tests.exact.running import assert_equal, assert_same_run, expect, fit
from tests.exact.test_captured import CASES, made
from tests.hosts.accelerated_host import with_devices
from tests.hosts.host_threads import HostThread
from tests.hosts.test_other_machines import Hosts, check_two, plan, refused, serving, task, within
from tests.support.accelerator import NAME, TestAccelerator, missing, set_limit
from tests.support.equality import assert_same
from tests.support.marks import slow_except
from tests.support.models import ADAMW, CLASSES, SGD, Task, vectors
from tests.support.strategies import stashing
from tests.support.trainers import quiet_trainer
from tests.wsp.launch import ROOT

NAMES = ["resnet", "gpt", "dropout", "translator", "pieces"]
GRID = [(name, in_flight) for name in NAMES for in_flight in (2, 4)]


@pytest.mark.parametrize(("name", "in_flight"), slow_except(GRID, ("resnet", 4), ("gpt", 4), ("dropout", 4)))
def test_stages_on_devices_of_this_machine(
    accelerator: TestAccelerator, host_threads: list[HostThread], name: str, in_flight: int
) -> None:
    """Among them buffers, dropout, tied weights and several pieces."""
    _, loader, layers = CASES[name]
    strategy = even(layers, 4, in_flight, stage_hosts="processes")
    record = fit(made(name), loader, strategy=strategy, accelerator=accelerator, devices=4)
    assert_equal(expect(made(name), loader, in_flight), record)
    assert host_threads


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
    name: str, accelerator: TestAccelerator, host_threads: list[HostThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a stage of another machine is."""
    monkeypatch.setattr("lightning_hetpipe.hosts.stages_apart.owns", lambda device: True)
    monkeypatch.setattr("lightning_hetpipe.hosts.stages_apart.accelerates", lambda device: True)
    on_second = Accelerator(1, "test accelerator")
    monkeypatch.setattr("lightning_hetpipe.hosts.stages_apart.Accelerator", lambda *_: on_second)
    _, loader, layers = CASES[name]
    expected = expect(made(name), loader, 3, draws=name == "noise between")
    strategy = even(layers, min(3, layers), 3, stage_hosts="processes")
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


@pytest.fixture
def near(host_threads: list[HostThread], monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts of other machines are threads of this process."""
    monkeypatch.setattr("lightning_hetpipe.hosts.stages_apart.HostConnection", lambda *_: HostThread())


def there() -> HetPipeStrategy:
    return stashing(plan=planned("attic", "attic", "desk"), stage_hosts={"attic": "127.0.0.1:1"})


def here() -> HetPipeStrategy:
    return stashing(plan=plan("desk", "desk", "desk"))


@pytest.mark.parametrize("name", [*FITS, "mixed"])
def test_fits_with_stages_of_another_machine(name: str, accelerator: TestAccelerator, near: None) -> None:
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


@pytest.mark.parametrize("name", [*FITS, "mixed"])
def test_fits_with_processes_on_devices(
    name: str, accelerator: TestAccelerator, host_threads: list[HostThread]
) -> None:
    """This process sees weights on the devices that they are on in threads."""

    def settings() -> dict[str, Any]:
        on: dict[str, Any] = {"accelerator": accelerator, "devices": 3}
        loaders = {"loader": vectors(40, 4), "val_loader": vectors(12, 4)}
        mixed = {"plugins": [MixedPrecision("bf16-mixed", NAME)]}
        return {**on, **loaders, **FITS.get(name, mixed)}

    expected, seen = fit(task(), strategy=even(6, 3, 3), **settings()), Seen()
    found = fit(task(), callbacks=[seen], strategy=even(6, 3, 3, stage_hosts="processes"), **settings())
    assert_same_run(expected, found)
    assert seen.devices == {name: f"{NAME}:{min(number // 4, 1)}" for number, name in enumerate(OWNED)}
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


def test_a_group_of_devices_of_another_machine(accelerator: TestAccelerator, near: None) -> None:
    """Up to rounding as one of CPUs of this machine, whose members see gradients with other strides."""
    elsewhere = dict.fromkeys(("attic", "cellar"), "127.0.0.1:1")
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
    work: str, accelerator: TestAccelerator, near: None, monkeypatch: pytest.MonkeyPatch
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


def test_weights_that_a_device_has_no_room_for(accelerator: TestAccelerator, near: None) -> None:
    set_limit(0, 100)
    said, note = out_of_memory(vectors(40, 4))
    assert said.startswith("the process of stage 0 (process ")
    assert "cannot go on: testacc:0 out of memory" in said
    assert "the stages were being set up" in note


def test_a_step_that_a_device_has_no_room_for(accelerator: TestAccelerator, near: None) -> None:
    said, note = out_of_memory(vectors(40, 4), Limits())
    assert "cannot go on: testacc:0 out of memory" in said
    assert "memory ran out in user code or a step of Lightning's; stages held" in note
    assert re.search(r"\n  stage 0 on test accelerator:0 of process \d+: .* of weight versions", note)


def test_a_number_that_a_host_lacks(accelerator: TestAccelerator, near: None) -> None:
    other = replace(planned("attic", "desk"), layers=plan("attic", "desk", "desk").layers)
    (worker,) = other.virtual_workers
    first, last = worker.stages
    stages = replace(first, device="test accelerator:4"), replace(last, last_layer=5)
    other = replace(other, virtual_workers=(replace(worker, stages=stages),))
    learner = task()
    with pytest.raises(SettingError) as caught:
        fit(learner, vectors(8, 4), strategy=stashing(plan=other, stage_hosts={"attic": "127.0.0.1:1"}))
    assert "has no test accelerator:4: it has testacc:0 (test accelerator, 16.0 GiB), " in str(caught.value)
    assert str(caught.value).endswith("; plan for what is there")
    assert_same([*task().parameters()], [*learner.parameters()])  # no weight has left


def test_fused_operators_draw_by_the_seed_of_the_run(
    accelerator: TestAccelerator, near: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take no generator but their device's."""
    seeds = []
    for seed in ("1", "1", "2"):
        monkeypatch.setenv("PL_GLOBAL_SEED", seed)
        fit(task(), vectors(8, 4), strategy=there())
        seeds.append([default_generators()[index].initial_seed() for index in range(2)])
    assert seeds[0] == seeds[1]
    assert len({*seeds[1], *seeds[2]}) == 4


class Looks(L.Callback):
    """Notes the bytes that this process has on the first device."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.held = torch.accelerator.memory_allocated(0)


def test_processes_on_devices(accelerator: TestAccelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room that weights had on their devices, when this process had them, is free for hosts."""
    monkeypatch.setattr("lightning_hetpipe.hosts.host_process.CHILD", with_devices(1 << 30))
    learners = []
    for hosts in ("threads", "processes"):
        torch.manual_seed(0)
        learners.append(Task(nn.Sequential(nn.Linear(6, 512), nn.Tanh(), nn.Linear(512, CLASSES)), ADAMW))
        looks, strategy = Looks(), even(3, 2, 3, stage_hosts=hosts)
        trainer = quiet_trainer(strategy, accelerator=accelerator, devices=2, callbacks=[looks])
        trainer.fit(learners[-1], vectors(40, 4))
        weights = 4 * (6 * 512 + 512)
        assert looks.held > 4 * weights if hosts == "threads" else looks.held < weights
    one, other = [learner.state_dict() for learner in learners]
    assert_same(one, other)


TWO = """
import sys

import torch

from lightning_hetpipe import WSPCallback
from lightning_hetpipe.hosts import host_process
from tests.hosts.accelerated_host import give, with_devices
from tests.hosts.test_other_machines import task
from tests.support.accelerator import TestAccelerator
from tests.support.models import vectors
from tests.support.strategies import stashing
from tests.support.trainers import quiet_trainer
from tests.wsp.launch import ROOT

give(1 << 30)
host_process.CHILD = with_devices(1 << 30)
saved, hosts = sys.argv[1:]
learner = task()
wsp = WSPCallback(aggregate="mean")
strategy = stashing(stages=2, in_flight=3, virtual_workers=2, stage_hosts=hosts, wsp=wsp)
trainer = quiet_trainer(strategy, accelerator=TestAccelerator(), devices=4)
trainer.fit(learner, vectors(40, 4))
if trainer.is_global_zero:
    torch.save(learner.state_dict(), saved)
"""


@pytest.mark.slow
def test_two_virtual_workers_with_processes_on_devices(accelerator: TestAccelerator, tmp_path: Path) -> None:
    program, found = tmp_path / "two.py", []
    program.write_text(TWO)
    for hosts in ("threads", "processes"):
        saved = tmp_path / f"{hosts}.pt"
        subprocess.run([sys.executable, program, saved, hosts], check=True, timeout=300, env=within(ROOT))
        found.append(torch.load(saved))
    one, other = found
    assert_same(one, other)
