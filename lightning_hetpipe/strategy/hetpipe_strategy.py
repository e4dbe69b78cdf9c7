"""The strategy: what Lightning sees of the pipeline."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

import lightning as L
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from lightning_hetpipe.capture.piece_search import CAPTURE_TIMEOUT
from lightning_hetpipe.lightning_private import (
    average_on_host,
    evaluating_loop,
    synchronises_batchnorm,
    wants_several_optimizers,
)
from lightning_hetpipe.pipeline.out_of_memory import explain, held
from lightning_hetpipe.pipeline.recorder import Window
from lightning_hetpipe.pipeline.stage import BeforePass
from lightning_hetpipe.pipeline.user.batch_in_flight import current
from lightning_hetpipe.pipeline.user.minibatch import Minibatch
from lightning_hetpipe.placement import emulated_speeds
from lightning_hetpipe.planning.allocation.groupings import ALLOCATIONS
from lightning_hetpipe.planning.model.cluster import Cluster
from lightning_hetpipe.planning.model.units import in_bytes
from lightning_hetpipe.planning.plan.document import Plan
from lightning_hetpipe.reporting.report import RunReport
from lightning_hetpipe.rules.channel_layouts import is_share
from lightning_hetpipe.rules.versions import POLICIES, STASH
from lightning_hetpipe.run import run_settings, together
from lightning_hetpipe.run.around_step import Correction
from lightning_hetpipe.run.automatic import automatic_policy
from lightning_hetpipe.run.evaluation import Evaluation
from lightning_hetpipe.run.fit import Fit
from lightning_hetpipe.run.look_ahead import ReadyBatch
from lightning_hetpipe.run.staleness_warning import is_clipped
from lightning_hetpipe.run.trainer_run import TrainerRun
from lightning_hetpipe.server.protocol.identifiers import MOST_VIRTUAL_WORKERS
from lightning_hetpipe.settings import MOST, Bounds, Choices, Duration, Length, read, seconds
from lightning_hetpipe.strategy import compile_setting, host_setting, relations
from lightning_hetpipe.strategy.planned_devices import PlannedDevices
from lightning_hetpipe.strategy.relations import Count
from lightning_hetpipe.strategy.saved_states import note_in_flight, note_last_changes, take_in_flight, take_last_changes
from lightning_hetpipe.strategy.wsp_callback import Address, WSPCallback

LONGEST = 2000
"""Minibatches of a timeline: their trace has some 20 MB, the most that a viewer opens at ease."""

_WINDOW = f"the first and the last minibatch to keep, counted from 1, at most {LONGEST}, such as (100, 120)"


def _is_range(value: Sequence[int]) -> bool:
    return len(value) == 2 and 1 <= value[0] <= value[1] <= MOST_VIRTUAL_WORKERS


def _is_window(value: Sequence[int]) -> bool:
    return len(value) == 2 and 1 <= value[0] <= value[1] < value[0] + LONGEST


def _is_stage(value: Any) -> bool:
    return str(value).isdecimal()


def _are_shares(value: Sequence[float]) -> bool:
    return all(map(is_share, value)) and any(value)


StageNumber = Annotated[int | str, _is_stage, "the number of a stage, from 0 on"]
"""Key of ``split``; configurations have text as keys."""
StageShares = Annotated[
    Sequence[float],
    Length(2),
    _are_shares,
    "a share for each of at least two devices, 0 or more, such as [2, 1], of which the first device has the unsplit"
    " weights",
]


class HetPipeStrategy(PlannedDevices):
    """Trains one LightningModule as a pipeline over devices that need not match, exactly.

    Minibatch p computes its loss and its gradients on the weights after minibatch p - Nm, on every stage (HetPipe, Park
    et al., USENIX ATC 2020, section 4: weight stashing). A run is deterministic, whatever the threads' timing.

    Args:
        stages: k, the number of stages. "auto" makes one stage for each device. If devices differ, it uses the devices
            that make the run faster. On a CPU there may be more stages than devices. A list is for each virtual worker
            of a node, or of all nodes.
        in_flight: Nm, minibatches in the pipeline at once. "auto" takes k + 1, and 1 for one stage; with weights="2bw"
            at most ``accumulate_grad_batches``; if devices differ, what is planned (docs/planning.md#what-it-decides).
            Each stage holds Nm copies of its trained weights. Gradients are up to Nm - 1 steps stale, which asks for
            lower learning rates (docs/staleness.md).
        virtual_workers: Virtual workers on each machine (docs/virtual-workers.md). Each is a process, which ``fit``
            starts. The machine's devices are divided among them in order. Leave it out if torchrun, SLURM or the like
            starts the processes. A pair is the number with which a run begins, on all machines, and the largest number:
            others come, go and come back between epochs (docs/virtual-workers.md#a-minimum-and-a-maximum).
        weights: Weight policy: the weights that a minibatch in flight computes on (docs/staleness.md#weight-policies).
            "auto" predicts weights if there is a rule for the optimizer and room for the prediction, and stashes
            otherwise. A line at the start of a fit names the choice.
        module: Modules to pipeline; by default all modules with trainable parameters that ``training_step`` calls.
        plan: Plan to follow (docs/planning.md), as ``hetpipe-plan`` saves it: its stages on its devices, its number in
            flight and its weight policy; and its virtual workers, with their clock distance, waves and placement of
            parameters, unless the WSPCallback sets them. If the plan has several machines, start one command on each
            machine: ``NODE_RANK=0`` on the node of virtual worker 0's last stage, then by the order of virtual workers.
            Without a plan, if devices differ, a fit measures the layers and plans the order of devices, the split
            points, k and Nm. Of these only Nm changes results (law L1). Measurements are kept on disk, so that later
            runs decide alike; ``in_flight`` or ``plan`` fixes Nm.
        cluster: Devices by name, with their memory, speeds and links. On a CPU, devices that are not here are
            *emulated*: a stage takes as long as it would there. Several virtual workers need a ``plan`` as well, and
            emulated ones all run on this machine.
        allocation: Rule by which virtual workers got their devices (docs/planning.md#several-virtual-workers), for
            ``hetpipe-plan``. A run refuses a ``plan`` of another allocation; "auto" takes any.
        compile: Run the layers of stages compiled by ``torch.compile``: True for inductor, which needs a C++ compiler
            for stages on a CPU. Each stage is compiled in its first minibatch, once for all versions of its weights,
            and again for other kinds of inputs. Dropout draws the numbers that it draws uncompiled. A layer that torch
            cannot compile, or that draws otherwise, runs uncompiled, with a warning; so do evaluation, the first
            minibatch of a fit, and what a group (``split``) leaves whole. A run repeats bit for bit, but inductor
            rounds otherwise than torch's operators. A weight that only reaches outputs which the loss leaves out gets a
            gradient of zeros instead of none.
        recompute: Keep only the inputs of a stage, and compute its forward again for its backward: less memory for more
            time, the same results bit for bit. The last stage has nothing to gain, and computes once.
        split: Layers of a stage on several devices, each of which computes some of their output channels
            (docs/split-layers.md). The first device of a stage holds the unsplit weights. ``stages`` is by default as
            many as are named. "auto", or True, joins devices if the plan that is made at the start of a fit is faster
            with it (docs/planning.md#groups-of-devices).
        timeline: Record what each stage did when (docs/timeline.md): True for the last hundred minibatches. The
            timeline is in ``last_run.timeline``, in the run's folder as a Chrome trace, and on TensorBoard.
        stage_hosts: Hosts for a ``plan`` whose virtual workers have stages on several machines
            (docs/several-machines.md#a-virtual-worker-over-several-machines), but for the node of the last stage, on
            which this program runs. Results are the same, bit for bit. Without it, the program is started on each
            machine of the plan. Not with ``compile`` or ``timeline`` yet. Settings of torch for the process, such as
            ``torch.set_float32_matmul_precision``, reach hosts as they are when a fit begins.
        lr_correction: K, the number of updates at the beginning with a lower learning rate
            (docs/staleness.md#weight-policies): update t steps with the rate divided by tau^(1 - t / K), where tau is
            one more than the number of optimizer steps that minibatches miss (PipeMare, 2021, T1). Schedulers, loggers
            and checkpoints see the user's rate. "auto" corrects rates only if weights="auto" does.
        wsp: Synchronisation of virtual workers; by default the WSPCallback among the Trainer's callbacks, or one with
            its defaults.
        timeout: Longest wait inside the pipeline while nothing moves; then the run ends with an error that says who
            waited for whom. The time of user code does not count. Other virtual workers, while they live, are waited
            for an hour, or for this time if it is longer. Servers may be silent for this time.
        capture_timeout: Time to take apart modules that ``torch.export`` refuses as a whole, at the start of a fit
            (docs/exactness.md): the outermost calls in them that can be captured are pipelined. What has not been tried
            by then runs as user code.
        grace: Time from the order to end (SIGTERM) until the run is killed (docs/preemption.md). If saving is known to
            take longer, one line says so.
        accelerator: As ``ParallelStrategy``'s.
        parallel_devices: As ``ParallelStrategy``'s.
        cluster_environment: As ``ParallelStrategy``'s.
        checkpoint_io: As ``ParallelStrategy``'s.
        precision_plugin: As ``ParallelStrategy``'s.

    Attributes:
        last_run: Report of the last ``fit``, once it has ended; ``print`` shows it as a table. Before that, and where a
            fit has ended in its first minibatch, it has no stages, and says so.

    Raises:
        SettingError: one sentence that names the setting, its value and the way out.
    """

    strategy_name = "hetpipe"

    def __init__(
        self,
        stages: Count | Annotated[Sequence[Count], "a list with one for each virtual worker"] = "auto",
        in_flight: Count = "auto",
        virtual_workers: Annotated[int, Bounds(1, MOST_VIRTUAL_WORKERS)]
        | Annotated[Sequence[int], _is_range, "the fewest and the most of them, as (1, 3)"] = 1,
        weights: Annotated[str, Choices(("auto", *POLICIES))] = "auto",
        module: Annotated[str, "the name of a module"]
        | Annotated[Sequence[str], Length(1), "a list of names"]
        | None = None,
        plan: Plan | Annotated[str | os.PathLike[str], "the path of one"] | None = None,
        cluster: Cluster | None = None,
        allocation: Annotated[str, Choices(ALLOCATIONS)] = "auto",
        compile: bool | compile_setting.Backend | compile_setting.Options = False,
        recompute: bool = False,
        split: bool
        | Literal["auto"]
        | Annotated[
            Mapping[StageNumber, StageShares], Length(1), "the shares of each stage on several devices, as {0: [2, 1]}"
        ] = False,
        timeline: bool | Annotated[Sequence[int], _is_window, _WINDOW] = False,
        stage_hosts: Annotated[
            Mapping[Any, Address],
            Length(1),
            "the address of a host for each node of a plan, such as {'attic': '10.0.0.2:7071'}",
        ]
        | None = None,
        lr_correction: Annotated[int, Bounds(1, MOST)] | Literal["auto"] | None = "auto",
        wsp: WSPCallback | None = None,
        timeout: Duration = timedelta(minutes=5),
        capture_timeout: Duration = CAPTURE_TIMEOUT,
        grace: Duration = timedelta(seconds=30),
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        given = read(HetPipeStrategy, locals())
        super().__init__(
            given,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self.weights, self.lr_correction = weights, lr_correction
        self._policy = POLICIES.get(weights)
        self.module = [module] if isinstance(module, str) else module and [*module]
        self.capture_timeout, self.grace = seconds(capture_timeout), seconds(grace)
        self._timeline = None if timeline is False else Window()
        if not isinstance(timeline, bool):
            first, last = timeline
            self._timeline = Window(first, last, LONGEST)
        self.stage_hosts = stage_hosts and {str(node): address for node, address in stage_hosts.items()}
        self.last_run = RunReport()
        self._run = TrainerRun()
        self._wanted: run_settings.RunSettings | None = None
        self._before_pass: BeforePass | None = None
        self._asked_in_flight = in_flight != "auto"
        self._resumed: int | None = None  # Nm of the checkpoint that is loaded
        self._resumed_changes: list[torch.Tensor | None] = []  # what its last step has changed
        self._undo = ExitStack()

    # The process, and its device for Lightning.

    @property
    def root_device(self) -> torch.device:
        """The last stage's device; until stages are decided, that of the last provisional stage."""
        spread = self._provisional_devices() if self._wanted is None else self._wanted.spread
        return (self._run.devices or spread)[-1]

    # The life of a run.

    def setup_environment(self) -> None:
        """Meet the other virtual workers; keep averages of weights where there is room for the whole model."""
        super().setup_environment()
        if len(set(self._provisional_devices())) > 1:
            assert self.lightning_module is not None
            self._undo.callback(average_on_host(self.lightning_module.trainer))

    def setup(self, trainer: L.Trainer) -> None:
        """Checks what is to be trained, and prepares a fit."""
        fitting = trainer.state.fn == TrainerFn.FITTING
        self._wanted = wanted = self._fit_settings()
        if fitting:
            run_settings.check_batchnorm(synchronises_batchnorm(self))
            if not wanted.is_spread:
                run_settings.check_module(trainer.lightning_module, wanted.way_out)
                run_settings.check_precision(self.precision_plugin)
            if self._group is not None:
                together.check_together(trainer)
            if wanted.is_spread:
                relations.refuse_spread(self.stage_hosts)
            if self.compile is not None:
                compile_setting.check(self.compile, self._devices())
        self._divide(trainer)
        super().setup(trainer)
        if fitting and not wanted.is_spread:
            self._wanted = wanted = self._with_policy(wanted)
        seed, self._resumed = self.run_seed, None
        if not fitting:
            loop, wanted = evaluating_loop(trainer), replace(wanted, before_pass=self._before_pass)
            self._run = Evaluation(trainer, loop, self.precision_plugin, wanted, seed)
        else:
            if wanted.is_spread:
                run_settings.check_resumed(wanted.resumed, 1)
            synchroniser = self._synchroniser(trainer)
            self._run = Fit(trainer, self.precision_plugin, wanted, seed, synchroniser, self._take_report)
        self._run.open()

    def setup_optimizers(self, trainer: L.Trainer) -> None:
        assert self._wanted is not None
        wanted = self._wanted
        try:
            super().setup_optimizers(trainer)
        except RuntimeError as error:
            if wanted.is_spread or not wants_several_optimizers(error):
                raise
            raise run_settings.several_optimizers(wanted.way_out) from None
        if not wanted.is_spread:
            run_settings.check_optimizer(self.optimizers[0], wanted.way_out)

    def teardown(self) -> None:
        """Ends every thread and takes every trace out of the module."""
        run, self._run, self._wanted, self._resumed_changes = self._run, TrainerRun(), None, []
        try:
            self._undo.close()
            run.close()
            if self._failure is None:
                self._emulation.check(emulated_speeds.TOLERATED)
        finally:
            super().teardown()

    def on_train_end(self) -> None:
        super().on_train_end()
        self._run.finish_report()

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if isinstance(exception, torch.OutOfMemoryError):
            explain(exception, f"{self._run.lacking()}{self._held()}")
        self._run.finish_report()

    def _held(self) -> str:
        """Say what the stages' devices hold, and what was planned for them, as the end of a note."""
        if self._wanted is None or self.lightning_module is None:
            return ""
        stages = self._run.devices or self._wanted.spread
        planned = {device: f"it has {in_bytes(limit)}" for device, limit in self._wanted.memory.items()}
        if (plan := self._own_plan) is not None and plan.spread:
            own = zip(stages, plan.virtual_workers[0].stages, strict=False)
            planned |= {device: f"the plan has {in_bytes(stage.memory_bytes)} for it" for device, stage in own}
        return held(self.lightning_module, self.optimizers, stages, planned)

    def _take_report(self, report: RunReport) -> None:
        self.last_run = report

    # Lightning's steps.

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run.training_step(super().training_step, *args)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run.evaluation_step("validation_step", super().validation_step, *args)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run.evaluation_step("test_step", super().test_step, *args)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run.evaluation_step("predict_step", super().predict_step, *args)

    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any],
        model: L.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        with self._run.optimizer_step(optimizer):
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self._run.offer()

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if isinstance(batch, ReadyBatch):
            return batch.batch
        return super().batch_to_device(batch, device, dataloader_idx)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        if self._in_flight_now > 1 and isinstance(current(), Minibatch):
            raise run_settings.saving_ahead()
        note_in_flight(checkpoint, self._run.trained_in_flight(self.last_run.in_flight))
        note_last_changes(checkpoint, self._run.last_changes())
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        self._resumed, self._resumed_changes = take_in_flight(checkpoint), take_last_changes(checkpoint)
        return checkpoint

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load what ``checkpoint`` has of steps; also within a fit, as after a search for a learning rate."""
        super().load_optimizer_state_dict(checkpoint)
        self._run.restore_changes(self._resumed_changes)
        self._resumed_changes = []

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        strategy_registry.register(cls.strategy_name, cls, description=(cls.__doc__ or "").partition("\n")[0])

    def _fit_settings(self) -> run_settings.RunSettings:
        assert self.lightning_module is not None
        planner, found = self._planner(), self._found_hosts()
        places = self.stage_hosts if found is None else found.hosts
        return run_settings.RunSettings(
            stages=self.stages,
            in_flight=self.in_flight,
            module=self.module,
            timeout=self.timeout,
            capture_timeout=self.capture_timeout,
            devices=self._devices(),
            torch_threads=relations.torch_threads(),
            choose_split_points=self._choose_split_points,
            before_pass=self._before_pass or planner.before_pass,
            decide=planner,
            planned=planner.placement.emulated or (self.plan is not None and not self.plan.spread),
            chosen=self.in_flight == "auto" and not planner.even and len(planner.placement.devices) > 1,
            spread=self._provisional_devices(),
            memory={} if self.plan is not None and self.plan.spread else planner.placement.limits,
            recompute=self.recompute,
            compile=self.compile,
            virtual_worker=self.global_rank,
            virtual_workers=self.world_size,
            timeline=self._timeline,
            hosts=host_setting.stages_elsewhere(self._own_plan, places, planner.placement.emulated),
            accelerators=host_setting.accelerators_elsewhere(self._own_plan, planner.placement.emulated),
            nodes=host_setting.nodes_elsewhere(self._own_plan),
            security=self._wsp_settings().security.from_environment(),
            grace=self.grace,
            has_groups=self._has_groups,
            waited_in=self._waited_in,
            resumed=None if self._asked_in_flight else self._resumed,
        )

    def _with_policy(self, wanted: run_settings.RunSettings) -> run_settings.RunSettings:
        """Settle the weight policy, and how long learning rates are lower, by the optimizer where neither is given."""
        given = self.lr_correction
        correction = Correction(given) if isinstance(given, int) else None
        if self._policy is not None:
            return replace(wanted, weights=(self._policy,), lr_correction=correction)
        assert self.lightning_module is not None
        chosen = automatic_policy(self.optimizers[0], clipped=is_clipped(self.lightning_module.trainer))
        if self.plan is not None:
            chosen = chosen.planned(self.plan.versions.policy, f"plan={self._plan_name} is for it")
        if given != "auto":
            chosen = replace(chosen, lr_correction=correction)
        weights = dict.fromkeys([chosen.policy, STASH] if self.plan is None else [chosen.policy])
        return replace(wanted, weights=tuple(weights), lr_correction=chosen.lr_correction, automatic=chosen)

    @property
    def _in_flight_now(self) -> int:
        return self._run.pipeline.in_flight
