"""The strategy: what Lightning sees of the pipeline."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import lightning as L
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.pipeline.flight import current
from lightning_hetpipe.pipeline.minibatch import Minibatch
from lightning_hetpipe.planning.partition import partition
from lightning_hetpipe.reporting.report import RunReport
from lightning_hetpipe.server.process import ServerProcess
from lightning_hetpipe.strategy import collectives, settings
from lightning_hetpipe.strategy.alone import Alone, is_alone
from lightning_hetpipe.strategy.checkpoints import ReplacingCheckpointIO, filled, is_lightnings_own
from lightning_hetpipe.strategy.evaluation import Evaluation
from lightning_hetpipe.strategy.fit import Fit
from lightning_hetpipe.strategy.launcher import launcher_of
from lightning_hetpipe.strategy.lookahead import ReadyBatch
from lightning_hetpipe.strategy.private import (
    StrategyRegistry,
    begun_minibatches,
    evaluating_loop,
    set_checkpoint_io,
    synchronises_batchnorm,
    wants_several_optimizers,
)
from lightning_hetpipe.strategy.ranks import Rank, Role, announce, devices_of, find_rank
from lightning_hetpipe.strategy.synchroniser import Synchroniser
from lightning_hetpipe.strategy.wsp import WSPCallback, WSPSettings

if TYPE_CHECKING:
    from lightning_hetpipe.strategy.group import Group

T = TypeVar("T")

SERVERS, TOKEN = "HETPIPE_SERVERS", "HETPIPE_TOKEN"
"""Environment variables that tell the processes of a launch where its servers are, and what they want to see."""


class HetPipeStrategy(ParallelStrategy):
    """Trains one LightningModule as a pipeline over this machine's devices, exactly.

    Minibatch p computes its loss and its gradients on the weights after minibatch p - Nm, on every stage (HetPipe, Park
    et al., USENIX ATC 2020, section 4: weight stashing). A run is deterministic, whatever the threads' timing.

    Args:
        stages: k, the number of stages; by default one for each device. On CPU they may exceed the devices. A list
            gives each virtual worker its own.
        in_flight: Nm, how many minibatches are in the pipeline at once; by default k + 1, and 1 for one stage. Each
            stage holds Nm copies of its weights.
        virtual_workers: Virtual workers on this machine; each is a process, which ``fit`` starts. The devices are
            divided among them in order.
        weights: Weight policy. Only "stash", until a later release.
        module: Name or names of the modules to pipeline; by default every one with trainable parameters that
            ``training_step`` calls.
        timeout: How long any wait inside the pipeline may take while nothing moves (a number means seconds). The time
            that user code takes does not count.
        wsp: How virtual workers synchronise; by default the WSPCallback among the Trainer's callbacks, else one with
            its defaults.
        plan, cluster, allocation, compile, recompute, timeline, lr_correction, start_method: of later releases.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin: as ``ParallelStrategy``'s.

    Attributes:
        last_run: What the last ``fit`` did, once it has ended.

    Raises:
        SettingError: one sentence that names the setting, its value and the way out.
    """

    strategy_name = "hetpipe"

    def __init__(
        self,
        stages: int | Literal["auto"] | Sequence[int] = "auto",
        in_flight: int | Literal["auto"] = "auto",
        virtual_workers: int = 1,
        weights: str = "stash",
        module: str | Sequence[str] | None = None,
        plan: Any = None,
        cluster: Any = None,
        allocation: str = "auto",
        compile: bool = False,
        recompute: bool = False,
        timeline: bool = False,
        lr_correction: Any = None,
        wsp: Any = None,
        start_method: str = "popen",
        timeout: timedelta | float = timedelta(minutes=5),
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=filled(checkpoint_io),
            precision_plugin=precision_plugin,
        )
        of_later_releases = {
            "weights": weights,
            "plan": plan,
            "cluster": cluster,
            "allocation": allocation,
            "compile": compile,
            "recompute": recompute,
            "timeline": timeline,
            "lr_correction": lr_correction,
            "start_method": start_method,
        }
        for name, value in of_later_releases.items():
            settings.check_later(name, value)
        self.virtual_workers = settings.virtual_workers(virtual_workers)
        self._stages_of_each = settings.stage_counts(stages, self.virtual_workers)
        self.wsp = settings.wsp(wsp)
        self.in_flight = settings.count("in_flight", in_flight)
        self.module = settings.module_names(module)
        self.timeout = settings.seconds(timeout)
        self.last_run: RunReport | None = None
        self._fit: Fit | Alone | None = None
        self._evaluation: Evaluation | None = None
        self._before_task: Callable[[int, str, int], None] | None = None
        self._num_nodes = 1
        self._group: Group | None = None
        self._failure: BaseException | None = None
        self._server: ServerProcess | None = None
        self._found_rank: Rank | None = None
        self._exits = ExitStack()

    # Who we are: one process, one virtual worker.

    @property
    def stages(self) -> int | Literal["auto"]:
        """k of this virtual worker."""
        return self._stages_of_each[self._rank.local % len(self._stages_of_each)]

    @property
    def _rank(self) -> Rank:
        if self.cluster_environment is None:  # not given to a Trainer yet
            return find_rank(self.virtual_workers, self._num_nodes, LightningEnvironment())
        if self._found_rank is None:
            self._found_rank = find_rank(self.virtual_workers, self._num_nodes, self.cluster_environment)
        return self._found_rank

    @property
    def root_device(self) -> torch.device:
        """The last stage's device."""
        devices = self._devices()
        used = len(devices) if self.stages == "auto" else min(self.stages, len(devices))
        return devices[used - 1]

    @property
    def num_nodes(self) -> int:
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, value: int) -> None:
        if value != 1:
            raise SettingError(
                f"num_nodes={value} is not available yet: this release trains on one machine; leave num_nodes out"
            )
        self._num_nodes = value
        self._found_rank = None

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """What writes checkpoints; where Lightning would take its own, one that keeps the old file until it is done."""
        if is_lightnings_own(super().checkpoint_io):
            self.checkpoint_io = ReplacingCheckpointIO()
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        set_checkpoint_io(self, filled(io))

    @property
    def is_distributed(self) -> bool:
        return self.world_size > 1

    @property
    def world_size(self) -> int:
        """N, the number of virtual workers."""
        return self._rank.size

    @property
    def global_rank(self) -> int:
        """i, which virtual worker this is."""
        return self._rank.index

    @property
    def local_rank(self) -> int:
        return self._rank.local

    @property
    def node_rank(self) -> int:
        return self._rank.node

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def barrier(self, name: str | None = None) -> None:
        if self._group is not None:
            self._group.gather(name)

    def broadcast(self, obj: T, src: int = 0) -> T:
        if self._group is None:
            return obj
        given: T = collectives.broadcast(self._group, obj, src)
        return given

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        if self._group is None or not isinstance(tensor, Tensor):
            return tensor
        return collectives.reduce(self._group, tensor, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        return tensor if self._group is None else collectives.all_gather(self._group, tensor)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return decision if self._group is None else collectives.decide(self._group, decision, all)

    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    # The life of a run.

    def setup_environment(self) -> None:
        if self._rank.role is Role.EXTERNAL and self._rank.size > 1 and self._wsp_settings().servers is None:
            raise SettingError(
                f"{self._rank.size} processes were started (by torchrun, SLURM or the like), which need to know where"
                " their servers are; start hetpipe-server, and set WSPCallback(servers=[its address]) and HETPIPE_TOKEN"
            )
        self._open_group()
        super().setup_environment()

    def _open_group(self) -> None:
        """Meets the other virtual workers, if there are any."""
        if self.world_size == 1 or self._group is not None:
            return
        from lightning_hetpipe.strategy.group import Group  # and gRPC with it, which one virtual worker does not need

        wsp = self._wsp_settings()
        security, addresses = wsp.security.from_environment(), wsp.servers
        if addresses is None:
            told = getattr(self._launcher, "given", {}) or os.environ  # children have it from their environment
            addresses = tuple(told[SERVERS].split())
            security = replace(security, token=told[TOKEN])
        self._group = Group(self.global_rank, self.world_size, addresses, security, wsp, self.timeout)
        self._group.open()

    def _configure_launcher(self) -> None:
        """Where this process is one of several, or is to start them."""
        rank = self._rank
        self._launcher = launcher_of(rank, self._start_server, closed=self._stop_server)
        if rank.size > 1:
            announce(rank)

    def _start_server(self) -> dict[str, str]:
        """Starts the server of this launch, unless others were named; gives what children need to find it."""
        from lightning_hetpipe.strategy.group import count_anew

        count_anew()  # as the processes that start now do
        wsp = self._wsp_settings()
        if wsp.servers is not None:
            return {}
        self._server = ServerProcess("lightning_hetpipe.server.rooms:Rooms", {"lease": wsp.lease})
        self._server.start()
        return {SERVERS: self._server.address, TOKEN: self._server.security.token or ""}

    def _stop_server(self) -> None:
        if self._server is not None:
            self._server.stop()

    def _wsp_settings(self) -> WSPSettings:
        trainer = getattr(self._launcher, "trainer", None)
        among = [callback for callback in getattr(trainer, "callbacks", []) if isinstance(callback, WSPCallback)]
        return (self.wsp or (among[0] if among else WSPCallback())).settings

    def setup(self, trainer: L.Trainer) -> None:
        """Checks what is to be trained, and prepares a fit."""
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            settings.check_module(trainer.lightning_module)
            settings.check_trainer(trainer, self.precision_plugin, synchronises_batchnorm(self))
        super().setup(trainer)
        if self._group is not None:
            self._exits.enter_context(collectives.shared_metrics(self._group, trainer.lightning_module))
        asked, seed = self._fit_settings(), _run_seed()
        if self._group is not None:  # not by our own `broadcast`: who counts its calls sees Lightning's
            seed = collectives.broadcast(self._group, seed, 0)
        if not fitting:
            loop = evaluating_loop(trainer)
            self._evaluation = Evaluation(trainer, loop, self.precision_plugin, asked, seed)
            self._evaluation.open()
        else:
            if is_alone(asked) and self._group is None:
                self._fit = Alone(trainer, asked, seed)
            else:
                self._fit = Fit(trainer, self.precision_plugin, asked, seed, self._synchroniser(trainer))
                self._evaluation = self._fit.evaluation
            self._fit.open()

    def _synchroniser(self, trainer: L.Trainer) -> Synchroniser | None:
        if self._group is None:
            return None
        synchroniser = Synchroniser(self._group, trainer.lightning_module)
        wsp = self._group.settings
        if wsp.aggregate == "sum":
            rank_zero_warn(
                f"the updates of {self._group.size} virtual workers are added, which acts like a learning rate"
                f" {self._group.size} times as large; lower it, or set WSPCallback(aggregate='mean')"
            )
        agreed = [f"in_flight={self.in_flight}", f"wave={wsp.wave}", f"update_dtype={wsp.update_dtype}"]
        synchroniser.enter(agreed, begun_minibatches(trainer)[0])
        return synchroniser

    def setup_optimizers(self, trainer: L.Trainer) -> None:
        try:
            super().setup_optimizers(trainer)
        except RuntimeError as error:
            if not wants_several_optimizers(error):
                raise
            raise settings.several_optimizers() from None
        settings.check_optimizer(self.optimizers[0])

    def teardown(self) -> None:
        """Ends every thread and takes every trace out of the module."""
        fit, self._fit = self._fit, None
        evaluation, self._evaluation = self._evaluation, None
        try:
            if evaluation is not None:
                evaluation.close()
            if fit is not None:
                try:
                    fit.close()
                finally:
                    self.last_run = fit.report
        finally:
            try:
                self._leave_group()
            finally:
                if self.cluster_environment is not None:
                    super().teardown()

    def _leave_group(self) -> None:
        self._exits.close()
        group, self._group = self._group, None
        if group is not None:
            error = sys.exc_info()[1] or self._failure
            group.close("" if error is None else f"{type(error).__name__}: {error}")

    def on_exception(self, exception: BaseException) -> None:
        self._failure = exception

    def on_train_end(self) -> None:
        super().on_train_end()
        if self._fit is not None:
            self._fit.finish_report()
            self.last_run = self._fit.report

    # Lightning's steps.

    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        assert self._fit is not None
        output: STEP_OUTPUT = self._fit.training_step(super().training_step, *args)
        return output

    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        output: STEP_OUTPUT = self._evaluate("validation_step", super().validation_step, *args)
        return output

    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        output: STEP_OUTPUT = self._evaluate("test_step", super().test_step, *args)
        return output

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("predict_step", super().predict_step, *args)

    def _evaluate(self, hook: str, native: Callable[..., Any], *args: Any) -> Any:
        return native(*args) if self._evaluation is None else self._evaluation.step(hook, native, *args)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        assert self._fit is not None
        assert self.lightning_module is not None
        fit, module = self._fit, self.lightning_module
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        fit.backward(lambda: self.precision_plugin.backward(closure_loss, module, optimizer, *args, **kwargs))
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any],
        model: L.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        assert self._fit is not None
        with self._fit.optimizer_step(optimizer):
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self._fit is not None:
            self._fit.offer()

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if isinstance(batch, ReadyBatch):
            return batch.batch
        return super().batch_to_device(batch, device, dataloader_idx)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        if self._engine is not None and self._engine.in_flight > 1 and isinstance(current(), Minibatch):
            raise settings.saving_ahead()
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restores the optimizer; torch puts each state on its parameter's device."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)

    @classmethod
    def register_strategies(cls, strategy_registry: StrategyRegistry) -> None:
        strategy_registry.register(cls.strategy_name, cls, description=(cls.__doc__ or "").partition("\n")[0])

    def _devices(self) -> list[torch.device]:
        rank = self._rank
        return devices_of(self.parallel_devices or [torch.device("cpu")], rank.local, rank.per_node)

    def _fit_settings(self) -> settings.FitSettings:
        return settings.FitSettings(
            stages=self.stages,
            in_flight=self.in_flight,
            module=self.module,
            timeout=self.timeout,
            devices=self._devices(),
            torch_threads=_torch_threads(),
            choose_cuts=self._choose_cuts,
            before_task=self._before_task,
            virtual_worker=self.global_rank,
        )

    def _choose_cuts(self, times: Sequence[float], stages: int) -> tuple[int, ...]:
        """The first layer of each stage; tests put their own cuts in its place."""
        return partition(times, stages)

    @property
    def _engine(self) -> Any:
        """The running engine, if any."""
        return self._fit.engine if self._fit is not None else None


def _run_seed() -> int:
    seed = os.environ.get("PL_GLOBAL_SEED")
    return int(seed) if seed else torch.initial_seed()


def _torch_threads() -> int:
    """Threads of each torch operation in training: OMP_NUM_THREADS, else 1; never derived from k, for exactness."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return max(1, int(threads)) if threads.isdigit() else 1
