"""The private names of Lightning that this package touches, in one place; ``tests/test_private.py`` guards each."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import lightning as L
from lightning.pytorch.loops.fetchers import _DataFetcher, _DataLoaderIterDataFetcher
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from torch import Tensor, nn
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

__all__ = [
    "DataFetcher",
    "DataLoaderIterFetcher",
    "closure_loss",
    "finished_minibatches",
    "has_gradient_hooks",
    "is_compiled",
    "log_interval",
    "move_before_transfer",
    "on_wait_for_workers",
    "step_arguments",
]

DataFetcher = _DataFetcher
DataLoaderIterFetcher = _DataLoaderIterDataFetcher


def closure_loss(output: Any, divisor: int) -> Tensor | None:
    """The loss that Lightning differentiates for what ``training_step`` returned."""
    return ClosureResult.from_training_step_output(output, divisor).closure_loss


def finished_minibatches(trainer: L.Trainer) -> tuple[int, int]:
    """Minibatches that Lightning's loop has started, over the whole run and in this epoch."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    return progress.total.ready, progress.current.ready


def step_arguments(trainer: L.Trainer, batch: Any, batch_idx: int) -> tuple[Any, ...]:
    """The arguments with which Lightning calls ``training_step``."""
    kwargs: OrderedDict[str, Any] = trainer.fit_loop.epoch_loop._build_kwargs(OrderedDict(), batch, batch_idx)
    return tuple(kwargs.values())


def move_before_transfer(module: L.LightningModule, batch: Any) -> Any:
    """Runs the user's ``on_before_batch_transfer``."""
    return module._on_before_batch_transfer(batch, dataloader_idx=0)


def is_compiled(module: L.LightningModule) -> bool:
    """Whether the module was given to the Trainer through ``torch.compile``."""
    return getattr(module, "_compiler_ctx", None) is not None


def log_interval(trainer: L.Trainer) -> int:
    """``Trainer(log_every_n_steps)``, which the Trainer sets on itself without declaring it."""
    return int(getattr(trainer, "log_every_n_steps", 0))


def has_gradient_hooks(parameter: nn.Parameter) -> bool:
    """Whether a user has put gradient hooks on ``parameter``."""
    return bool(parameter._backward_hooks) or bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def on_wait_for_workers(fetcher: _DataFetcher, waiting: Callable[[], AbstractContextManager[Any]]) -> None:
    """Opens ``waiting()`` around every wait of the fetcher's iterators for their DataLoader workers."""
    for iterator in getattr(fetcher.combined_loader._iterator, "iterators", []):
        if isinstance(iterator, _MultiProcessingDataLoaderIter) and "_get_data" not in vars(iterator):
            # Weakly: an iterator ends its workers when it is dropped, which a cycle through itself would put off.
            itself = weakref.ref(iterator)
            get: Callable[[Any], Any] = type(iterator)._get_data

            def get_data(itself: Callable[[], Any] = itself, get: Callable[[Any], Any] = get) -> Any:
                with waiting():
                    return get(itself())

            vars(iterator)["_get_data"] = get_data
