"""Spread runs: with one minibatch in flight, Lightning's own steps run on layers that lie on the stages' devices.

Nothing is captured, copied or versioned, no thread is started, and ``training_step`` is not restricted. Modules run as
they are, and torch's default generators draw (law L7). On one device this is a plain run. On several devices, the
operands of each operation are brought together (:mod:`lightning_hetpipe.pipeline.operands`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from time import perf_counter  # our own name, as suites script what `time.perf_counter` gives to Lightning
from typing import Any

import lightning as L
import torch
from torch import nn

from lightning_hetpipe.capture.grouping import layers_of
from lightning_hetpipe.capture.pieces import named_pieces, never_called
from lightning_hetpipe.capture.prepared_modules import is_compiled, is_scripted
from lightning_hetpipe.pipeline.operands import OperandsTogether
from lightning_hetpipe.placement.layout import device_bytes, device_name, stage_count
from lightning_hetpipe.placement.spread import Overflow
from lightning_hetpipe.planning.search.split_points import divided
from lightning_hetpipe.reporting.report import Meter, RunReport, StageReport
from lightning_hetpipe.rules.schedule import BACKWARD, FORWARD
from lightning_hetpipe.run.extensions.telemetry import Metered
from lightning_hetpipe.run.lifecycle import NOTHING
from lightning_hetpipe.run.run_settings import RunSettings, nothing_to_recompute, trains_frozen_later

LACKING = (
    "with one minibatch in flight a model is spread over its devices by the bytes of its weights; take smaller batches,"
    " or give more devices, or ones with more memory"
)
"""Note in the error of a spread run that runs out of memory."""


@dataclass(eq=False)
class SpreadRun(Metered):
    """Steps of a fit without a pipeline, and their figures."""

    module: L.LightningModule
    settings: RunSettings
    noted: Callable[[str, int, float], None]
    operands: OperandsTogether

    def __post_init__(self) -> None:
        trainer, settings = self.module.trainer, self.settings
        finetuned = trains_frozen_later(trainer)
        self._overflow = Overflow(self.module, settings.spread, settings.memory, trainer.optimizers, finetuned)
        self._names = named_pieces(self.module, settings.module)
        self._called: set[str] = set()  # of the modules that the setting ``module`` names
        self._last: int | None = None  # last minibatch, or None before the first, which is not counted
        self.meter = Meter(0)
        self._busy = 0.0
        self._is_busy = False

    def step(self, minibatch: int, native: Callable[..., Any], args: Sequence[Any]) -> Any:
        with (
            self._noting_calls() if self._last is None else NOTHING,
            self.operands.told(self._overflow),
            self._busily(FORWARD, minibatch),
        ):
            output = native(*args)
        if self._last is None:
            self._begin()
        elif minibatch != self._last:  # an optimizer may evaluate the loss again
            self.meter.count(args[0] if args else None)
        self._last = minibatch
        return output

    def backward(self, minibatch: int, native: Callable[[], None]) -> None:
        with self._busily(BACKWARD, minibatch):
            native()

    def report(self) -> RunReport:
        if self._last is None:
            return RunReport()
        self.meter.stop()
        seconds, stages = max(self.meter.seconds, 1e-9), self._stages()
        whole = len(stages) == 1  # the time of one stage of several is not known
        return RunReport(
            in_flight=1,
            minibatches=self.meter.minibatches,
            samples_per_second=self.meter.samples / seconds,
            stages=[
                StageReport(
                    device=device_name(device),
                    layers=list(layers),
                    layer_types=[type(layer).__name__ for layer in layers.values()],
                    time_s=self._busy / max(1, self.meter.minibatches) if whole else 0.0,
                    busy=min(1.0, self._busy / seconds) if whole else None,
                    parameters=sum(each.numel() for each in (self.module if whole else own).parameters()),
                    device_bytes=device_bytes(device),
                )
                for device, layers in stages
                for own in [nn.ModuleList(layers.values())]
            ],
            spread=True,
        )

    def _begin(self) -> None:
        """Check the settings against the first step, which is over, and start the meter."""
        if missing := [name for name in self._names or () if name not in self._called]:
            raise never_called(self._names or (), missing[0])
        stage_count(self.settings.stages, len(self.settings.devices), max(1, len(_parts(self._pieces()))))
        if self.settings.recompute:
            nothing_to_recompute()
        self._busy = 0.0
        self.meter.start()

    def _stages(self) -> list[tuple[torch.device, dict[str, nn.Module]]]:
        """Return the layers visible without a graph, by their devices, or by their sizes on one device."""
        devices = list(dict.fromkeys(self.settings.spread))
        stages = 1 if self.settings.stages == "auto" else self.settings.stages
        if len(devices) == stages == 1:
            pieces = self._pieces().items()
            return [(devices[0], {name: layer for key, piece in pieces for name, layer in layers_of(key, piece)})]
        layers, where = _parts(self._pieces()), list[int]()
        if len(devices) > 1:
            for layer in layers.values():  # a layer without parameters computes where the layer before it does
                device = next((each.device for each in layer.parameters()), None)
                where.append(devices.index(device) if device in devices else where[-1] if where else 0)
        else:
            sizes = [sum(each.nbytes for each in layer.parameters()) for layer in layers.values()]
            where = divided(sizes, [1.0] * stages)
        found: dict[int, dict[str, nn.Module]] = {}
        for stage, (name, layer) in sorted(zip(where, layers.items(), strict=True), key=itemgetter(0)):
            found.setdefault(stage, {})[name] = layer
        return [(devices[stage] if len(devices) > 1 else devices[0], own) for stage, own in found.items()]

    @contextmanager
    def _busily(self, work: str, minibatch: int) -> Iterator[None]:
        """Context manager that adds to the busy time. A loss and a backward within the step count with the forward."""
        if self._is_busy:
            yield
            return
        started, self._is_busy = perf_counter(), True
        try:
            yield
        finally:
            self._is_busy = False
        self._busy += perf_counter() - started
        if self._last is not None:
            self.noted(work, minibatch, started)

    @contextmanager
    def _noting_calls(self) -> Iterator[None]:
        """Context manager in which calls of modules that the setting ``module`` names are recorded."""
        compiled = {part for each in self.module.modules() if is_compiled(each) for part in each.modules()}
        named = {name: self.module.get_submodule(name) for name in self._names or ()}
        # Compiled code gets no hook, because a hook would cause another compilation.
        watched = {name: each for name, each in named.items() if each not in compiled and not is_scripted(each)}
        self._called.update(named.keys() - watched.keys())
        hooks = [each.register_forward_pre_hook(partial(self._note, name)) for name, each in watched.items()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _note(self, name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._called.add(name)

    def _pieces(self) -> dict[str, nn.Module]:
        """Return the modules, by path, that a pipeline would probably hold. Without calls this is a guess."""
        if self._names is not None:
            return {name: self.module.get_submodule(name) for name in self._names}
        found: dict[str, nn.Module] = {}
        for path, module in self.module.named_modules():
            if any(path.startswith(f"{outer}.") for outer in found) or not _is_callable(module):
                continue
            if module is not self.module and any(each.requires_grad for each in module.parameters()):
                found[path] = module
        return found


def _is_callable(module: nn.Module) -> bool:
    """Return True if ``module`` computes something itself, unlike a container."""
    if is_compiled(module):
        return False
    return is_scripted(module) or "forward" in vars(module) or type(module).forward is not nn.Module.forward


def _parts(modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the smallest parts of ``modules`` that a device can hold, by path."""
    return {
        name: part
        for path, module in modules.items()
        for name, part in module.named_modules(prefix=path)
        if not any(True for _ in part.children()) or any(True for _ in part.parameters(recurse=False))
    }
