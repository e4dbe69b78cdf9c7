"""Notes down every hook of a LightningModule, of a Callback and of a Logger: in which order, with what, seeing what."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from lightning.pytorch.loggers import Logger
from lightning.pytorch.trainer.states import RunningStage

from tests.parity.describing import counts, describe, sight

MODULE_METHODS = (
    "training_step",
    "validation_step",
    "test_step",
    "predict_step",
    "configure_callbacks",
    "configure_optimizers",
    "configure_gradient_clipping",
    "lr_scheduler_step",
    "optimizer_step",
    "optimizer_zero_grad",
)
"""Methods that Lightning calls of a LightningModule, beside those of its classes of hooks."""

NO_HOOKS = (
    "all_gather",
    "backward",  # is refused where it is overridden
    "clip_gradients",
    "configure_sharded_model",  # must not be overridden together with configure_model
    "forward",  # the user's own code calls it
    "freeze",
    "log",
    "log_dict",
    "lr_schedulers",
    "manual_backward",
    "optimizers",
    "print",
    "to_onnx",
    "to_tensorrt",
    "to_torchscript",
    "toggle_optimizer",
    "toggled_optimizer",
    "unfreeze",
    "untoggle_optimizer",
)
"""Methods that Lightning does not call, or that nobody may override here."""

TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
STEPS = ("training_step", "validation_step", "test_step", "predict_step")
AHEAD = (*TRANSFERS, *STEPS)
"""Calls that precede ``on_..._batch_start`` of their batch where several are in flight (DESIGN, section 4)."""


def methods(*classes: type) -> list[str]:
    """The public methods that ``classes`` themselves define."""
    found = (name for each in classes for name, value in vars(each).items() if inspect.isfunction(value))
    return sorted({name for name in found if not name.startswith("_")})


MODULE_HOOKS = sorted({*methods(ModelHooks, DataHooks, CheckpointHooks), *MODULE_METHODS} - set(NO_HOOKS))
CALLBACK_HOOKS = methods(L.Callback)
DATA_HOOKS = sorted({*methods(L.LightningDataModule, DataHooks)} - {"load_from_checkpoint", "name"})
LOGGER_METHODS = ("log_metrics", "log_hyperparams", "log_graph", "save", "finalize", "after_save_checkpoint")


@dataclass
class Event:
    """A hook was called."""

    owner: str
    hook: str
    arguments: Any
    seen: dict[str, Any]
    returned: Any = None

    @property
    def ahead(self) -> tuple[str, str]:
        """Which of the streams that run ahead it belongs to: those of each stage are two; empty for none."""
        if self.hook not in AHEAD or self.seen["stage"] is None:
            return ("", "")
        return (self.seen["stage"], "transfer" if self.hook in TRANSFERS else "step")

    @property
    def ahead_in_training(self) -> bool:
        return self.ahead[0] == str(RunningStage.TRAINING)

    @property
    def minibatch(self) -> int:
        """The minibatch that it belongs to: transfers, and the callbacks' batch start, come before that is counted."""
        begun: int = self.seen.get("total_batch_idx", -1) + 1
        return begun + (self.ahead_in_training and self.hook in TRANSFERS)

    def __str__(self) -> str:
        return f"{self.owner}.{self.hook} at minibatch {self.minibatch}"


@dataclass
class Notes:
    """Record of what happened, in order; ``folder`` is where the run writes, named alike in all runs."""

    folder: Path
    running_ahead: bool = False
    events: list[Event] = field(default_factory=list)
    trainer: L.Trainer | None = None

    def observe(self, owner: str, hook: str, arguments: Any, call: Callable[[], Any]) -> Any:
        event = Event(owner, hook, describe(arguments, self.folder), self._sight(hook))
        self.events.append(event)
        result = call()
        event.returned = describe(result, self.folder)
        return result

    def _sight(self, hook: str) -> dict[str, Any]:
        trainer = self.trainer
        if trainer is None or trainer.lightning_module is None:
            return {"stage": None}
        if self.running_ahead and hook in AHEAD:
            return counts(trainer)
        return sight(trainer, trainer.lightning_module, metrics=hook.endswith("_end"))


def observed(kind: type, hooks: list[str], owner: str, notes: Notes) -> type:
    """A subclass of ``kind`` whose ``hooks`` are noted down."""

    def wrap(name: str) -> Any:
        original = getattr(kind, name)

        @functools.wraps(original)
        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            return notes.observe(owner, name, [args, kwargs], lambda: original(self, *args, **kwargs))

        return hook

    return type(kind.__name__, (kind,), {name: wrap(name) for name in hooks})


class Memory(Logger):
    """A logger that notes down what it is given, except for what this strategy adds."""

    name = "memory"
    version = "0"

    def __init__(self, notes: Notes) -> None:
        self._notes = notes

    @property
    def save_dir(self) -> str:
        return str(self._notes.folder)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        kept = {name: value for name, value in metrics.items() if not name.startswith("hetpipe/")}
        if kept or not metrics:
            self._note("log_metrics", kept, step)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self._note("log_hyperparams", params, *args)

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        self._note("log_graph", model)

    def save(self) -> None:
        self._note("save")

    def finalize(self, status: str) -> None:
        self._note("finalize", status)

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        self._note("after_save_checkpoint", checkpoint_callback)

    def _note(self, method: str, *arguments: Any) -> None:
        self._notes.observe("logger", method, arguments, lambda: None)
