"""Plan, stages and devices of this virtual worker, until it is decided which layers are on which stage.

The settings ``stage_hosts`` and ``compile`` are checked here, because both need the devices of stages.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn

from lightning_hetpipe.emulation import Emulation
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.launch.ranks import Role, devices_of
from lightning_hetpipe.pipeline.memory import held
from lightning_hetpipe.placement import progress
from lightning_hetpipe.placement.device_placement import DevicePlacement
from lightning_hetpipe.placement.layout import place
from lightning_hetpipe.placement.planner import Planner
from lightning_hetpipe.placement.spread import spread
from lightning_hetpipe.planning.model.units import in_bytes
from lightning_hetpipe.planning.plan.document import Plan
from lightning_hetpipe.planning.plan.profile_file import ProfileCache
from lightning_hetpipe.planning.search.split_points import FROZEN, partition
from lightning_hetpipe.rules.versions import POLICIES, STASH
from lightning_hetpipe.run.around_step import Correction
from lightning_hetpipe.run.run_settings import RunSettings, StageElsewhere, trains_frozen_later
from lightning_hetpipe.run.stale_gradients import automatic_policy, is_clipped
from lightning_hetpipe.strategy import relations
from lightning_hetpipe.strategy.virtual_workers import VirtualWorkers
from lightning_hetpipe.torch_private.graphs import cpp_compiler_error, inductor_modes, inductor_options_error
from lightning_hetpipe.workers.weight_copies import copies_kept

_INDUCTOR = "inductor"


class PlannedDevices:
    """Devices of this virtual worker's stages, from the Trainer, a cluster or a plan. The constructor raises
    SettingError if settings contradict each other or the plan."""

    def __init__(self, given: SimpleNamespace, workers: VirtualWorkers) -> None:
        self.workers, plan = workers, workers.plan
        count = relations.most_workers(workers.asked) if plan is None else len(plan.virtual_workers)
        relations.check_platform(count, sys.platform)
        self.split: dict[int, tuple[float, ...]] | Literal["auto"] = "auto"
        if given.split is False or isinstance(given.split, Mapping):
            self.split = {int(stage): tuple(map(float, own)) for stage, own in (given.split or {}).items()}
        if self.split and self.split != "auto" and given.stages == "auto" and plan is None:
            given.stages = 1 + max(self.split)
        self._stages = relations.stage_counts(given.stages, count)
        if self.split != "auto":
            relations.check_split(self.split, self._stages)
        self.in_flight, self.recompute = given.in_flight, given.recompute
        self.compile = compile_options(given.compile)
        self.plan_name = f"<for {given.plan.model}>" if isinstance(given.plan, Plan) else str(given.plan)
        if plan is not None:
            self._stages = relations.stages_as_planned(self._stages, plan)
            self.in_flight = relations.as_planned("in_flight", self.in_flight, plan.in_flight)
            self.recompute |= plan.recompute
        elif workers.cluster is not None:
            relations.check_cluster(relations.most_workers(workers.asked))
        relations.check_given(given, plan, self.has_groups)
        self.emulation = Emulation(())

    @property
    def has_groups(self) -> bool:
        """True if a stage lies, or may lie, on several devices."""
        workers = () if self.workers.plan is None else self.workers.plan.virtual_workers
        return bool(self.split) or any(stage.group for worker in workers for stage in worker.stages)

    @property
    def stages(self) -> int | Literal["auto"]:
        """k of this virtual worker."""
        return relations.stages_of(self._stages, self.workers.rank)

    @property
    def own_plan(self) -> Plan | None:
        return None if self.workers.plan is None else self.workers.plan.of_worker(self.workers.rank.index)

    def check(self) -> None:
        """Refuse settings that contradict the number of virtual workers, before any virtual worker is started."""
        if self.workers.rank.role is not Role.HOST:
            relations.stages_of(self._stages, self.workers.rank)
        if self.workers.cluster is not None and self.workers.plan is None:
            relations.check_cluster(self.workers.rank.size)

    def choose_split_points(self, times: Sequence[float], stages: int) -> tuple[int, ...]:
        """Return the first layer of each stage, given the layers' seconds and k."""
        plan = self.own_plan
        if plan is not None and len(times) == len(plan.layers):  # evaluation outside of a fit
            return tuple(stage.first_layer for stage in plan.virtual_workers[0].stages)
        return partition(times, stages)

    # Devices.

    def found(self) -> Sequence[torch.device]:
        """Return the devices of this virtual worker. With a plan, return all devices: the plan selects among them."""
        rank, found = self.workers.rank, self.workers.devices
        return found if self.workers.plan is not None else devices_of(found, rank.local, rank.per_node)

    def placement(self) -> DevicePlacement:
        plan, cluster = self.own_plan, self.workers.cluster
        if plan is not None and cluster is not None and not self.workers.is_on_cpu:
            cluster = cluster.of_nodes(plan.virtual_workers[0].nodes)
        return DevicePlacement.of(cluster, self.found(), plan)

    def usable(self) -> Sequence[torch.device]:
        """Return the devices that stages may lie on, in the plan's order if there is a plan."""
        if self.workers.plan is None and self.workers.cluster is None:
            return self.found()
        placement, plan = self.placement(), self.own_plan
        return placement.devices if plan is None else placement.planned(plan)

    def provisional(self) -> Sequence[torch.device]:
        """Return the devices of provisional stages, over which the model is spread until layers have stages."""
        devices = self.usable()
        if self.stages == "auto" or self.workers.plan is not None:
            return devices
        if self.workers.group is None and not (placement := self.placement()).is_even and self.stages < len(devices):
            devices = placement.roomiest(self.stages)
        return place(self.stages, devices)

    def spread(self, module: L.LightningModule) -> None:
        """Move ``module`` to the devices of provisional stages."""
        devices = self.provisional()
        room, trainer = self.placement().room(devices), module.trainer
        frozen = FROZEN if trainer.state.fn == TrainerFn.FITTING and not trains_frozen_later(trainer) else 1
        if (plan := self.own_plan) is not None and plan.spread:
            room, frozen = [max(1.0, stage.weights_bytes) for stage in plan.virtual_workers[0].stages], 1
        spread(module, devices, room, frozen=frozen)

    def held(
        self, trained: L.LightningModule | None, wanted: RunSettings | None, stages: Sequence[torch.device]
    ) -> str:
        """Return the end of a note: what the stages' devices hold, and what was planned for them."""
        if trained is None or wanted is None:
            return ""
        stages = stages or wanted.spread
        planned = {device: f"it has {in_bytes(limit)}" for device, limit in wanted.memory.items()}
        if (plan := self.own_plan) is not None and plan.spread:
            own = zip(stages, plan.virtual_workers[0].stages, strict=False)
            planned |= {device: f"the plan has {in_bytes(stage.memory_bytes)} for it" for device, stage in own}
        return held(trained, trained.trainer.optimizers, stages, planned)

    def with_policy(self, wanted: RunSettings, trainer: L.Trainer, weights: str, rates: object) -> RunSettings:
        """Add the weight policy and the correction of learning rates. Choose by the optimizer what is not given."""
        plan, correction = self.workers.plan, Correction(rates) if isinstance(rates, int) else None
        if weights in POLICIES:
            return replace(wanted, weights=(POLICIES[weights],), lr_correction=correction)
        chosen = automatic_policy(trainer.optimizers[0], clipped=is_clipped(trainer))
        if plan is not None:
            chosen = chosen.planned(plan.versions.policy, f"plan={self.plan_name} is for it")
        if rates != "auto":
            chosen = replace(chosen, lr_correction=correction)
        policies = dict.fromkeys([chosen.policy, STASH] if plan is None else [chosen.policy])
        return replace(wanted, weights=tuple(policies), lr_correction=chosen.lr_correction, automatic=chosen)

    def asked(self, trained: L.LightningModule, precision: str, **own: Any) -> RunSettings:
        """Make the settings of a run of the module ``trained``: settings of devices, and the strategy's ``own``."""
        found, plan = self.workers.find_hosts(), self.own_plan
        planner, rank = self._planner(trained, precision), self.workers.rank
        placement, hosts = planner.placement, self.workers.hosts if found is None else found.hosts
        own["before_pass"] = own["before_pass"] or (self.emulation if placement.emulated else None)
        return RunSettings(
            stages=self.stages,
            in_flight=self.in_flight,
            devices=self.usable(),
            choose_split_points=self.choose_split_points,
            decide=planner,
            planned=placement.emulated or (plan is not None and not plan.spread),
            chosen=self.in_flight == "auto" and not planner.even and len(placement.devices) > 1,
            spread=self.provisional(),
            memory={} if plan is not None and plan.spread else placement.limits,
            recompute=self.recompute,
            compile=self.compile,
            virtual_worker=rank.index,
            virtual_workers=rank.size,
            elsewhere=stages_elsewhere(plan, hosts, placement.emulated),
            has_groups=self.has_groups,
            waited_in=self.workers.waited_in,
            security=self.workers.settings().security.from_environment(),
            **own,
        )

    def _planner(self, module: L.LightningModule, precision: str) -> Planner:
        """Make the planner of a fit of ``module``, with a new :attr:`emulation`."""
        placement, group, trainer = self.placement(), self.workers.group, module.trainer
        even = self.workers.plan is None and self.workers.cluster is None and self.split != "auto"
        self.emulation = Emulation(())
        return Planner(
            placement=placement,
            model=type(module).__name__,
            precision=precision,
            stages=self.stages,
            in_flight=self.in_flight,
            recompute=self.recompute,
            plan=self.own_plan,
            plan_name=self.plan_name,
            emulation=self.emulation,
            cache=ProfileCache(),
            bar=progress.of_trainer(trainer),
            even=even and (bool(self.split) or placement.is_even or group is not None),
            choose_split_points=self.choose_split_points,
            reported=bool(trainer.loggers),
            every=trainer.accumulate_grad_batches,
            spread=self.workers.rank.size == 1 and self.compile is None,
            copies=0.0 if group is None else copies_kept(group.settings.update_dtype),
            split=self.split,
        )


def stages_elsewhere(plan: Plan | None, hosts: relations.StageHosts, emulated: bool) -> dict[int, StageElsewhere]:
    """Return, by number, the stages of one virtual worker that are not on the node of its last stage.

    If devices are ``emulated``, stages of nodes without a host stay in this process, and hosts use their CPUs. Raise
    SettingError if there are hosts, but no plan.
    """
    if hosts is None:
        return {}
    if plan is None:
        raise SettingError(
            f"stage_hosts={dict(hosts)!r} names hosts for the nodes of a plan, and there is none; give plan, too"
        )
    found, (worker,) = dict[int, StageElsewhere](), plan.virtual_workers
    for number, stage in enumerate(worker.stages):
        if stage.node != worker.leader and (not emulated or stage.node in hosts):
            devices = [] if emulated or stage.device_name == "cpu" else [stage, *stage.group]
            accelerators = [(each.device_number, each.device_name) for each in devices]
            found[number] = StageElsewhere(hosts[stage.node], stage.node, accelerators)
    return found


def compile_options(value: bool | str | Mapping[str, Any]) -> dict[str, Any] | None:
    """Return torch.compile's arguments for ``compile=value``, or None to compile nothing."""
    if isinstance(value, bool):
        return {} if value else None
    if isinstance(value, str):
        return {"backend": value}
    return {name: dict(given) if isinstance(given, Mapping) else given for name, given in value.items()}


def check_compile(options: Mapping[str, Any], devices: Sequence[torch.device]) -> None:
    """Refuse arguments that torch.compile would refuse in the middle of training, and CUDA graphs."""
    backend, mode, further = options.get("backend", _INDUCTOR), options.get("mode"), options.get("options")
    if not callable(backend) and backend not in (known := torch.compiler.list_backends(exclude_tags=())):
        raise SettingError(
            f"compile={backend!r} is no backend of torch.compile here; name one of {', '.join(sorted(known))}, or set"
            " compile=True"
        )
    if options.get("dynamic") not in (None, True, False):
        raise SettingError(f"compile's dynamic={options['dynamic']!r} must be True, False or None")
    if further is not None and not isinstance(further, Mapping):
        raise SettingError(f"compile's options={further!r} must be a dictionary")
    if backend == "cudagraphs":
        raise _cuda_graphs(options)
    if backend != _INDUCTOR:
        if mode is not None:
            raise SettingError(f"compile's mode={mode!r} is inductor's, and the backend is {backend!r}; leave it out")
        return
    modes = inductor_modes()
    if mode is not None and mode not in modes:
        raise SettingError(f"compile's mode={mode!r} is none of torch.compile's; set one of {', '.join(modes)}")
    if {**modes.get(mode or "default", {}), **(further or {})}.get("triton.cudagraphs"):
        raise _cuda_graphs(options)
    if further and (reason := inductor_options_error(further)) is not None:
        raise SettingError(
            f"compile's options={dict(further)!r} are not inductor's: {reason}; leave that out, or give one that"
            " torch._inductor.list_options() names"
        )
    if any(device.type == "cpu" for device in devices) and (reason := cpp_compiler_error()) is not None:
        raise SettingError(
            f"compile=True needs a C++ compiler for stages on the CPU, and torch finds none ({reason}); install g++,"
            " name one in the environment variable CXX, or leave compile out"
        )


def _cuda_graphs(options: Mapping[str, Any]) -> SettingError:
    return SettingError(
        f"compile={dict(options)!r} uses CUDA graphs, whose results the next minibatch overwrites, and a pipeline has"
        " several in flight; set mode='max-autotune-no-cudagraphs', or leave it out"
    )
