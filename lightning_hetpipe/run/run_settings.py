"""Settings of a run, and one-sentence refusals of what a pipeline cannot train."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.nn.parameter import is_lazy

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.hosts.stages_apart import StageElsewhere as StageElsewhere
from lightning_hetpipe.lightning_private import callbacks_of, closure_loss
from lightning_hetpipe.pipeline.recorder import Window
from lightning_hetpipe.pipeline.stage import BeforePass
from lightning_hetpipe.placement.decision import Decide
from lightning_hetpipe.rules.versions import STASH, WeightPolicy
from lightning_hetpipe.run.around_step import Correction
from lightning_hetpipe.run.stale_gradients import Automatic
from lightning_hetpipe.server.transport.security import Security


@dataclass(frozen=True)
class RunSettings:
    """Settings of one run, as given to the strategy."""

    stages: int | Literal["auto"]
    in_flight: int | Literal["auto"]
    module: Sequence[str] | None
    timeout: float
    capture_timeout: float
    """Seconds after which no more modules are taken apart."""
    devices: Sequence[torch.device]
    torch_threads: int
    choose_split_points: Callable[[Sequence[float], int], tuple[int, ...]]
    before_pass: BeforePass | None
    decide: Decide
    """Decides on stages and Nm of a fit."""
    virtual_worker: int = 0
    virtual_workers: int = 1
    recompute: bool = False
    compile: Mapping[str, Any] | None = None
    timeline: Window | None = None
    planned: bool = False
    """True if a pipeline plan or emulation gives the stages."""
    chosen: bool = False
    """True if stages and Nm are to be chosen among unequal devices."""
    spread: Sequence[torch.device] = ()
    """Devices, in order, of the provisional stages over which the model is spread before stages are decided."""
    memory: Mapping[torch.device, int] = field(default_factory=dict)
    """Memory limits of devices, in bytes. Devices without a limit are left out."""
    resumed: int | None = None
    """Nm of the resumed checkpoint, if the user gave no Nm."""
    lr_correction: Correction | None = None
    weights: Sequence[WeightPolicy] = (STASH,)
    """Weight policies in order of preference. The run takes the first one for which devices have room."""
    automatic: Automatic | None = None
    """Choice of the policy and the correction of rates, unless the user chose them."""
    elsewhere: Mapping[int, StageElsewhere] = field(default_factory=dict)
    security: Security = field(default_factory=Security)
    grace: float = 30.0
    """Seconds in which the run has to end after it is told to."""
    has_groups: bool = False
    """True if a stage lies on several devices."""
    waited_in: Callable[[], str | None] = lambda: None
    """Returns a call, since the last query, in which virtual workers have waited for each other."""

    @property
    def wants_graphs(self) -> bool:
        """True if layers are to be captured as graphs wherever possible."""
        return bool(self.elsewhere) or self.has_groups

    @property
    def is_spread(self) -> bool:
        """True if one minibatch is in flight and no setting asks for the work of a stage. Then there is no pipeline:
        Lightning's own steps run on the devices over which the model is spread."""
        return not self._asks_for_pipeline and self._of_stages is None

    @property
    def _of_stages(self) -> str | None:
        """A setting that needs stages: to compile, to compute forwards again, to emulate, split or synchronise."""
        if self.virtual_workers > 1:
            return "virtual_workers"
        if self.compile is not None:
            return "compile"
        if self.planned:
            return "plan and cluster"
        if self.has_groups:
            return "split"
        return "recompute" if self.recompute and not self.is_one_stage else None

    @property
    def way_out(self) -> str:
        """Way to train what no pipeline can train, as the end of a sentence."""
        ways = ["set in_flight=1"] if self._asks_for_pipeline else []
        return " and ".join([*ways, *([] if self._of_stages is None else [f"leave {self._of_stages} out"])])

    @property
    def _asks_for_pipeline(self) -> bool:
        return self.may_run_ahead or self.chosen

    @property
    def is_one_stage(self) -> bool:
        """True if there is one stage, whatever the layers are."""
        return self.stages == 1 or (self.stages == "auto" and len(self.devices) == 1)

    @property
    def may_run_ahead(self) -> bool:
        """True if several minibatches may be in flight."""
        return self.in_flight != 1 and not (self.is_one_stage and self.in_flight == "auto")


def check_trained(module: L.LightningModule, precision: Precision, way_out: str) -> None:
    """Refuse a module that cannot be trained in a pipeline. ``way_out`` is how to train it without one."""
    name = type(module).__name__
    if not module.automatic_optimization:
        raise SettingError(
            f"{name} uses manual optimization, which decides inside training_step when weights change, and a pipeline"
            f" has later minibatches in flight by then; set automatic_optimization=True, or {way_out}"
        )
    if is_overridden("backward", module) or "backward" in vars(module):
        raise SettingError(
            f"{name} overrides backward, but stages run the backward pass here; remove the override, or {way_out}"
        )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise SettingError(
            f"{name}.training_step takes dataloader_iter, so that nobody can look ahead; take (batch, batch_idx), or"
            f" {way_out}"
        )
    for path, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise SettingError(
                f"the parameter '{path}' has no shape yet, and stages are divided by the sizes of layers; run the model"
                " on an example in setup or configure_model, or replace the lazy module (nn.LazyLinear, say)"
            )
    if type(precision) not in (Precision, MixedPrecision, HalfPrecision, DoublePrecision):
        raise SettingError(
            f"the precision plugin {type(precision).__name__} is not supported; use precision='32-true', '64-true',"
            " 'bf16-mixed', '16-mixed', 'bf16-true' or '16-true'"
        )


def check_batchnorm(sync_batchnorm: bool) -> None:
    """Refuse ``sync_batchnorm``, which this strategy cannot honour."""
    if sync_batchnorm:
        raise SettingError(
            "sync_batchnorm=True joins statistics of concurrent workers in every step, which a pipeline does not run in"
            " step; leave it out"
        )


def loss_of(output: Any, trainer: L.Trainer) -> Tensor:
    """Return the loss in the ``output`` of ``training_step``, from which a backward pass starts.

    Raises:
        SettingError: if there is no loss, several numbers, or a loss without parameters. Autograd would not name it.
    """
    loss = closure_loss(output, trainer.accumulate_grad_batches)
    if loss is None:
        raise SettingError(
            "training_step returned None to skip the step, which a pipeline, where later minibatches count on every"
            " step, does not do; return a loss, such as one multiplied by zero, or set in_flight=1"
        )
    if loss.numel() != 1:
        raise SettingError(
            f"the loss that training_step returned is of shape {tuple(loss.shape)}; return a single number, such as its"
            " mean"
        )
    if not loss.requires_grad:
        raise SettingError(
            "the loss that training_step returned depends on no parameter that requires a gradient, as after detach(),"
            " item() or below torch.no_grad(); return the loss as the model's outputs give it"
        )
    return loss


def nothing_to_recompute() -> None:
    """Warn that ``recompute`` has no effect."""
    warnings.warn(
        "recompute=True changes nothing where one stage holds the whole model: each backward follows its forward at"
        " once; set stages to more, or leave it out",
        stacklevel=2,
    )


def check_resumed(before: int | None, in_flight: int) -> None:
    """Warn if a checkpoint is resumed with another Nm than ``before``, although the user gave none."""
    if before not in (None, in_flight):
        rank_zero_warn(
            f"the checkpoint was trained with {before} in flight and is resumed with {in_flight}, on which results"
            f" depend; set in_flight={before} to go on as before, or in_flight={in_flight} if it is meant"
        )


def several_optimizers(way_out: str) -> SettingError:
    """Return the refusal of several optimizers. Lightning's own advises manual optimization, without ``way_out``."""
    return SettingError(
        "configure_optimizers returned several optimizers, and a pipeline steps one; use one optimizer with several"
        f" parameter groups, or manual optimization (automatic_optimization=False) and {way_out}"
    )


def saving_ahead() -> SettingError:
    """Return the refusal of a save in ``training_step``, which runs ahead of Lightning's loop."""
    return SettingError(
        "training_step saves a checkpoint while other minibatches are in flight, where the weights and the counters are"
        " of no one step; save it in on_train_batch_end, or set in_flight=1"
    )


def check_optimizer(optimizer: torch.optim.Optimizer, way_out: str) -> None:
    """Refuse an optimizer that evaluates a step more than once."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise SettingError(
            "LBFGS evaluates the loss several times in one step, and a pipeline runs each minibatch once; use another"
            f" optimizer, or {way_out}"
        )


def trains_frozen_later(trainer: L.Trainer) -> bool:
    """Return True if a callback of Lightning may unfreeze weights. Only the callback knows which and when."""
    return bool(callbacks_of(trainer, BaseFinetuning))
