"""Profile a model on this machine: run its first minibatch as a fit would, measure the layers, and end the fit."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import lightning as L
import torch

from lightning_hetpipe.capture.profiling import ProfilingInput
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.placement.decision import Decision
from lightning_hetpipe.placement.device_placement import discovered_cluster
from lightning_hetpipe.placement.measuring import optimizer_name, profiled
from lightning_hetpipe.placement.progress import Bar, hidden
from lightning_hetpipe.planning.model.profile import Profile
from lightning_hetpipe.planning.plan.profile_file import ProfileCache
from lightning_hetpipe.rules.versions import WeightPolicy
from lightning_hetpipe.strategy.hetpipe_strategy import HetPipeStrategy


class _Studied(Exception):
    """End of the fit, once the layers are measured."""


class Profiled(NamedTuple):
    """Result of :func:`profile`: the profile of each distinct device, and findings on the optimizer.

    ``optimizer`` is its name in the memory model, or None if the model does not know it. A run with this optimizer
    would take the first of ``policies`` that fits.
    """

    profile: Profile
    optimizer: str | None
    policies: Sequence[WeightPolicy]


class ProfilingStrategy(HetPipeStrategy):
    """Strategy that measures a model's layers in its first minibatch, then ends the fit: see :func:`profile`.

    Args:
        cache: Cache of earlier measurements, which gets the new ones, or None.
        bar: Progress bar of the measuring.
        widths: Whether to measure parts of layers as well, for groups of devices that divide layers.
        settings: Settings of the ``HetPipeStrategy``, such as ``module`` and ``timeout``.
    """

    def __init__(
        self, cache: ProfileCache | None = None, bar: Bar = hidden, widths: bool = False, **settings: Any
    ) -> None:
        # With two minibatches in flight, the strategy watches the first minibatch, as for a pipeline.
        super().__init__(stages=1, in_flight=2, **settings)
        self.found: Profiled | None = None
        self._cache, self._bar, self._widths = cache, bar, widths
        self._overrides |= {"decide": self._measure, "has_groups": widths}

    def _measure(self, profiling: ProfilingInput, policies: Sequence[WeightPolicy]) -> Decision:
        assert self.lightning_module is not None
        devices = dict.fromkeys(self.parallel_devices or [torch.device("cpu")])
        found = {slot.device: device for device in devices for slot in discovered_cluster([device]).slots}
        memory = {each.name: each.memory for each in found if each.memory is not None}
        one_of_each = {each.name: device for each, device in found.items()}
        model, precision = type(self.lightning_module).__name__, str(self.precision_plugin.precision)
        measured = profiled(
            profiling, one_of_each, model, precision, self._cache, self._bar, with_speeds=True, with_widths=self._widths
        )
        self.found = Profiled(replace(measured, memory=memory), optimizer_name(profiling.optimizer), policies)
        raise _Studied


def profile(trainer: L.Trainer, model: L.LightningModule, **data: Any) -> Profiled:
    """Profile ``model`` on each distinct device of ``trainer``, whose strategy is a :class:`ProfilingStrategy`.

    The model computes the gradients of one minibatch, and its weights stay. ``data`` is ``train_dataloaders`` or
    ``datamodule``, as for ``trainer.fit``.

    Raises:
        SettingError: if the model cannot be pipelined, or has no minibatch.
    """
    strategy = trainer.strategy
    if not isinstance(strategy, ProfilingStrategy):
        raise SettingError(f"the Trainer's strategy is a {type(strategy).__name__}; give it a ProfilingStrategy")
    with suppress(_Studied):
        trainer.fit(model, **data)
    if strategy.found is None:
        raise SettingError(f"{type(model).__name__} has no minibatch to train on, so that nothing can be measured")
    return strategy.found
