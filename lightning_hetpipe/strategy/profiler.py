"""Profiles a model on this machine: runs its first minibatch as a fit would, measures the layers, and ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import lightning as L
import torch

from lightning_hetpipe.capture.profiling import Study, code_of
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.planning.memory import OPTIMIZERS
from lightning_hetpipe.planning.profile import LayerBytes, Profile, Times
from lightning_hetpipe.planning.profile_cache import Conditions, ProfileCache
from lightning_hetpipe.reporting.meter import batch_size
from lightning_hetpipe.strategy.found import found_cluster
from lightning_hetpipe.strategy.settings import FitSettings
from lightning_hetpipe.strategy.strategy import HetPipeStrategy

Progress = Callable[[str, int, int], None]
"""Is told which device is measured, how many layers are done, and of how many."""


class _Studied(Exception):
    """Ends the fit once the layers are measured."""


class ProfilingStrategy(HetPipeStrategy):
    """Measures the layers of a model in its first minibatch, which ends the fit: see :func:`profile`.

    Args:
        cache: Where to look for what was measured before, and to put what is measured now; None for nowhere.
        progress: Of the measuring.
        module, timeout: As HetPipeStrategy's.
    """

    def __init__(
        self,
        cache: ProfileCache | None = None,
        progress: Progress | None = None,
        module: str | Sequence[str] | None = None,
        timeout: float = 300.0,
        **lightnings: Any,
    ) -> None:
        # Two in flight have it watch the first minibatch, as a pipeline does.
        super().__init__(stages=1, in_flight=2, module=module, timeout=timeout, **lightnings)
        self.found: Profile | None = None
        self.optimizer_name: str | None = None
        self._cache, self._progress, self._batch = cache, progress, None

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._batch = args[0] if args else None
        return super().training_step(*args, **kwargs)

    def _fit_settings(self) -> FitSettings:
        return replace(super()._fit_settings(), study=self._measure)

    def _measure(self, study: Study) -> None:
        assert self.lightning_module is not None
        devices = dict.fromkeys(self.parallel_devices or [torch.device("cpu")])
        model, samples = type(self.lightning_module).__name__, batch_size(self._batch)
        found = {spot.device: device for device in devices for spot in found_cluster([device]).spots}
        memory = {each.name: each.memory for each in found if each.memory is not None}
        for name, device in {each.name: device for each, device in found.items()}.items():  # one of each type
            conditions = self._conditions(study, name)
            one = None if self._cache is None else self._cache.get(conditions.key())
            if one is None:
                one = self._measured(study, device, name, model, samples)
                if self._cache is not None:
                    self._cache.put(conditions.key(), one)
            one = replace(one, model=model)
            self.found = one if self.found is None else self.found.joined(one)
        assert self.found is not None
        self.found = replace(self.found, memory=memory)
        self.optimizer_name = optimizer_name(self.optimizers[0])
        raise _Studied

    def _measured(self, study: Study, device: torch.device, name: str, model: str, samples: int) -> Profile:
        count = len(study.layers)
        sizes: list[LayerBytes] = []
        times: list[Times] = []
        for size, time in study.on(device):
            sizes.append(size)
            times.append(time)
            if self._progress is not None:
                self._progress(name, len(sizes), count)
        return Profile(model, samples, sizes, {name: times}, {})

    def _conditions(self, study: Study, device: str) -> Conditions:
        layers = [(layer.name, layer.module) for layer, _, _ in study.layers]
        given = [tensor for _, value, _ in study.layers for tensor in value.tensors]
        return Conditions(
            layers=[(name, code_of(module)) for name, module in layers],
            parameters=[
                (f"{name}.{own}", tuple(each.shape), f"{each.dtype} {each.requires_grad}")
                for name, module in layers
                for own, each in module.named_parameters()
            ],
            inputs=[(tuple(tensor.shape), str(tensor.dtype)) for tensor in given],
            precision=self.precision_plugin.precision,
            torch=torch.__version__,
            device=device,
            settings={
                "threads": str(torch.get_num_threads()),
                "matmul": torch.get_float32_matmul_precision(),
                "deterministic": str(torch.are_deterministic_algorithms_enabled()),
                "optimizer": f"{type(study.optimizer).__module__}.{type(study.optimizer).__qualname__}",
            },
        )


def profile(trainer: L.Trainer, model: L.LightningModule, **data: Any) -> tuple[Profile, str | None]:
    """The profile of ``model`` on each distinct device of ``trainer``, whose strategy is a :class:`ProfilingStrategy`.

    The model is trained on one minibatch as far as its gradients; its weights stay.

    Args:
        trainer: Ends its fit once all is measured.
        model: Whose ``training_step`` is to be profiled.
        **data: As ``trainer.fit`` takes it: ``train_dataloaders`` or ``datamodule``.

    Returns:
        The profile, and the name of the optimizer for the memory model; None where that does not know it.

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
    return strategy.found, strategy.optimizer_name


def optimizer_name(optimizer: torch.optim.Optimizer) -> str | None:
    """What the memory model calls ``optimizer``; None if it does not know it."""
    name, options = type(optimizer).__name__.lower(), optimizer.defaults
    if name in ("sgd", "rmsprop") and options.get("momentum"):
        name = f"{name}_momentum"
    if options.get("amsgrad"):
        name = "amsgrad"
    return name if name in OPTIMIZERS else None
