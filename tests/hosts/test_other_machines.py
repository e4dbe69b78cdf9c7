"""Stages at hosts that `hetpipe-host` serves, as on other machines: same bits, and one clear error for a fault."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.hosts.remote_stage import HostLost
from lightning_hetpipe.hosts.remote_tensor import RemoteTensor
from lightning_hetpipe.planning.plan.document import Plan
from lightning_hetpipe.planning.plan.planned_worker import PlannedStage, PlannedWorker
from tests.exact.running import assert_equal, assert_same_run, expect, fit
from tests.hosts.elsewhere import Hosts, serving
from tests.server.transports import certificates, eventually
from tests.support import forks
from tests.support.models import ADAMW, CLASSES, Task, vectors
from tests.support.strategies import stashing
from tests.support.trainers import quiet_trainer
from tests.wsp.launch import ROOT


def net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, CLASSES)]
    return nn.Sequential(*layers)


def task() -> Task:
    return Task(net(), ADAMW)


def plan(*nodes: str, workers: int = 1, device: str = "cpu") -> Plan:
    """Stages of two layers each on ``nodes``."""

    def worker(index: int) -> PlannedWorker:
        stages = [
            PlannedStage(
                node,
                f"{device if node != nodes[-1] else 'cpu'}:{index * len(nodes) + number}",
                2 * number,
                2 * number + 1,
                0.001,
                1000,
                None,
            )
            for number, node in enumerate(nodes)
        ]
        return PlannedWorker(1000.0, tuple(stages))

    names = tuple(f"net.{number}" for number in range(2 * len(nodes)))
    return Plan("Task", 3, 3, 0, 0.001, 1000.0, tuple(map(worker, range(workers))), names)


def apart(hosts: Hosts, *nodes: str, **settings: Any) -> HetPipeStrategy:
    elsewhere = {node: hosts.address for node in nodes if node != nodes[-1]}
    return stashing(plan=plan(*nodes), stage_hosts=elsewhere, **settings)


class Seen(L.Callback):
    """Notes where weights, gradients and states are while training runs."""

    def __init__(self) -> None:
        self.remote: set[str] = set()

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: Any) -> None:
        for name, parameter in pl_module.named_parameters():
            states = [each for each in optimizer.state[parameter].values() if each.dim()]
            if all(isinstance(each, RemoteTensor) for each in (parameter, parameter.grad, *states)):
                self.remote.add(name)


def test_a_virtual_worker_over_machines_has_the_oracles_bits(hosts: Hosts) -> None:
    """Two of its stages are at hosts, with their weights, gradients and optimizer states, which come home."""
    expected = expect(task(), vectors(40, 4), 3)
    seen, learner = Seen(), task()
    found = fit(learner, vectors(40, 4), [seen], strategy=apart(hosts, "attic", "cellar", "desk"))
    assert_equal(expected, found)
    assert seen.remote == {"net.0.weight", "net.0.bias", "net.1.weight", "net.1.bias", "net.3.weight", "net.3.bias"}
    assert all(type(parameter) is nn.Parameter for parameter in learner.parameters())


TWO = """
import sys

import torch

from lightning_hetpipe import WSPCallback
from tests.hosts.test_other_machines import plan, task
from tests.support.models import vectors
from tests.support.strategies import stashing
from tests.support.trainers import quiet_trainer

device, address, *saved = sys.argv[1:]
one = plan("desk", "desk", "desk", workers=2), {}
several = plan("attic", "desk", "desk", workers=2, device=device), {"stage_hosts": {"attic": address}}
for path, (planned, where) in zip(saved, (one, several), strict=True):
    learner = task()
    trainer = quiet_trainer(stashing(plan=planned, wsp=WSPCallback(aggregate="mean"), **where), max_epochs=2)
    trainer.fit(learner, vectors(40, 4), vectors(12, 4))
    if trainer.is_global_zero:
        torch.save(learner.state_dict(), path)
"""


def test_two_virtual_workers_over_machines(hosts: Hosts, tmp_path: Path) -> None:
    """Waves of weights that are at hosts."""
    check_two(hosts, "cpu", tmp_path)


def check_two(hosts: Hosts, device: str, tmp_path: Path) -> None:
    """Two virtual workers over machines, with their first stages on the ``device`` there, train as on one CPU."""
    saved = [tmp_path / "one.pt", tmp_path / "several.pt"]
    program = tmp_path / "two.py"
    program.write_text(TWO)
    command = [*map(str, [program, device, hosts.address, *saved])]
    done = forks.run(*command, timeout=240, environment=within(ROOT), starting=forks.LAUNCHES)
    assert done.returncode == 0, done.stderr
    assert_alike(*map(torch.load, saved))


def within(folder: Path) -> dict[str, str]:
    """The environment of a program that finds the modules in ``folder``."""
    return {**os.environ, "PYTHONPATH": str(folder)}


def test_checkpoints_are_those_of_threads(hosts: Hosts, tmp_path: Path) -> None:
    """They hold the same, and a run that is resumed with its stages elsewhere goes on as one that was not.

    Each resumes from what the other has saved, as these differ in nothing.
    """
    strategies: list[Callable[[], HetPipeStrategy]] = [
        lambda: apart(hosts, "attic", "attic", "desk"),
        lambda: stashing(plan=plan("desk", "desk", "desk")),
    ]
    saved = []
    for number, strategy in enumerate(strategies):
        saves = ModelCheckpoint(tmp_path / str(number), every_n_train_steps=5, save_top_k=-1)
        quiet_trainer(strategy(), callbacks=[saves], enable_checkpointing=True).fit(task(), vectors(40, 4))
        saved.append(next((tmp_path / str(number)).glob("*step=5*")))
    one, other = (torch.load(path, weights_only=True) for path in saved)
    for each in (one, other):
        del each["callbacks"]  # the paths of what they have saved
    assert_alike(one, other)
    found = [
        fit(task(), vectors(40, 4), strategy=each(), ckpt_path=str(path))
        for each, path in zip(strategies, reversed(saved), strict=True)
    ]
    assert_equal(found[0], found[1])


def assert_alike(one: Any, other: Any) -> None:
    if isinstance(one, torch.Tensor):
        assert type(one) is type(other)
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_alike(one[key], other[key])
    elif isinstance(one, list):
        for pair in zip(one, other, strict=True):
            assert_alike(*pair)
    else:
        assert one == other


class Kill(L.Callback):
    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 4:
            os.kill(self.hosts.children()[0], signal.SIGKILL)


def test_a_host_that_is_killed_ends_its_virtual_worker(hosts: Hosts) -> None:
    told = rf"the process of stage 0 \(host {hosts.address} on attic\) has closed the connection, or attic cannot be"
    with pytest.raises(HostLost, match=f"{told} reached any more; see the output there; start again from the last"):
        fit(task(), vectors(40, 4), [Kill(hosts)], strategy=apart(hosts, "attic", "desk", "desk", timeout=60))
    assert_equal(
        expect(task(), vectors(20, 4), 3), fit(task(), vectors(20, 4), strategy=apart(hosts, "attic", "desk", "desk"))
    )


class KillInValidation(Kill):
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Nothing is killed while training runs."""

    def on_validation_start(self, trainer: L.Trainer, *_: Any) -> None:
        os.kill(self.hosts.children()[0], signal.SIGKILL)
        eventually(lambda: len(self.hosts.children()) < 1, "the host has not ended")


def test_a_host_that_is_killed_is_not_the_fault_of_an_evaluation(hosts: Hosts, recwarn: Any) -> None:
    """A warning asked to report the model, as its evaluation would not run in the pipeline."""
    trainer = quiet_trainer(apart(hosts, "attic", "desk", "desk", timeout=60), callbacks=[KillInValidation(hosts)])
    with pytest.raises(HostLost, match="start again from the last checkpoint"):
        trainer.fit(task(), vectors(40, 4), vectors(12, 4))
    assert not [each for each in recwarn if "does not run in the pipeline" in str(each.message)]


class Interrupted(L.Callback):
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 4:
            raise ArithmeticError("of the user's")


def test_after_an_error_weights_are_home(hosts: Hosts) -> None:
    learner = task()
    with pytest.raises(ArithmeticError):
        quiet_trainer(apart(hosts, "attic", "desk", "desk"), callbacks=[Interrupted()]).fit(learner, vectors(40, 4))
    assert all(type(parameter) is nn.Parameter for parameter in learner.parameters())


class KeepsView(L.Callback):
    """Copies the module, and keeps a view of a weight."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        assert all(each.grad is None for each in copy.deepcopy(pl_module.net).parameters())
        assert float(f"{pl_module.net[0].weight.norm():.4f}") > 0
        with torch.no_grad():
            self.view = pl_module.net[0].weight.view(-1)
        pl_module.net[0].weight.data.mul_(0.9)
        with torch.no_grad():
            self.view.add_(0.1)


def test_copies_and_views_of_weights_are_those_of_threads(hosts: Hosts) -> None:
    here = fit(task(), vectors(40, 4), [KeepsView()], strategy=stashing(plan=plan("desk", "desk", "desk")))
    there = fit(task(), vectors(40, 4), [KeepsView()], strategy=apart(hosts, "attic", "attic", "desk"))
    assert_same_run(here, there)


def test_another_token_is_not_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving({"HETPIPE_TOKEN": "one"}) as found:
        for token, lets in (("other", False), ("", False), ("one", True)):
            monkeypatch.setenv("HETPIPE_TOKEN", token)
            strategy = apart(found, "attic", "desk", "desk")
            if lets:
                fit(task(), vectors(8, 4), strategy=strategy)
            else:
                with pytest.raises(SettingError, match=r"does not let this process in: HETPIPE_TOKEN is another one"):
                    fit(task(), vectors(8, 4), strategy=strategy)


def test_certificates_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits; who has none is not let in."""
    folder = certificates()
    variables = {f"HETPIPE_{name.upper()}": str(folder / f"{name}.pem") for name in ("ca", "certificate", "key")}
    with serving({**variables, "HETPIPE_TOKEN": "one"}) as found:
        with monkeypatch.context() as patch:
            for name, value in {**variables, "HETPIPE_TOKEN": "one"}.items():
                patch.setenv(name, value)
            expected = expect(task(), vectors(40, 4), 3)
            assert_equal(expected, fit(task(), vectors(40, 4), strategy=apart(found, "attic", "attic", "desk")))
        monkeypatch.setenv("HETPIPE_TOKEN", "one")
        assert "does not let this process in" in refused(apart(found, "attic", "desk", "desk"))


class Custom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value * 1

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


class Own(nn.Module):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = Custom.apply(value)  # type: ignore[no-untyped-call]  # torch has no types here
        return found


def refused(strategy: HetPipeStrategy, module: nn.Sequential | None = None) -> str:
    with pytest.raises(SettingError) as caught:
        fit(Task(module or net(), ADAMW), vectors(8, 4), strategy=strategy)
    return str(caught.value)


def test_a_layer_without_a_graph_has_to_be_planned_for_the_last_node(hosts: Hosts) -> None:
    layers = [*net()]
    text = refused(apart(hosts, "attic", "desk", "desk"), nn.Sequential(layers[0], Own(), *layers[2:]))
    assert "stage 0 is planned for another machine, and has to stay in this process, as layer" in text
    assert "which has no graph; plan its layers for the node of the last stage" in text


def test_a_plan_that_cuts_before_a_module_that_works_in_place(hosts: Hosts) -> None:
    """Its graph holds it together with the layer before; the plan is of modules, as `hetpipe-plan` makes it."""
    layers = [*net()]
    layers[2] = nn.ReLU(inplace=True)
    net_in_place = nn.Sequential(*layers)
    module = Task(net_in_place, ADAMW)
    expected = expect(copy.deepcopy(module), vectors(40, 4), 3)
    assert_equal(expected, fit(module, vectors(40, 4), strategy=apart(hosts, "attic", "attic", "desk")))


def test_nobody_at_an_address(hosts: Hosts) -> None:
    strategy = stashing(plan=plan("attic", "desk", "desk"), stage_hosts={"attic": "127.0.0.1:1"})
    assert "the host at 127.0.0.1:1: nobody answers there" in refused(strategy)


def test_an_accelerator_that_a_host_lacks(hosts: Hosts) -> None:
    strategy = stashing(plan=plan("attic", "desk", "desk", device="RTX-3090"), stage_hosts={"attic": hosts.address})
    said = f"stage 0 (host {hosts.address} on attic) cannot go on: host {hosts.address} has no RTX-3090:0: it has no"
    assert f"{said} accelerator" in refused(strategy)


def test_a_spread_run_has_no_stages_for_hosts() -> None:
    one = replace(plan("attic", "desk", "desk"), in_flight=1, wave=1, spread=True)
    strategy = HetPipeStrategy(plan=one, stage_hosts={"attic": "127.0.0.1:1"})
    assert "is for stages, and one minibatch in flight has none" in refused(strategy)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stage_hosts": {"attic": "127.0.0.1:1"}, "stages": 2}, "names hosts for the nodes of a plan"),
        ({"plan": plan("attic", "desk", "desk")}, r"start hetpipe-host on attic, and say where, as in stage_hosts="),
        (
            {"plan": plan("attic", "desk", "desk"), "stage_hosts": {"atic": "127.0.0.1:1"}},
            r"stage_hosts=\{'atic': '127.0.0.1:1'\} names 'atic', which is no node of the plan for Task, whose nodes"
            r" are 'desk' and 'attic'; did you mean 'attic'\?",
        ),
        (
            {"plan": plan("attic", "cellar", "desk"), "stage_hosts": {"attic": "127.0.0.1:1"}},
            "start hetpipe-host on cellar, and say where",
        ),
    ],
)
def test_plans_and_hosts_that_do_not_fit(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        fit(task(), vectors(8, 4), strategy=stashing(**settings))


@pytest.mark.parametrize("other", ["compile", "timeline"])
def test_settings_that_hosts_do_not_know(other: str) -> None:
    settings: dict[str, Any] = {"stage_hosts": {"attic": "127.0.0.1:1"}, other: True}
    with pytest.raises(SettingError, match=f"leave {other} out, or stage_hosts"):
        HetPipeStrategy(**settings)
