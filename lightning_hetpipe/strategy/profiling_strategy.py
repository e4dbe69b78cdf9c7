"""Profiles a model on this machine: runs its first minibatch as a fit would, measures the layers, and ends."""

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
    """Ends the fit once the layers are measured."""


class Profiled(NamedTuple):
    """Findings of :func:`profile`.

    Attributes:
        profile: Of each distinct device.
        optimizer: Its name for the memory model; None where that does not know it.
        policies: Weight policies that a run would choose by the optimizer, of which the first is taken that fits.
    """

    profile: Profile
    optimizer: str | None
    policies: Sequence[WeightPolicy]


class ProfilingStrategy(HetPipeStrategy):
    """Measures the layers of a model in its first minibatch, which ends the fit: see :func:`profile`.

    Args:
        cache: Where to look for what was measured before, and to put what is measured now; None for nowhere.
        bar: Shows the measuring.
        module, timeout: As HetPipeStrategy's.
        widths: Whether also parts of layers are measured that a group of devices may divide.
    """

    def __init__(
        self,
        cache: ProfileCache | None = None,
        bar: Bar = hidden,
        module: str | Sequence[str] | None = None,
        timeout: float = 300.0,
        widths: bool = False,
        **lightnings: Any,
    ) -> None:
        # Two in flight have it watch the first minibatch, as a pipeline does.
        super().__init__(stages=1, in_flight=2, module=module, timeout=timeout, **lightnings)
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
        optimizer = None if profiling.optimizer is None else optimizer_name(profiling.optimizer)
        self.found = Profiled(replace(measured, memory=memory), optimizer, policies)
        raise _Studied


def profile(trainer: L.Trainer, model: L.LightningModule, **data: Any) -> Profiled:
    """Profile ``model`` on each distinct device of ``trainer``, whose strategy is a :class:`ProfilingStrategy`.

    The model is trained on one minibatch as far as its gradients; its weights stay.

    Args:
        trainer: Ends its fit once all is measured.
        model: Whose ``training_step`` is to be profiled.
        **data: As ``trainer.fit`` takes it: ``train_dataloaders`` or ``datamodule``.

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
