"""Plan, stages and devices of this virtual worker, before it is decided which layers are on which stage."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Literal

import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.trainer.states import TrainerFn

from lightning_hetpipe.emulation import Emulation
from lightning_hetpipe.launch.node_hosts import ServingNodes
from lightning_hetpipe.launch.ranks import Role, count_nodes, devices_of
from lightning_hetpipe.placement import progress
from lightning_hetpipe.placement.device_placement import DevicePlacement
from lightning_hetpipe.placement.layout import place
from lightning_hetpipe.placement.planner import Planner
from lightning_hetpipe.placement.spread import spread
from lightning_hetpipe.planning.plan.document import Plan
from lightning_hetpipe.planning.plan.profile_file import ProfileCache
from lightning_hetpipe.planning.search.split_points import partition
from lightning_hetpipe.planning.search.spread_plan import FROZEN
from lightning_hetpipe.run.run_settings import trains_frozen_later
from lightning_hetpipe.strategy import compile_setting, host_setting, relations
from lightning_hetpipe.strategy.shared_checkpoints import SharedCheckpoints
from lightning_hetpipe.workers.weight_copies import copies_kept


class PlannedDevices(SharedCheckpoints):
    """Finds the devices of this virtual worker's stages: the Trainer's, those of a cluster, or those of a plan.

    Args:
        given: Settings of ``HetPipeStrategy``.
        arguments: Lightning's.

    Raises:
        SettingError: for settings that contradict each other, or the plan.
    """

    stage_hosts: host_setting.StageHosts

    def __init__(self, given: SimpleNamespace, **arguments: Any) -> None:
        super().__init__(given, **arguments)
        self.plan = relations.plan(given.plan)
        workers = relations.most_workers(self.virtual_workers)
        workers = workers if self.plan is None else len(self.plan.virtual_workers)
        relations.check_platform(workers, sys.platform)
        self.split: dict[int, tuple[float, ...]] | Literal["auto"] = "auto"
        if given.split is False or isinstance(given.split, Mapping):
            self.split = {int(stage): tuple(map(float, own)) for stage, own in (given.split or {}).items()}
        if self.split and self.split != "auto" and given.stages == "auto" and self.plan is None:
            given.stages = 1 + max(self.split)
        self._stages = relations.stage_counts(given.stages, workers)
        self.in_flight, self.cluster, self.recompute = given.in_flight, given.cluster, given.recompute
        self.compile = compile_setting.options(given.compile)
        self._plan_name = f"<for {given.plan.model}>" if isinstance(given.plan, Plan) else str(given.plan)
        if self.plan is not None:
            self._stages = relations.stages_as_planned(self._stages, self.plan)
            self.in_flight = relations.as_planned("in_flight", self.in_flight, self.plan.in_flight)
            self.recompute |= self.plan.recompute
        elif self.cluster is not None:
            relations.check_cluster(relations.most_workers(self.virtual_workers))
        relations.check_given(given, self.plan, self._has_groups)
        self._emulation = Emulation(())

    @property
    def _has_groups(self) -> bool:
        workers = () if self.plan is None else self.plan.virtual_workers
        return bool(self.split) or any(stage.group for worker in workers for stage in worker.stages)

    @property
    def stages(self) -> int | Literal["auto"]:
        """k of this virtual worker."""
        return relations.stages_of(self._stages, self._rank)

    def _configure_launcher(self) -> None:
        if self._rank.role is not Role.HOST:
            relations.stages_of(self._stages, self._rank)  # if refused, then before anything is started
        if self.cluster is not None and self.plan is None:
            relations.check_cluster(self.world_size)
        super()._configure_launcher()

    def model_to_device(self) -> None:
        """Spreads the model over the devices of provisional stages."""
        module = self.lightning_module
        assert module is not None
        devices = self._provisional_devices()
        room, trainer = self._placement().room(devices), module.trainer
        frozen = FROZEN if trainer.state.fn == TrainerFn.FITTING and not trains_frozen_later(trainer) else 1
        if (plan := self._own_plan) is not None and plan.spread:
            room, frozen = [max(1.0, stage.weights_bytes) for stage in plan.virtual_workers[0].stages], 1
        spread(module, devices, room, frozen=frozen)

    # What the plan says.

    def _planned_workers(self) -> list[int]:
        if self.plan is None:
            return []
        is_emulated, nodes = self._is_emulated_here, self._nodes_started
        return relations.workers_as_planned(self.virtual_workers, self.plan, is_emulated, self.stage_hosts, nodes)

    def _serving_nodes(self) -> ServingNodes | None:
        return host_setting.serving_nodes(self.plan, self._is_emulated_here, self.stage_hosts)

    @property
    def _nodes_started(self) -> int:
        return count_nodes(self._num_nodes, self.cluster_environment or LightningEnvironment())

    @property
    def _is_emulated_here(self) -> bool:
        """True if all devices of the plan are emulated on this machine, whatever their nodes."""
        return self.cluster is not None and self._nodes_started == 1 and self._is_on_cpu

    @property
    def _own_plan(self) -> Plan | None:
        return None if self.plan is None else self.plan.of_worker(self.global_rank)

    def _choose_split_points(self, times: Sequence[float], stages: int) -> tuple[int, ...]:
        """Give the first layer of each stage; tests put their own in its place."""
        plan = self._own_plan
        if plan is not None and len(times) == len(plan.layers):  # evaluation outside of a fit
            return tuple(stage.first_layer for stage in plan.virtual_workers[0].stages)
        return partition(times, stages)

    # Devices.

    @property
    def _is_on_cpu(self) -> bool:
        return all(device.type == "cpu" for device in self.parallel_devices or ())

    def _found_devices(self) -> list[torch.device]:
        """Those of the Trainer's devices that are this virtual worker's; with a plan all, as that says which are."""
        rank, found = self._rank, self.parallel_devices or [torch.device("cpu")]
        return found if self.plan is not None else devices_of(found, rank.local, rank.per_node)

    def _placement(self) -> DevicePlacement:
        plan, cluster = self._own_plan, self.cluster
        if plan is not None and cluster is not None and not self._is_on_cpu:
            cluster = cluster.of_nodes(plan.virtual_workers[0].nodes)
        return DevicePlacement.of(cluster, self._found_devices(), plan)

    def _devices(self) -> list[torch.device]:
        """Devices that stages may lie on, in the plan's order if there is one."""
        if self.plan is None and self.cluster is None:
            return self._found_devices()
        placement, plan = self._placement(), self._own_plan
        return list(placement.devices) if plan is None else placement.planned(plan)

    def _provisional_devices(self) -> list[torch.device]:
        """Devices of the stages that the model is spread over until it is decided which layers are on which stage."""
        devices = self._devices()
        if self.stages == "auto" or self.plan is not None:
            return devices
        if self._group is None and not (placement := self._placement()).is_even and self.stages < len(devices):
            devices = placement.roomiest(self.stages)
        return place(self.stages, devices)

    def _planner(self) -> Planner:
        """Planner of a fit that begins; what it decides to emulate is told to ``_emulation``, which is new then."""
        placement = self._placement()
        even = self.plan is None and self.cluster is None and self.split != "auto"
        even = even and (bool(self.split) or placement.is_even or self._group is not None)
        assert self.lightning_module is not None
        self._emulation = Emulation(())
        trainer = self.lightning_module.trainer
        return Planner(
            placement,
            type(self.lightning_module).__name__,
            str(self.precision_plugin.precision),
            self.stages,
            self.in_flight,
            self.recompute,
            self._own_plan,
            self._plan_name,
            self._emulation,
            ProfileCache(),
            progress.of_trainer(trainer),
            even,
            self._choose_split_points,
            bool(trainer.loggers),
            trainer.accumulate_grad_batches,
            self.world_size == 1 and self.compile is None,
            0.0 if self._group is None else copies_kept(self._group.settings.update_dtype),
            split=self.split,
        )
