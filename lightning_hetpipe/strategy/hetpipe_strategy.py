"""Strategy: each method that Lightning calls."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, TypeVar

import lightning as L
import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.fabric.plugins import ClusterEnvironment as ClusterEnvironment  # for HetPipeArguments's hints
from lightning.pytorch.accelerators import Accelerator as Accelerator
from lightning.pytorch.plugins.precision import Precision as Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from lightning_hetpipe.lightning_private import (
    average_on_host,
    evaluating_loop,
    is_fitting,
    set_checkpoint_io,
    synchronises_batchnorm,
    wants_several_optimizers,
)
from lightning_hetpipe.pipeline.memory import explain
from lightning_hetpipe.pipeline.recorder import Window
from lightning_hetpipe.pipeline.stage import BeforePass
from lightning_hetpipe.pipeline.user.minibatch import current
from lightning_hetpipe.placement.measuring import TOLERATED
from lightning_hetpipe.placement.spread import load_state
from lightning_hetpipe.reporting.report import RunReport
from lightning_hetpipe.run import run_settings, together
from lightning_hetpipe.run.driver import TrainerRun
from lightning_hetpipe.run.evaluation import Evaluation
from lightning_hetpipe.run.fit import Fit
from lightning_hetpipe.run.look_ahead import ReadyBatch
from lightning_hetpipe.run.run_settings import RunSettings
from lightning_hetpipe.settings import read, seconds
from lightning_hetpipe.strategy import meta_weights, recorded_init, relations
from lightning_hetpipe.strategy.arguments import LONGEST, HetPipeArguments
from lightning_hetpipe.strategy.checkpoints import ReplacingCheckpointIO, filled
from lightning_hetpipe.strategy.planned_devices import PlannedDevices, check_compile
from lightning_hetpipe.strategy.shared_checkpoints import LAST_CHANGES, SharedCheckpoints, note
from lightning_hetpipe.strategy.virtual_workers import VirtualWorkers
from lightning_hetpipe.strategy.virtual_workers import WSPCallback as WSPCallback  # for HetPipeArguments's hints
from lightning_hetpipe.workers import collectives
from lightning_hetpipe.workers.shared_data import InjectedRank

T = TypeVar("T")


def _setting_of(part: str, name: str) -> property:
    """Make the property of a setting that the strategy's ``part`` has as its attribute ``name``."""
    return property(attrgetter(f"{part}.{name}"), lambda self, value: setattr(getattr(self, part), name, value))


class HetPipeStrategy(HetPipeArguments, ParallelStrategy):
    """Strategy that trains one LightningModule as a pipeline over devices that need not match, exactly.

    Minibatch p computes its loss and its gradients on the weights after minibatch p - Nm, on every stage (HetPipe, Park
    et al., USENIX ATC 2020, section 4: weight stashing). A run is deterministic, whatever the threads' timing.

    Args:
        stages: k, the number of stages. "auto" makes one stage for each device. If devices differ, it uses the devices
            that make the run faster. On a CPU there may be more stages than devices. A list is for each virtual worker
            of a node, or of all nodes.
        in_flight: Nm, minibatches in the pipeline at once. "auto" takes k + 1, and 1 for one stage. With weights="2bw"
            it takes at most ``accumulate_grad_batches``. If devices differ, it takes what is planned
            (docs/planning.md#what-it-decides). Each stage holds Nm copies of its trained weights. Gradients are up to
            Nm - 1 steps stale, which asks for lower learning rates (docs/staleness.md).
        virtual_workers: Virtual workers on each machine (docs/virtual-workers.md). Each is a process, which ``fit``
            starts. The machine's devices are divided among them in order. Leave it out if an external launcher
            (torchrun, SLURM) starts the processes. A pair is the number on all machines with which a run begins, and
            the largest number. Virtual workers come, go and come back between epochs
            (docs/virtual-workers.md#a-minimum-and-a-maximum).
        weights: Weight policy: the weights that a minibatch in flight computes on (docs/staleness.md#weight-policies).
            "auto" predicts weights if there is a rule for the optimizer and room for the prediction, and stashes
            otherwise. A line at the start of a fit names the choice.
        module: Modules to pipeline, by default all modules with trainable parameters that ``training_step`` calls.
        plan: Plan to follow (docs/planning.md), as ``hetpipe-plan`` saves it: its stages on its devices, its number in
            flight, its weight policy and its virtual workers. It gives their clock distance, waves and placement of
            parameters, unless the WSPCallback sets them. If the plan has several machines, start one command on each
            machine: ``NODE_RANK=0`` on the node of virtual worker 0's last stage, then by the order of virtual workers.
            Without a plan, if devices differ, a fit measures the layers and plans the order of devices, the split
            points, k and Nm. Of these only Nm changes results (law L1). Measurements are kept on disk, so that later
            runs decide alike. ``in_flight`` or ``plan`` fixes Nm.
        cluster: Devices by name, with their memory, speeds and links. On a CPU, devices that are not here are
            *emulated*: a stage takes as long as it would there. Several virtual workers need a ``plan``. Emulated
            virtual workers all run on this machine.
        allocation: Rule by which virtual workers got their devices (docs/planning.md#several-virtual-workers), for
            ``hetpipe-plan``. A run refuses a ``plan`` of another allocation. "auto" takes any plan.
        compile: Run the layers of stages compiled by ``torch.compile``: True for inductor, which needs a C++ compiler
            for stages on a CPU. Each stage is compiled in its first minibatch, once for all versions of its weights,
            and again for other kinds of inputs. Dropout draws the numbers that it draws uncompiled. A layer that torch
            cannot compile, or that draws otherwise, runs uncompiled, with a warning. Evaluation, the first minibatch of
            a fit, and what a group (``split``) leaves whole run uncompiled. A run repeats bit for bit, but inductor
            rounds otherwise than torch's operators. A weight that only reaches outputs which the loss leaves out gets a
            gradient of zeros instead of none.
        recompute: Keep only the inputs of a stage, and compute its forward again for its backward. This takes less
            memory and more time, and gives the same bits. The last stage has nothing to gain, and computes once.
        split: Layers of a stage on several devices, each of which computes some of their output channels
            (docs/split-layers.md). The first device of a stage holds the unsplit weights. ``stages`` is by default as
            many as are named. "auto", or True, joins devices if the plan that is made at the start of a fit is faster
            with it (docs/planning.md#groups-of-devices).
        timeline: Record what each stage did when (docs/timeline.md): True for the last hundred minibatches. The
            timeline is in ``last_run.timeline``, in the run's folder as a Chrome trace, and on TensorBoard.
        stage_hosts: Hosts for a ``plan`` whose virtual workers have stages on several machines
            (docs/several-machines.md#a-virtual-worker-over-several-machines). The node of the last stage, on which this
            program runs, needs no host. Results are the same, bit for bit. Without ``stage_hosts``, the program is
            started on each machine of the plan. Not with ``compile`` or ``timeline`` yet. Settings of torch for the
            process, such as ``torch.set_float32_matmul_precision``, reach hosts as they are when a fit begins.
        lr_correction: K, the number of updates at the beginning with a lower learning rate
            (docs/staleness.md#weight-policies). Update t steps with the rate divided by tau^(1 - t / K) (PipeMare,
            2021, T1). tau is one more than the number of optimizer steps that minibatches miss. Schedulers, loggers and
            checkpoints see the user's rate. "auto" corrects rates only if weights="auto" does.
        wsp: Synchronisation of virtual workers, by default the WSPCallback among the Trainer's callbacks, or one with
            its defaults.
        timeout: Longest wait inside the pipeline while nothing moves. The run then ends with an error that says who
            waited for whom. The time of user code does not count. Other virtual workers, while they live, are waited
            for an hour, or for this time if it is longer. Servers may be silent for this time.
        capture_timeout: Time to take apart modules that ``torch.export`` refuses as a whole, at the start of a fit
            (docs/exactness.md). The outermost calls in them that can be captured are pipelined. What has not been tried
            by then runs as user code.
        grace: Time from the order to end (SIGTERM) until the run is killed (docs/preemption.md). If saving is known to
            take longer, one line says so.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin: As
            ``ParallelStrategy``'s.

    Attributes:
        last_run: Report of the last ``fit``, once it has ended; ``print`` shows it as a table. Before that, and where a
            fit has ended in its first minibatch, it has no stages, and says so.

    Raises:
        SettingError: one sentence that names the setting, its value and the way out.
    """

    strategy_name = "hetpipe"

    virtual_workers, wsp = _setting_of("_workers", "asked"), _setting_of("_workers", "wsp")
    timeout, stage_hosts = _setting_of("_workers", "timeout"), _setting_of("_workers", "hosts")
    plan, cluster = _setting_of("_workers", "plan"), _setting_of("_workers", "cluster")
    in_flight, split = _setting_of("_devices", "in_flight"), _setting_of("_devices", "split")
    recompute, compile = _setting_of("_devices", "recompute"), _setting_of("_devices", "compile")

    def _take(self, arguments: Mapping[str, Any]) -> None:
        given = read(HetPipeStrategy, arguments)
        ParallelStrategy.__init__(
            self,
            accelerator=given.accelerator,
            parallel_devices=given.parallel_devices,
            cluster_environment=given.cluster_environment,
            checkpoint_io=filled(given.checkpoint_io),
            precision_plugin=given.precision_plugin,
        )
        self.weights, self.lr_correction = given.weights, given.lr_correction
        self.module: list[str] | None = [given.module] if isinstance(given.module, str) else given.module
        self.capture_timeout, self.grace = seconds(given.capture_timeout), seconds(given.grace)
        self._timeline = None if given.timeline is False else Window()
        if not isinstance(given.timeline, bool):
            first, last = given.timeline
            self._timeline = Window(first, last, LONGEST)
        self._asked_in_flight = given.in_flight != "auto"
        self._workers = workers = VirtualWorkers(given, relations.plan(given.plan), self._in_flight_now)
        workers.set_environment(given.cluster_environment, given.parallel_devices, 1)
        self._devices = PlannedDevices(given, workers)
        self._checkpoints = SharedCheckpoints(workers)
        self.num_nodes = 1
        self.last_run = RunReport()
        self._run = TrainerRun()
        self._wanted: RunSettings | None = None
        self._overrides: dict[str, Any] = {}
        """Settings of a run that a subclass replaces."""
        self._before_pass: BeforePass | None = None
        self._undo = ExitStack()

    # This process. Lightning's *rank* is the virtual worker.

    @property
    def stages(self) -> int | Literal["auto"]:
        """k of this virtual worker."""
        return self._devices.stages

    @property
    def root_device(self) -> torch.device:
        """Device of the last stage, or of the last provisional stage until stages are decided."""
        spread = self._devices.provisional() if self._wanted is None else self._wanted.spread
        return (self._run.devices or spread)[-1]

    @property
    def is_distributed(self) -> bool:
        return self.world_size > 1

    @property
    def world_size(self) -> int:
        """N, the number of virtual workers."""
        return self._workers.rank.size

    @property
    def global_rank(self) -> int:
        """i, the index of this virtual worker."""
        return self._workers.rank.index

    @property
    def local_rank(self) -> int:
        return self._workers.rank.local

    @property
    def node_rank(self) -> int:
        return self._workers.rank.node

    @property
    def is_global_zero(self) -> bool:
        return self._checkpoints.is_writer

    def _configure_launcher(self) -> None:
        self._workers.set_environment(self.cluster_environment, self.parallel_devices, self.num_nodes)
        self._devices.check()
        self._launcher = self._workers.launcher()

    # The life of a run.

    def setup_environment(self) -> None:
        """Meet the other virtual workers. If several devices share the model, average weights in host memory."""
        self._workers.meet()
        super().setup_environment()
        if len(set(self._devices.provisional())) > 1:
            assert self.lightning_module is not None
            average_on_host(self.lightning_module.trainer, self._undo)

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Context manager that makes tensors on the host and, with ``empty_init``, uninitialised tensors on meta."""
        emptily = recorded_init.recorded() if empty_init else nullcontext()
        with torch.device("cpu"), emptily, self.precision_plugin.tensor_init_context():
            yield

    def setup(self, trainer: L.Trainer) -> None:
        """Check what is to be trained, divide the data, give weights values, and open the run.

        It replaces Lightning's own ``setup``, which would move all optimizer states to one device.
        """
        assert self.accelerator is not None
        assert self.model is not None
        fitting = trainer.state.fn == TrainerFn.FITTING
        self._wanted = wanted = replace(self._asked(), **self._overrides)
        if fitting:
            self._check(trainer, wanted)
        self._workers.divide(trainer)
        seed = self._workers.agreed(int(os.environ.get("PL_GLOBAL_SEED") or torch.initial_seed()))
        meta_weights.fill(trainer.lightning_module, seed)
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        if fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        self._checkpoints.resumed = None
        if not fitting:
            loop, wanted = evaluating_loop(trainer), replace(wanted, before_pass=self._before_pass)
            self._run = Evaluation(trainer, loop, self.precision_plugin, wanted, seed)
        else:
            if wanted.is_spread:
                run_settings.check_resumed(wanted.resumed, 1)
            else:
                self._wanted = wanted = self._devices.with_policy(wanted, trainer, self.weights, self.lr_correction)
            save = partial(self._checkpoints.save_for, "returning", trainer)
            synchroniser = self._workers.enter(trainer, self.in_flight, self.weights, self.lr_correction, save)
            take_report = partial(setattr, self, "last_run")
            self._run = Fit(trainer, self.precision_plugin, wanted, seed, synchroniser, take_report)
        self._run.open()

    def model_to_device(self) -> None:
        assert self.lightning_module is not None
        self._devices.spread(self.lightning_module)

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

    def on_train_end(self) -> None:
        super().on_train_end()
        self._run.finish_report()

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self._workers.fail(exception)
        self._checkpoints.rescue(exception, self.lightning_module)
        if isinstance(exception, torch.OutOfMemoryError):
            held = self._devices.held(self.lightning_module, self._wanted, self._run.devices)
            explain(exception, self._run.lacking() + held)
        self._run.finish_report()

    def teardown(self) -> None:
        """End all threads, remove all traces from the module, and leave the fit of the virtual workers."""
        run, self._run, self._wanted, self._checkpoints.changes = self._run, TrainerRun(), None, []
        try:
            self._undo.close()
            run.close()
            if self._workers.failure is None:
                self._devices.emulation.check(TOLERATED)
        finally:
            try:
                self._workers.leave()
            finally:
                if self.cluster_environment is not None:
                    with meta_weights.left_on_meta(self.lightning_module):  # if the run ends before it has begun
                        super().teardown()

    # Steps and data.

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": InjectedRank(self.global_rank)}

    def process_dataloader(self, dataloader: object) -> object:
        self._workers.deal(dataloader)
        return super().process_dataloader(dataloader)

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

    # Calls that all virtual workers make.

    def barrier(self, name: str | None = None) -> None:
        if (group := self._workers.together("strategy.barrier")) is not None:
            group.gather(None, "strategy.barrier()" if name is None else f"strategy.barrier({name!r})")

    def broadcast(self, obj: T, src: int = 0) -> T:
        return self._workers.call("strategy.broadcast", collectives.broadcast, obj, src)

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        return self._workers.call("strategy.reduce", collectives.reduce, tensor, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        return self._workers.call("all_gather", collectives.all_gather, tensor, sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return self._workers.call("strategy.reduce_boolean_decision", collectives.decide, decision, all)

    # Checkpoints.

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """Reader and writer of checkpoints, by default a :class:`ReplacingCheckpointIO`."""
        if type(super().checkpoint_io) is TorchCheckpointIO:  # nobody has chosen it
            self.checkpoint_io = ReplacingCheckpointIO()
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        set_checkpoint_io(self, filled(io))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Write one file with the training state of all virtual workers, on virtual worker 0. All call this method."""
        if self._in_flight_now() > 1 and (minibatch := current()) is not None and not minibatch.evaluates:
            raise run_settings.saving_ahead()
        if (in_flight := self._run.trained_in_flight(self.last_run.in_flight)) > 1:
            note(checkpoint, "in_flight", in_flight)
        if changes := self._run.last_changes():
            checkpoint[LAST_CHANGES] = [*changes]
        self._checkpoints.add(checkpoint, filepath, self.lightning_module, type(self.precision_plugin).__qualname__)
        native = partial(super().save_checkpoint, checkpoint, filepath, storage_options)
        self._checkpoints.write(checkpoint, filepath, native)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        native = partial(super().load_checkpoint, checkpoint_path, weights_only)
        return self._checkpoints.load(checkpoint_path, native, is_fitting(self.lightning_module))

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        meta_weights.load(self.lightning_module, checkpoint["state_dict"], strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load optimizer states and the last step's changes, even within a fit, as after a learning rate search."""
        # As in Lightning, surplus optimizers or states are left out.
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            load_state(optimizer, state)
        self._run.restore_changes(self._checkpoints.restore())

    # Settings of a run.

    def _asked(self) -> RunSettings:
        assert self.lightning_module is not None
        return self._devices.asked(
            self.lightning_module,
            str(self.precision_plugin.precision),
            module=self.module,
            timeout=self.timeout,
            capture_timeout=self.capture_timeout,
            torch_threads=_torch_threads(),
            before_pass=self._before_pass,
            timeline=self._timeline,
            grace=self.grace,
            resumed=None if self._asked_in_flight else self._checkpoints.resumed,
        )

    def _check(self, trainer: L.Trainer, wanted: RunSettings) -> None:
        run_settings.check_batchnorm(synchronises_batchnorm(self))
        if not wanted.is_spread:
            run_settings.check_trained(trainer.lightning_module, self.precision_plugin, wanted.way_out)
        if self._workers.group is not None:
            together.check_together(trainer)
        if wanted.is_spread:
            relations.refuse_spread(self.stage_hosts)
        if self.compile is not None:
            check_compile(self.compile, self._devices.usable())

    def _in_flight_now(self) -> int:
        return 1 if self._run.pipeline is None else self._run.pipeline.in_flight


def _torch_threads() -> int:
    """Return the threads of a torch operation: OMP_NUM_THREADS or 1. Results may depend on it, so k must not matter."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return max(1, int(threads)) if threads.isdigit() else 1
