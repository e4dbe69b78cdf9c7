"""The private names of Lightning that this package uses, in one place. ``tests/private`` guards each.

If Lightning, or torch for it, does not have a name, each failure is an ImportError or AttributeError with this name:

- ``_Launcher``, ``_DataFetcher``, ``_DataLoaderIterDataFetcher``, ``_EvaluationLoop``, ``_PredictionLoop``,
  ``_TunerExitException``, ``_MultiProcessingDataLoaderIter``: this module cannot be imported.
- ``_layer_sync``, ``_signal_connector``, ``_sigterm_notifier_fn``, ``_slurm_sigusr_handler_fn``: a fit fails when it
  begins.
- ``_build_kwargs``, ``_on_before_batch_transfer``: training and evaluation fail, at their first batch at the latest.
- ``_state_dicts``, ``_start_profiler``, ``_stop_profiler``, ``_iterator``: fetching ahead of Lightning's loop fails.
- ``_get_iterator``, ``_get_data``: training fails with DataLoaders that have workers.
- ``_build_step_args_from_hook_kwargs``, ``_data_fetcher``: evaluation and prediction fail at their first batch.
- ``_combined_loader``, ``_mode``: evaluation and prediction fail at their first batch. Fits of several virtual workers
  fail when they look for their loaders.
- ``_max_batches``: a fit of several virtual workers fails when it counts its batches anew.
- ``_last_train_dl_reload_epoch``, ``_last_val_dl_reload_epoch``: a fit fails when a virtual worker comes back to it.
- ``_restarting``: with ``max_steps``, a virtual worker that comes back is taken to be in the epoch before, which has no
  batch left. No error says so.
- ``_checkpoint_connector``, ``_is_training_done``: a fit that a signal tells to end fails, and may not be saved.
- ``_can_stop_early``: with several virtual workers, a validation fails once the Trainer is told to stop.
- ``_train_time_interval``, ``_interval``: a fit of several virtual workers fails with a ModelCheckpoint, or with a
  Timer that has a duration.
- ``_every_n_train_steps``, ``_monitor_candidates``: a fit with a ModelCheckpoint fails if virtual workers have unequal
  shares, or unequal numbers of batches.
- ``_val_check_time_interval``: virtual workers validate at different minibatches if ``val_check_interval`` is a time.
  No error says so.
- ``_average_model``, ``_device``: fits on several devices, or of several virtual workers, fail with callbacks that
  average weights.
- ``_optimizer_step_post_hooks``: each optimizer is taken for one without hooks. Then ``weights='auto'`` is ``'stash'``,
  and settings that need hooks are refused.
"""

from __future__ import annotations

import inspect
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, TypeVar

import lightning as L
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging, Timer, WeightAveraging
from lightning.pytorch.loops import _EvaluationLoop, _PredictionLoop
from lightning.pytorch.loops.fetchers import _DataFetcher, _DataLoaderIterDataFetcher
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import _TunerExitException
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from lightning_hetpipe.errors import warn_if_untested
from lightning_hetpipe.redirect import Redirect

warn_if_untested("lightning", L.__version__)

BaseLauncher = _Launcher
DataFetcher = _DataFetcher
EvaluatingLoop = _EvaluationLoop | _PredictionLoop
DataLoaderIterFetcher = _DataLoaderIterDataFetcher
TunerExit = _TunerExitException

C = TypeVar("C", bound=L.Callback)

BEFORE_TRANSFER = "_on_before_batch_transfer"
"""The LightningModule's method that runs the user's ``on_before_batch_transfer``."""

LOADER_STATES = "_state_dicts"
"""The CombinedLoader's method that gives the states of resumable DataLoaders to a checkpoint."""


def closure_loss(output: Any, divisor: int) -> Tensor | None:
    """Return the loss that Lightning differentiates for the result of ``training_step``."""
    return ClosureResult.from_training_step_output(output, divisor).closure_loss


def callbacks_of(trainer: L.Trainer | None, *kinds: type[C]) -> list[C]:
    """Return the callbacks of ``trainer`` that are of one of the ``kinds``."""
    callbacks: list[L.Callback] = getattr(trainer, "callbacks", [])  # set by a connector, without declaring it
    return [each for each in callbacks if isinstance(each, kinds)]


def averages(trainer: L.Trainer) -> list[Tensor]:
    """Return the averages of weights and buffers that callbacks keep."""
    models = [callback._average_model for callback in callbacks_of(trainer, WeightAveraging)]
    return [tensor for model in models if model is not None for tensor in model.state_dict().values()]


def average_on_host(trainer: L.Trainer, undo: ExitStack) -> None:
    """Make callbacks keep averages of weights on the host until ``undo`` is closed, unless they have a device.

    Lightning would keep all averages on the root device.
    """
    averaging: list[Any] = callbacks_of(trainer, WeightAveraging, StochasticWeightAveraging)
    for callback in averaging:
        if callback._device is None:
            undo.callback(setattr, callback, "_device", None)
            callback._device = torch.device("cpu")


def begun_minibatches(trainer: L.Trainer) -> tuple[int, int]:
    """Return the numbers of minibatches that Lightning's loop has started, in the whole run and in this epoch."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    return progress.total.ready, progress.current.ready


def in_a_step(trainer: L.Trainer) -> bool:
    """Return True if the loop has begun a minibatch that is not processed yet."""
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    return bool(progress.processed < progress.ready)


def is_last_batch(trainer: L.Trainer) -> bool:
    """Return True if the minibatch that the loop has begun is the last of the epoch."""
    return bool(trainer.fit_loop.epoch_loop.batch_progress.is_last_batch)


def validates_at_the_end(trainer: L.Trainer) -> bool:
    """Return True if a validation that begins now is the validation at the epoch's end."""
    if trainer.should_stop and trainer.fit_loop._can_stop_early:
        return True
    return is_last_batch(trainer) and (
        isinstance(trainer.val_check_interval, float) or trainer.val_check_batch == float("inf")
    )


def seconds_between_validations(trainer: L.Trainer) -> float | None:
    """Return ``val_check_interval`` if it is a time, else None."""
    seconds: float | None = getattr(trainer, "_val_check_time_interval", None)  # set by a connector
    return seconds


def on_requeue(trainer: L.Trainer, handler: Callable[..., Any]) -> Redirect:
    """Redirect SLURM's signal before a job's end to ``handler``. ``original`` saves and requeues."""
    return Redirect(trainer._signal_connector, "_slurm_sigusr_handler_fn", handler)


def on_sigterm(trainer: L.Trainer, handler: Callable[..., Any]) -> Redirect:
    """Redirect SIGTERM to ``handler``, in a run that begins later. ``original`` ends the run after its batch."""
    return Redirect(trainer._signal_connector, "_sigterm_notifier_fn", handler)


def note_sigterm(trainer: L.Trainer) -> None:
    """Set ``trainer.received_sigterm``, so that SIGTERM ends the run."""
    trainer._signal_connector.received_sigterm = True


def requeue_path(trainer: L.Trainer) -> str:
    """Return the next file in which a SLURM job is saved before it is requeued, and from which it resumes by itself."""
    return trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir)


def ends_epoch(trainer: L.Trainer) -> bool:
    """Return True if the step that has ended is the last of the epoch, or of the training."""
    return bool(trainer.fit_loop.epoch_loop._is_training_done)


def saves_by_steps(callback: Any) -> bool:
    """Return True if ``callback`` is a ModelCheckpoint with ``every_n_train_steps``."""
    return isinstance(callback, ModelCheckpoint) and callback._every_n_train_steps > 0


def change_saving_intervals(trainer: L.Trainer, changed: Callable[[int], int]) -> None:
    """Replace each ``every_n_train_steps`` of the ModelCheckpoints of ``trainer`` by what ``changed`` makes of it."""
    for callback in filter(saves_by_steps, callbacks_of(trainer, ModelCheckpoint)):
        callback._every_n_train_steps = changed(callback._every_n_train_steps)


def on_monitor_candidates(callback: ModelCheckpoint, handler: Callable[..., Any]) -> Redirect:
    """Redirect to ``handler`` the method that gives ``callback`` the values in checkpoints' names."""
    return Redirect(callback, "_monitor_candidates", handler)


def asks_at_every_step(callback: Any) -> bool:
    """Return True if ``callback`` makes virtual worker 0 decide by time, after every step."""
    if isinstance(callback, Timer):
        return callback.time_remaining() is not None and callback._interval == "step"
    return isinstance(callback, ModelCheckpoint) and callback._train_time_interval is not None


def is_fitting(module: L.LightningModule | None) -> bool:
    """Return True if ``module`` is in a fit. It may be attached to no Trainer."""
    try:
        return module is not None and module.trainer.state.fn == TrainerFn.FITTING
    except RuntimeError:  # it is attached to none
        return False


Counters = tuple[int, int, int]
"""Minibatches begun in the run, minibatches begun in the epoch, and steps of the optimizer (``global_step``)."""


def counters(trainer: L.Trainer) -> Counters:
    """Return the present counts of ``trainer``'s loop."""
    return (*begun_minibatches(trainer), trainer.global_step)


def counters_ahead(trainer: L.Trainer, minibatch: int) -> Counters:
    """Return the counts of a plain run in ``training_step`` of ``minibatch``, which the loop has not passed yet."""
    begun, in_epoch, steps = counters(trainer)
    between = range(in_epoch + 1, in_epoch + minibatch - begun)  # of the epoch, counted from 1
    accumulate = trainer.accumulate_grad_batches
    return minibatch, in_epoch + minibatch - begun, steps + sum(number % accumulate == 0 for number in between)


def set_counters(trainer: L.Trainer, values: Counters) -> None:
    epoch_loop = trainer.fit_loop.epoch_loop
    steps = epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
    epoch_loop.batch_progress.total.ready, epoch_loop.batch_progress.current.ready, steps.completed = values


def step_arguments(trainer: L.Trainer, batch: Any, batch_idx: int) -> tuple[Any, ...]:
    """Return the arguments with which Lightning calls ``training_step``."""
    kwargs: OrderedDict[str, Any] = trainer.fit_loop.epoch_loop._build_kwargs(OrderedDict(), batch, batch_idx)
    return tuple(kwargs.values())


def evaluation_arguments(loop: EvaluatingLoop, hook: str, batch: Any, batch_idx: int, dataloader_idx: int) -> Any:
    """Return the arguments with which ``loop`` calls the step ``hook``."""
    loader = loop._combined_loader
    several = loader is not None and loader._mode == "sequential" and loop.num_dataloaders > 1
    kwargs = loop._build_kwargs(batch, batch_idx, dataloader_idx if several else None)
    return loop._build_step_args_from_hook_kwargs(kwargs, hook)


def evaluating_loop(trainer: L.Trainer) -> EvaluatingLoop:
    """Return the running loop of ``trainer.validate``, ``test`` or ``predict``."""
    loops: dict[Any, EvaluatingLoop] = {
        TrainerFn.VALIDATING: trainer.validate_loop,
        TrainerFn.TESTING: trainer.test_loop,
        TrainerFn.PREDICTING: trainer.predict_loop,
    }
    return loops[trainer.state.fn]


def fetcher_of(loop: EvaluatingLoop) -> _DataFetcher | None:
    """Return the fetcher of ``loop``'s batches."""
    return loop._data_fetcher


def set_fetcher(loop: EvaluatingLoop, fetcher: _DataFetcher | None) -> None:
    loop._data_fetcher = fetcher


def move_before_transfer(module: L.LightningModule, batch: Any, dataloader_idx: int = 0) -> Any:
    """Run the user's ``on_before_batch_transfer``."""
    return module._on_before_batch_transfer(batch, dataloader_idx=dataloader_idx)


def has_step_hooks(optimizer: Any) -> bool:
    """Return True if ``optimizer`` takes hooks. A wrapper of another optimizer may lack ``Optimizer.__init__``."""
    return hasattr(optimizer, "_optimizer_step_post_hooks")


def run_first(optimizer: torch.optim.Optimizer, post_hook: Any) -> None:
    """Make the registered ``post_hook`` run before all others after ``optimizer.step``."""
    hooks: Any = optimizer._optimizer_step_post_hooks  # an OrderedDict, declared as a dict
    hooks.move_to_end(post_hook.id, last=False)


def share_profiling(fetcher: _DataFetcher, inner: _DataFetcher) -> None:
    """Make ``inner`` profile its fetches as Lightning told ``fetcher``."""
    inner._start_profiler, inner._stop_profiler = fetcher._start_profiler, fetcher._stop_profiler


def set_checkpoint_io(strategy: ParallelStrategy, io: CheckpointIO | None) -> None:
    """Call the setter of ``strategy.checkpoint_io``."""
    of_lightning: Any = ParallelStrategy.checkpoint_io  # a property, whose types mypy takes for a function's
    of_lightning.__set__(strategy, io)


def synchronises_batchnorm(strategy: ParallelStrategy) -> bool:
    """Return True if ``Trainer(sync_batchnorm=True)`` was requested."""
    return strategy._layer_sync is not None


def wants_several_optimizers(error: RuntimeError) -> bool:
    """Return True if ``error`` is Lightning's refusal of several optimizers, which advises manual optimization."""
    return "multiple optimizers" in str(error)


def loader_iterator(loader: CombinedLoader) -> Iterator[Any] | None:
    """Return the iterator over ``loader``, or None before an epoch and after the run."""
    return loader._iterator


def validation_loaders(trainer: L.Trainer) -> list[Any]:
    """Return the loaders on which a fit validates, or an empty list before it has them."""
    loader = trainer.fit_loop.epoch_loop.val_loop._combined_loader
    return [] if loader is None else loader.flattened


def train_loaders(trainer: L.Trainer) -> list[Any]:
    """Return the DataLoaders, or other sources of batches, on which a fit trains."""
    loader = trainer.fit_loop._combined_loader
    return [] if loader is None else loader.flattened


def loaders_made(trainer: L.Trainer) -> list[float | None]:
    """Return the epochs in which a fit has made its loaders for training and for validation, None for none."""
    loop, validation = trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop
    made = None if validation._combined_loader is None else validation._last_val_dl_reload_epoch
    return [loop._last_train_dl_reload_epoch, made]


def make_loaders_as(trainer: L.Trainer, made: Sequence[float | None]) -> None:
    """Make a fit renew its loaders in the epochs that :func:`loaders_made` returned for another fit."""
    loop, validation = trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop
    training, validating = made
    assert training is not None
    loop._last_train_dl_reload_epoch = training
    if validating is None:
        validation._combined_loader = None
        return
    if validation._combined_loader is None:
        trainer.validating = True
        validation.setup_data()
        trainer.training = True
    validation._last_val_dl_reload_epoch = validating


def recount_batches(trainer: L.Trainer) -> None:
    """Count the batches of a fit's loaders again after their samplers' lengths have changed, for the next epoch."""
    loop, validation = trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop
    loader = loop._combined_loader
    assert loader is not None
    most: int | float = trainer.limit_train_batches
    limits = [_limited(1, each, most) for each in loader.flattened]
    loader.limits = [*limits]
    loop.max_batches = min(limits) if loader._mode == "min_size" else max(limits)
    if isinstance(trainer.val_check_interval, float):
        trainer.val_check_batch = max(1, int(loop.max_batches * trainer.val_check_interval))
    validate_in_epoch(trainer)
    if validation._combined_loader is not None:
        most = trainer.limit_val_batches
        validation._max_batches = [
            _limited(before, each, most)
            for before, each in zip(validation._max_batches, validation._combined_loader.flattened, strict=True)
        ]


def validate_in_epoch(trainer: L.Trainer) -> None:
    """Make a fit validate at the end of an epoch that has become shorter than ``val_check_interval``."""
    interval, most = trainer.val_check_interval, trainer.fit_loop.max_batches
    if isinstance(interval, int) and trainer.check_val_every_n_epoch is not None:
        trainer.val_check_batch = max(1, int(min(int(interval), most)))


def begin_next_epoch(trainer: L.Trainer) -> None:
    """Make a fit whose state was restored between two epochs begin the next epoch, with all of its batches.

    With ``max_steps``, Lightning would restore it in the epoch before, which has no batch left.
    """
    loop = trainer.fit_loop
    loop._restarting = loop.epoch_loop.restarting = False  # its own setter would look at `max_steps` again


def _limited(before: int | float, loader: Any, most: int | float) -> int | float:
    if before == float("inf"):  # a loader without a length has no other one now
        return before
    if isinstance(most, int):
        return min(len(loader), most)
    return max(1 if before else 0, int(len(loader) * most))  # none would leave this one out of the validation


def with_workers(
    fetcher: _DataFetcher, waiting: Callable[[], AbstractContextManager[Any]], starting: Callable[[], None]
) -> list[Redirect]:
    """Wrap the fetcher's DataLoaders with workers until the returned redirects are removed.

    Args:
        fetcher: Its iterators exist.
        waiting: Context around every wait of an iterator for its workers.
        starting: Called before an iterator is made, which forks. A CombinedLoader makes some iterators in mid-epoch.
    """

    def make(redirect: Redirect) -> Any:
        starting()
        iterator = redirect.original()
        _open_around_waits(iterator, waiting)
        return iterator

    for iterator in getattr(loader_iterator(fetcher.combined_loader), "iterators", []):
        _open_around_waits(iterator, waiting)
    loaders = [loader for loader in fetcher.combined_loader.flattened if isinstance(loader, DataLoader)]
    unique = {id(loader): loader for loader in loaders if loader.num_workers}
    return [Redirect(loader, "_get_iterator", make) for loader in unique.values()]


def _open_around_waits(iterator: Any, waiting: Callable[[], AbstractContextManager[Any]]) -> None:
    if not isinstance(iterator, _MultiProcessingDataLoaderIter) or "_get_data" in vars(iterator):
        return
    # A weak reference: an iterator ends its workers when it is dropped, which a reference cycle would delay.
    itself = weakref.ref(iterator)
    get: Callable[[Any], Any] = type(iterator)._get_data

    def get_data(itself: Callable[[], Any] = itself, get: Callable[[Any], Any] = get) -> Any:
        with waiting():
            return get(itself())

    vars(iterator)["_get_data"] = get_data


def with_checkpoint(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], checkpoint: Path
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a fit that resumes from ``checkpoint`` instead of the user's ``ckpt_path``."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.arguments["ckpt_path"] = checkpoint
    return bound.args, bound.kwargs
