"""Plans that the strategy runs, and those that it makes: stages, devices and Nm as planned, results bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_hetpipe import Cluster, Device, HetPipeStrategy, Node, Plan
from lightning_hetpipe.capture.profiling import ProfilingInput
from lightning_hetpipe.placement import device_placement, measuring
from lightning_hetpipe.planning.model.catalogue import gpus
from lightning_hetpipe.planning.model.profile import LayerBytes, Profile, Times
from lightning_hetpipe.planning.plan.planned_worker import PlannedStage, PlannedWorker
from lightning_hetpipe.run.first_minibatch import check_memory
from lightning_hetpipe.workers.synchroniser import NoSynchroniser
from tests.exact.running import assert_equal, expect, fit
from tests.oracle import Batch, Outputs
from tests.support import models
from tests.support.models import SGD, Task, mlp, vectors
from tests.support.small import Learner, assert_refused, refused
from tests.support.strategies import stashing
from tests.support.trainers import quiet_trainer

pytestmark = pytest.mark.filterwarnings("ignore:stage . computed for longer than it is to take")

LAYERS = tuple(f"net.{number}" for number in range(7))
LOADER = vectors(18, 4)
MIB = 1 << 20
TWO = [torch.device("cpu"), torch.device("cpu", 0)]
"""The same memory by two names."""


def planned(*cuts: int, in_flight: int = 3, device: str = "cpu", memory: int = 1) -> Plan:
    """For ``mlp``: stages that start at ``cuts``, on the devices of one node, the last of them first."""
    ends, count = [*cuts[1:], len(LAYERS)], len(cuts)
    stages = [
        PlannedStage("box", f"{device}:{count - 1 - number}", first, after - 1, 0.1, memory, None)
        for number, (first, after) in enumerate(zip(cuts, ends, strict=True))
    ]
    return Plan("MLP", in_flight, in_flight, 0, 0.1, 10.0, (PlannedWorker(10.0, tuple(stages)),), LAYERS)


Says = Callable[..., None]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Says:
    """Each layer takes the milliseconds that a test says, by the name of a device; on ``others``, measured earlier."""

    def say(others: Mapping[str, float] | None = None, **here: float) -> None:
        def profile(study: ProfilingInput, name: str, ms: float) -> Profile:
            layers = [LayerBytes(layer.name, MIB, MIB, 0) for layer, _, _ in study.layers]
            speeds = {"cpu": 1e10} if name == "cpu" else {}
            return Profile("m", 1, layers, {name: [Times(ms / 3000, ms / 1500)] * len(layers)}, {}, speeds=speeds)

        def profiled(study: ProfilingInput, devices: Mapping[str, torch.device], *_: Any, **__: Any) -> Profile:
            first, *rest = [profile(study, name, here[name]) for name in devices]
            for other in rest:
                first = first.joined(other)
            return first

        earlier = others or {}
        monkeypatch.setattr(measuring, "profiled", profiled)
        monkeypatch.setattr(
            measuring, "kept", lambda study, name, *_: profile(study, name, earlier[name]) if name in earlier else None
        )

    return say


def box(*devices: Device | str) -> Cluster:
    return Cluster([Node("box", devices)])


def trained(strategy: HetPipeStrategy, every: int = 1, weights: str = "stash") -> list[tuple[str, list[str]]]:
    """Each stage's device and its layers; what was trained is what the oracle says at the run's Nm."""
    task: Task = mlp(SGD)
    before = {name: tensor.clone() for name, tensor in task.state_dict().items()}
    record = fit(task, LOADER, strategy=strategy, max_epochs=1, accumulate_grad_batches=every)
    task.load_state_dict(before)
    in_flight = strategy.last_run.in_flight
    assert_equal(expect(task, LOADER, in_flight, max_epochs=1, accumulate=every, weights=weights), record)
    return [(stage.device, stage.layers) for stage in strategy.last_run.stages]


# Given.


@pytest.mark.parametrize("as_file", [True, False])
def test_a_plan_is_run_as_it_says(as_file: bool, tmp_path: Path) -> None:
    plan = planned(0, 1, 4, in_flight=5)
    plan.save(tmp_path / "plan.json")
    strategy = stashing(plan=tmp_path / "plan.json" if as_file else plan)
    assert [layers for _, layers in trained(strategy)] == [list(LAYERS[:1]), list(LAYERS[1:4]), list(LAYERS[4:])]
    assert strategy.last_run.in_flight == 5


def test_a_plans_devices_are_taken_in_its_order() -> None:
    strategy = stashing(plan=planned(0, 2), parallel_devices=TWO)
    assert [device for device, _ in trained(strategy)] == ["cpu:0", "cpu"]


def test_the_stages_of_a_plan_are_measured_on_their_own_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """All were on the last stage's."""
    monkeypatch.setattr(device_placement, "discovered_cluster", lambda devices: box("fast", "slow"))
    takes = {TWO[0]: 0.001, TWO[1]: 0.1}
    monkeypatch.setattr(measuring, "layer_seconds", lambda study, device, bar: [takes[device]] * len(study.layers))
    plan = planned(0, 2)
    first, second = plan.virtual_workers[0].stages
    stages = (replace(first, device="slow:1"), replace(second, device="fast:0"))
    plan = replace(plan, virtual_workers=(replace(plan.virtual_workers[0], stages=stages),))
    strategy = stashing(plan=plan, parallel_devices=TWO)
    trained(strategy)
    assert [stage.time_s for stage in strategy.last_run.stages] == pytest.approx([2 * 0.1, 5 * 0.001])


def test_what_the_plan_says_may_be_said_again() -> None:
    strategy = stashing(plan=planned(0, 2), stages=2, in_flight=3)
    assert (strategy.stages, strategy.in_flight) == (2, 3)


@pytest.mark.parametrize(("said", "asked"), [(True, False), (False, True), (False, False)])
def test_forwards_are_computed_again_where_the_plan_or_the_user_says_so(said: bool, asked: bool) -> None:
    strategy = stashing(plan=replace(planned(0, 4), recompute=said), recompute=asked)
    assert strategy.recompute is (said or asked)
    trained(strategy)


@pytest.mark.parametrize("policy", ["stash", "sync", "pipeoptim"])
def test_weights_are_those_of_the_plan(policy: str, caplog: pytest.LogCaptureFixture) -> None:
    """They were chosen by the optimizer, whatever the plan had room for: SGD with momentum and Nesterov's here."""
    caplog.set_level("INFO")
    plan = replace(planned(0, 2), weights=policy)
    trained(HetPipeStrategy(plan=plan, lr_correction=None), weights=policy)
    why = "the optimizer is SGD" if policy == "pipeoptim" else "plan=<for MLP> is for it"
    assert f"weights='auto' is '{policy}', as {why}" in caplog.text


def test_a_plan_for_more_minibatches_of_a_step_has_room_for_fewer_copies() -> None:
    """Four in flight take two copies with three minibatches to a step, and four with one."""
    plan = replace(planned(0, 2, in_flight=4), accumulate_grad_batches=3)
    trained(HetPipeStrategy(plan=plan), every=3)
    (worker,) = plan.virtual_workers
    stages = tuple(replace(stage, memory_limit_bytes=MIB) for stage in worker.stages)
    limited = replace(plan, virtual_workers=(replace(worker, stages=stages),))
    trained(HetPipeStrategy(plan=limited), every=3)
    said = "made for accumulate_grad_batches=3, where stages keep 2 copies of their weights, and with", "=1 it is 4"
    assert_refused(mlp(SGD), *said, strategy=HetPipeStrategy(plan=limited), loader=LOADER)


def test_a_plan_for_another_model(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    planned(0, 2).save(path)
    said = "was made for another model than Learner: it has 7 layers and the model 4; 'net.4' and what follows is there"
    assert_refused(Learner(), f"plan={path}", said, strategy=HetPipeStrategy(plan=path))
    one_stage = HetPipeStrategy(plan=planned(0, in_flight=1))  # which needs no pipeline, but is a plan all the same
    assert_refused(Learner(), "plan=<for MLP> was made for another model", strategy=one_stage)


def test_devices_that_are_not_there() -> None:
    said = "the plan for MLP cannot be run here: virtual_workers[0].stages[0].device is 'T4:1', where box has a cpu"
    strategy = stashing(plan=planned(0, 2, device="T4"))
    assert_refused(mlp(), said, "give the cluster that it was made for", strategy=strategy, loader=LOADER)
    strategy = stashing(plan=planned(0, 2, device="T4"), cluster=box("T4"))
    assert_refused(mlp(), "is 'T4:1', and box has 1, from 0 on", strategy=strategy, loader=LOADER)


def test_a_plan_that_takes_more_memory_than_is_declared() -> None:
    cluster = box(Device("cpu", 4 * MIB), Device("cpu", 9 * MIB))
    strategy = stashing(plan=planned(0, 2, memory=5 * MIB), cluster=cluster)
    said = "virtual_workers[0].stages[1].memory_bytes is 5.0 MiB, 1.0 MiB more than cpu:0 has"
    assert_refused(mlp(), said, strategy=strategy, loader=LOADER)


def test_evaluation_without_a_fit_has_the_plans_stages() -> None:
    strategy = stashing(plan=planned(0, 5, in_flight=2))
    trainer = quiet_trainer(strategy)
    assert strategy._devices.choose_split_points([1.0] * 7, 2) == (0, 5)
    assert strategy._devices.choose_split_points([1.0] * 4, 2) == (0, 2)  # which calls fewer layers than training
    assert trainer.strategy is strategy


# Of devices that are not here.


def test_devices_are_emulated_by_their_ratios(measured: Says) -> None:
    measured(cpu=0.2)
    strategy = stashing(cluster=box("RTX-3090", Device("Quadro-RTX-4000", "7.5 GiB")))
    stages = trained(strategy)
    assert sorted(device for device, _ in stages) == ["Quadro-RTX-4000:1 (emulated)", "RTX-3090:0 (emulated)"]
    layers = {device.partition(":")[0]: len(layers) for device, layers in stages}
    assert layers["RTX-3090"] > layers["Quadro-RTX-4000"]
    assert strategy.last_run.emulated
    assert min(stage.time_s for stage in strategy.last_run.stages) > 2 * 0.0002  # of the CPU
    each = {stage.device.partition(":")[0]: stage.time_s / len(stage.layers) for stage in strategy.last_run.stages}
    ratio = gpus()["RTX-3090"].speed() / gpus()["Quadro-RTX-4000"].speed()
    assert each["Quadro-RTX-4000"] / each["RTX-3090"] == pytest.approx(ratio)  # though layers are as short as launches


def test_stages_take_as_long_as_was_measured_on_their_device(measured: Says) -> None:
    measured({"T4": 1.5, "A100-40": 0.5}, cpu=0.01)
    strategy = stashing(cluster=box("T4", "A100-40"), in_flight=2)
    stages = {device.partition(":")[0]: len(layers) for device, layers in trained(strategy)}
    times = {stage.device.partition(":")[0]: stage.time_s for stage in strategy.last_run.stages}
    assert times == pytest.approx({"T4": 1.5e-3 * stages["T4"], "A100-40": 0.5e-3 * stages["A100-40"]})
    assert [pad.forward + pad.backward for pad in strategy._devices.emulation._pads] == pytest.approx([*times.values()])
    assert all(stage.passes for stage in strategy._devices.emulation.stages)


def test_what_comes_after_a_fit_is_evaluated_as_fast_as_it_can(measured: Says) -> None:
    """A test of the trained model, as hetpipe-train has it, asked for pads that only a fit's plan could give."""
    measured(cpu=1.0)
    strategy = stashing(cluster=box("RTX-3090", "Quadro-RTX-4000"), in_flight=3)
    trainer, task = quiet_trainer(strategy), mlp(SGD)
    trainer.fit(task, LOADER)
    (found,) = trainer.test(task, LOADER, verbose=False)
    assert found


def test_a_plan_is_run_on_emulated_devices(measured: Says) -> None:
    measured({"T4": 0.3}, cpu=0.01)
    strategy = stashing(plan=planned(0, 3, device="T4"), cluster=box("T4", "T4"))
    assert [(device, len(layers)) for device, layers in trained(strategy)] == [
        ("T4:1 (emulated)", 3),
        ("T4:0 (emulated)", 4),
    ]


def test_a_plan_that_does_not_fit_what_is_emulated_is_refused(measured: Says) -> None:
    """Its own numbers were believed, whatever the batch that it was made for."""
    measured({"T4": 0.3}, cpu=0.01)
    strategy = stashing(plan=planned(0, 3, device="T4"), cluster=box(Device("T4", 16 * MIB), "T4"))
    said = ["Task does not fit into the memory of its devices: T4:0 lacks", "a plan for what is trained here"]
    assert_refused(mlp(SGD), *said, strategy=strategy, loader=LOADER)


def test_stages_that_were_asked_for_lie_on_the_devices_that_are_best(measured: Says) -> None:
    """They lay on the first ones in their order, of which one was slow. A plan of its own would have three."""
    measured({"T4": 0.3, "A100-40": 0.2, "V100-16": 0.2}, cpu=0.01)
    strategy = stashing(cluster=box("T4", "A100-40", "V100-16"), stages=2)
    stages = dict(trained(strategy))
    assert {name: len(layers) for name, layers in stages.items()} in (
        {"A100-40:1 (emulated)": 3, "V100-16:2 (emulated)": 4},
        {"A100-40:1 (emulated)": 4, "V100-16:2 (emulated)": 3},
    )


@pytest.mark.parametrize(
    ("idle", "said"),
    [
        (1, "T4:1 is not used, as no plan was found that is better with it"),
        (3, "T4:1, T4:2 and T4:3 are not used, as no plan was found that is better with them"),
    ],
)
def test_devices_that_are_of_no_use_are_named(
    idle: int, said: str, measured: Says, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr("lightning_hetpipe.run.first_minibatch.rank_zero_info", told.append)
    measured({"A100-40": 0.5, "T4": 500.0}, cpu=0.01)
    trained(stashing(cluster=box("A100-40", *["T4"] * idle)))
    assert told[0] == "HetPipe: stages on A100-40:0 from net.0; 1 minibatch in flight"
    assert told[1].startswith("because all layers on A100-40 take 3.5 ms for each minibatch; ")
    assert told[1].endswith(f"; {said}")


def test_stages_that_were_asked_for_have_all_the_devices_they_need(measured: Says) -> None:
    """A plan of its own would leave the slow one out."""
    measured({"T4": 0.3, "A100-40": 0.003}, cpu=0.01)
    strategy = stashing(cluster=box("T4", "A100-40"), stages=2)
    assert {name: len(layers) for name, layers in trained(strategy)} == {
        "T4:0 (emulated)": 1,
        "A100-40:1 (emulated)": 6,
    }


def test_one_device_has_one_minibatch_in_flight(measured: Says) -> None:
    """As where one is found: two would make weights stale for nothing."""
    measured({"T4": 0.3}, cpu=0.01)
    strategy = stashing(cluster=box("T4"))
    assert trained(strategy) == [("T4:0 (emulated)", [*LAYERS])]
    assert strategy.last_run.in_flight == 1


class Block(nn.Module):
    """A block that Hugging Face's ``gradient_checkpointing_enable()`` was called for, or not."""

    def __init__(self, checkpoints: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.gradient_checkpointing = checkpoints
        self._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self._gradient_checkpointing_func(self.linear, x) if self.gradient_checkpointing else self.linear(x)
        return y.tanh()


class Checkpointed(models.Learner):
    def __init__(self, checkpoints: bool) -> None:
        super().__init__(SGD)
        self.model = Blocks(checkpoints)

    def compute(self, batch: Batch) -> Outputs:
        return {"loss": self.model(batch[0]).square().mean()}


class Blocks(nn.Module):
    def __init__(self, checkpoints: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(checkpoints) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_gradient_checkpointing_is_planned_as_recompute(measured: Says) -> None:
    """Its plan counted activations that nothing keeps, and left out the forwards that are computed again."""

    def stages(checkpoints: bool, recompute: bool) -> list[tuple[str, list[str], float]]:
        measured({"T4": 0.3}, cpu=0.01)
        strategy = stashing(cluster=box("T4", "T4"), stages=2, in_flight=3, recompute=recompute)
        fit(Checkpointed(checkpoints), vectors(14, 4), strategy=strategy, max_epochs=1)
        return [(stage.device, stage.layers, stage.time_s) for stage in strategy.last_run.stages]

    assert stages(True, False) == stages(False, True) != stages(False, False)


def test_what_does_not_fit_is_refused_with_the_nearest_plan(measured: Says, monkeypatch: pytest.MonkeyPatch) -> None:
    measured(cpu=0.2)
    told: list[str] = []
    monkeypatch.setattr("lightning_hetpipe.placement.planner.rank_zero_info", told.append)
    strategy = stashing(cluster=box(Device("T4", 30 * MIB), Device("T4", 30 * MIB)), in_flight=6)
    said = ["Task does not fit into the memory of its devices: T4:", "; it would fit with in_flight=", " on T4:"]
    assert_refused(mlp(), *said, strategy=strategy, loader=LOADER)
    (table,) = told
    assert "box T4:0" in table
    assert " MiB !" in table


def test_a_model_that_none_of_its_devices_could_hold(measured: Says) -> None:
    """Seven layers with a MiB of weights each, whose first minibatch alone takes 29 MiB."""
    measured(cpu=0.2)
    strategy = stashing(cluster=box(*[Device("T4", 26 * MIB)] * 3), in_flight=2)
    assert sorted(device for device, _ in trained(strategy)) == [f"T4:{number} (emulated)" for number in range(3)]


@pytest.mark.parametrize("with_plan", [False, True])
def test_one_in_flight_takes_what_the_spread_run_would_that_is_emulated(measured: Says, with_plan: bool) -> None:
    """Four layers of a MiB, with gradients, momentum and activations, a MiB to compute; a pipeline has versions."""
    measured({"T4": 0.3}, cpu=0.01)
    small = box(*[Device("T4", 18 * MIB)] * 2)
    plan = planned(0, 3, device="T4", in_flight=1)
    given: dict[str, Any] = {"plan": replace(plan, spread=True)} if with_plan else {"in_flight": 1}
    strategy = HetPipeStrategy(**given, cluster=small)
    assert sorted(len(layers) for _, layers in trained(strategy)) == [3, 4]
    pipeline: dict[str, Any] = {"plan": plan} if with_plan else {"in_flight": 1, "recompute": True}
    strategy = HetPipeStrategy(**pipeline, cluster=small)
    assert_refused(mlp(SGD), "does not fit into the memory of its devices", strategy=strategy, loader=LOADER)


def test_stages_on_several_nodes_need_hosts(measured: Says) -> None:
    """A run said that a node of that name is not there."""
    measured({"T4": 0.3}, cpu=0.01)
    first, second = planned(0, 3, device="T4").virtual_workers[0].stages
    worker = PlannedWorker(10.0, (replace(first, node="other", device="T4:0"), second))
    plan = replace(planned(0, 3, device="T4"), virtual_workers=(worker,))
    said = "has a virtual worker with stages on several nodes (0, on other, box); start this program on each of"
    with refused(said):
        quiet_trainer(HetPipeStrategy(plan=plan))
    both = Cluster([Node("box", ["T4"]), Node("other", ["T4"])])
    assert [device for device, _ in trained(stashing(plan=plan, cluster=both))] == [
        "other T4:0 (emulated)",
        "box T4:0 (emulated)",
    ]


def test_weights_and_gradients_that_the_first_device_cannot_hold() -> None:
    """A device's error for want of memory was all that was said, if it said anything."""
    task: Task = mlp(SGD)
    weights, cpu = sum(parameter.nbytes for parameter in task.parameters()), torch.device("cpu")
    for optimizer, needed in [(torch.optim.SGD(task.parameters()), 2), (_with_state(task), 4)]:
        check_memory(task, optimizer, {cpu: needed * weights})
        with refused("a model is spread over its devices", "of gradients", "4 bytes more", "train fewer weights"):
            check_memory(task, optimizer, {cpu: needed * weights - 4})


def _with_state(task: Task) -> torch.optim.Optimizer:
    """As a run that is resumed has it."""
    optimizer = torch.optim.Adam(task.parameters())
    for parameter in task.parameters():
        moments = {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
        optimizer.state[parameter] = moments
    return optimizer


@pytest.mark.parametrize("where", ["training_step", "on_after_backward"])
def test_memory_that_ends_in_the_first_minibatch_is_explained(where: str) -> None:
    class Large(Task):
        def fail(self) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory.")

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            outputs = super().training_step(batch, batch_idx)
            if where == "training_step":
                self.fail()
            loss: Any = outputs["loss"]  # torch has no types there
            loss.register_hook(lambda gradient: self.fail())
            return outputs

    trainer = quiet_trainer(HetPipeStrategy(stages=2))
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer.fit(Large(mlp().net), LOADER)
    (note,) = caught.value.__notes__
    assert note.startswith("HetPipeStrategy: this was the first minibatch of a fit; before stages are decided")


def test_stages_that_were_asked_for_and_do_not_fit(measured: Says) -> None:
    measured({"T4": 0.3, "A100-40": 0.003}, cpu=0.01)
    strategy = stashing(cluster=box(Device("T4", MIB), "A100-40"), stages=2)
    assert_refused(mlp(), "Task does not fit", "T4:0 lacks", "with stages='auto', or", strategy=strategy, loader=LOADER)


@pytest.mark.parametrize(("memory", "in_flight"), [("1 GiB", 4), (45 * MIB, 3)])
def test_stages_that_share_devices_have_as_many_in_flight_as_have_room(
    memory: int | str, in_flight: int, measured: Says
) -> None:
    """Two of three stages on two devices share one, and what they take together counts."""
    measured({"T4": 0.3}, cpu=0.01)
    strategy = stashing(cluster=box(Device("T4", memory), "T4"), stages=3)
    assert [device for device, _ in trained(strategy)] == [f"T4:{n} (emulated)" for n in (0, 0, 1)]
    first, second, third = strategy._devices.emulation._devices
    assert first == second != third  # whose stages take turns
    assert strategy.last_run.in_flight == in_flight


@pytest.mark.parametrize(("every", "in_flight"), [(1, 1), (2, 2), (8, 4)])
@pytest.mark.parametrize("shared", [True, False])
def test_two_buffers_have_no_more_in_flight_than_there_are_to_a_step(
    shared: bool, every: int, in_flight: int, measured: Says
) -> None:
    measured({"T4": 0.3}, cpu=0.01)
    strategy = HetPipeStrategy(cluster=box("T4", "T4") if shared else None, stages=3, weights="2bw")
    assert len(trained(strategy, every, "2bw")) == 3
    assert strategy.last_run.in_flight == in_flight


def test_stages_that_share_a_device_and_do_not_fit(measured: Says) -> None:
    measured({"T4": 0.3}, cpu=0.01)
    strategy = stashing(cluster=box(Device("T4", 28 * MIB), "T4"), stages=3, in_flight=4)
    assert_refused(mlp(), "Task does not fit", "T4:0 lacks", "fewer in_flight", strategy=strategy, loader=LOADER)


def test_memory_of_a_cpu_may_be_declared(measured: Says) -> None:
    measured(cpu=0.2)
    strategy = stashing(cluster=box(Device("cpu", "1 GiB"), Device("cpu", "1 GiB")))
    assert [device for device, _ in trained(strategy)] == ["cpu:0", "cpu:1"]
    assert not strategy.last_run.emulated


# Found.


def test_devices_that_differ_are_planned_for(measured: Says, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_placement, "discovered_cluster", lambda devices: box("fast", "slow"))
    measured(fast=0.1, slow=0.2)
    told: list[str] = []
    monkeypatch.setattr("lightning_hetpipe.run.first_minibatch.rank_zero_info", told.append)
    stages = trained(stashing(parallel_devices=TWO))
    assert sorted((device, len(layers)) for device, layers in stages) == [("cpu", 5), ("cpu:0", 2)]
    what, why = told
    assert what.startswith("HetPipe: stages on ")
    assert "fast:0 from net." in what
    assert why.startswith("because stage ")


@pytest.mark.parametrize(
    ("asked", "minibatches", "why"),
    [
        (
            "auto",
            "3 minibatches in flight, so gradients up to 2 minibatches stale",
            "one more in flight than there are stages keeps all of them busy",
        ),
        (1, "1 minibatch in flight", "in_flight=1 was asked for"),
        ("2bw", "1 minibatch in flight", "weights='2bw' allows no more with accumulate_grad_batches=1"),
    ],
)
def test_equal_devices_are_told_of_in_two_lines(
    asked: Any, minibatches: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A given Nm was not told to the user, although the cuts were decided all the same."""
    told: list[str] = []
    monkeypatch.setattr("lightning_hetpipe.run.first_minibatch.rank_zero_info", told.append)
    policy = {"weights": asked} if asked == "2bw" else {"in_flight": asked}
    trained(stashing(stages=2, recompute=asked == 1, **policy))
    assert len(told) == 2
    assert told[0].startswith("HetPipe: stages on cpu:0 from net.0, cpu:0 from net.")
    assert told[0].endswith(f"; {minibatches}")
    assert told[1].endswith(f" ms for a minibatch), and {why}")


def test_what_is_told_of_several_virtual_workers_is_what_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """One was told its own k + 1, and had another's."""
    told: list[str] = []
    monkeypatch.setattr("lightning_hetpipe.run.first_minibatch.rank_zero_info", told.append)
    monkeypatch.setattr(NoSynchroniser, "agree", lambda self, in_flight, weights, every: (in_flight + 2, weights))
    strategy = stashing(stages=2)
    trained(strategy)
    assert strategy.last_run.in_flight == 5
    assert [line.partition(",")[0] for line in told[2:]] == ["but 5 minibatches in flight"]


def test_the_last_stage_may_lie_elsewhere_than_the_module_did(measured: Says, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules that are no layers go there with the loss, and so do batches that are fetched later."""
    monkeypatch.setattr(device_placement, "discovered_cluster", lambda devices: box(Device("fast"), Device("useless")))
    measured(fast=0.01, useless=10.0)

    class Seen(Task):
        def __init__(self) -> None:
            super().__init__(mlp().net)
            self.seen: list[tuple[torch.device, torch.device]] = []

        def compute(self, batch: Any) -> Any:
            self.seen.append((self.device, self.trainer.strategy.root_device))
            return super().compute(batch)

    task = Seen()
    fit(task, LOADER, strategy=stashing(parallel_devices=TWO, in_flight=2), max_epochs=1)
    assert task.seen == [(TWO[1], TWO[1]), *[(TWO[0], TWO[0])] * (len(LOADER) - 1)]
