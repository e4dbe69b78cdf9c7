"""One stage with one minibatch in flight: nothing to pipeline, so Lightning's own steps run, in its own thread.

Only chance is not plain: inside the modules that a pipeline would hold, random operations draw from the minibatch's
generators (law L7), so that results do not depend on the number of stages. Nothing is captured, copied or versioned, so
what ``training_step`` does to its modules is not restricted, and no thread is started.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning as L
from torch import nn

from lightning_hetpipe.capture.compiled_modules import is_compiled, look_through
from lightning_hetpipe.capture.pieces import is_plain_sequential, layers_of, named_pieces, never_called
from lightning_hetpipe.capture.seeded_forward import run_drawing
from lightning_hetpipe.lightning_private import begun_minibatches
from lightning_hetpipe.pipeline.random.generators import RandomGenerators, may_draw
from lightning_hetpipe.placement.layout import device_bytes, device_name
from lightning_hetpipe.redirect import Redirect
from lightning_hetpipe.reporting.meter import Meter
from lightning_hetpipe.reporting.report import RunReport, StageReport
from lightning_hetpipe.rules.spans import BACKWARD, FORWARD
from lightning_hetpipe.run.run_settings import RunSettings, nothing_to_recompute, returned_none
from lightning_hetpipe.run.steps import Steps


def is_single_stage(settings: RunSettings) -> bool:
    """Whether it is known from the settings that there is one stage with one minibatch in flight, and nothing to
    compile, emulate or compare with a plan, which is a stage's work."""
    if settings.compile is not None or settings.planned:
        return False
    one_stage = settings.stages == 1 or (settings.stages == "auto" and len(settings.devices) == 1)
    return one_stage and settings.in_flight in ("auto", 1)


class SingleStage(Steps):
    """The steps of a fit without a pipeline."""

    def __init__(
        self,
        trainer: L.Trainer,
        settings: RunSettings,
        chance: RandomGenerators,
        computed: Callable[[str, int, float], None],
    ) -> None:
        self._computed = computed
        self._trainer = trainer
        self._module: L.LightningModule = trainer.lightning_module
        self._settings = settings
        self._names = named_pieces(self._module, settings.module)
        self._chance = chance
        self._called: dict[str, nn.Module] = {}
        self._first = True
        self._inside = False
        self._meter = Meter(1)
        self._busy = 0.0

    def redirects(self) -> list[Redirect]:
        draws = any(is_compiled(module) and may_draw(module) for module in self._module.modules())
        return look_through(self._module) if draws else []

    def step(self, number: int, native: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        with self._busily(FORWARD), self._drawing(number):
            output = native(*args)
        if output is None:
            raise returned_none()
        if self._first:
            self._begin()
        else:
            self._meter.count(args[0] if args else None)
        return output

    def backward(self, native: Callable[[], None]) -> None:
        with self._busily(BACKWARD):
            native()

    def report(self) -> RunReport | None:
        if self._first:
            return None
        self._meter.stop()
        seconds, parameters = max(self._meter.seconds, 1e-9), self._module.parameters()
        layers = dict(self._layers())
        return RunReport(
            in_flight=1,
            minibatches=self._meter.minibatches,
            samples_per_second=self._meter.samples / seconds,
            stages=[
                StageReport(
                    device=device_name(self._settings.devices[0]),
                    layers=list(layers),
                    layer_types=[type(layer).__name__ for layer in layers.values()],
                    time_s=self._busy / max(1, self._meter.minibatches),
                    busy=min(1.0, self._busy / seconds),
                    parameters=sum(parameter.numel() for parameter in parameters),
                    versions_bytes=0,
                    activations_bytes=None,
                    gradients_bytes=None,
                    memory_bytes=None,
                    held=1,
                    device_bytes=device_bytes(self._settings.devices[0]),
                )
            ],
        )

    def _begin(self) -> None:
        """The first step is over, which has shown what there is."""
        self._first = False
        if missing := [name for name in self._names or () if name not in self._called]:
            raise never_called(self._names or (), missing[0])
        if self._settings.stages == "auto":
            one = "the pipelined module is one layer, so HetPipeStrategy trains it as one stage"
            several = (
                "there is one device, so HetPipeStrategy trains the model as one stage, without a pipeline; for more,"
                " set stages, as several may share a device"
            )
            warnings.warn(one if len(list(self._layers())) == 1 else several, stacklevel=2)
        if self._settings.recompute:
            nothing_to_recompute()
        self._busy = 0.0
        self._meter.start()

    def _layers(self) -> Iterator[tuple[str, nn.Module]]:
        for name, module in self._called.items():
            if isinstance(module, nn.Sequential) and is_plain_sequential(module):
                yield from layers_of(name, module)
            else:
                yield name, module

    @contextmanager
    def _busily(self, work: str) -> Iterator[None]:
        """The loss is counted with the forward, as nothing parts them here."""
        started = time.perf_counter()
        yield
        self._busy += time.perf_counter() - started
        if not self._first:
            self._computed(work, begun_minibatches(self._trainer)[0], started)

    @contextmanager
    def _drawing(self, minibatch: int) -> Iterator[None]:
        """Within it, random operations of the modules that a pipeline would hold draw from ``minibatch``'s generators.

        Only modules in which something may draw are touched, and those only for that long.
        """
        redirects = [
            Redirect(module, "forward", partial(self._run, name, module, minibatch))
            for name, module in self._module.named_modules()
            if module is not self._module and (self._first or may_draw(module)) and self._is_wanted(name, module)
        ]
        try:
            yield
        finally:
            for redirect in redirects:
                redirect.remove()

    def _is_wanted(self, name: str, module: nn.Module) -> bool:
        if is_compiled(module):
            return False
        return name in self._names if self._names is not None else any(p.requires_grad for p in module.parameters())

    def _run(self, name: str, module: nn.Module, minibatch: int, redirect: Redirect, *args: Any, **kwargs: Any) -> Any:
        """The redirected ``forward`` of module ``name``."""
        if self._inside:
            return redirect.original(*args, **kwargs)
        self._called.setdefault(name, module)
        self._inside = True
        try:
            with redirect.aside():
                return run_drawing(name, module, self._chance, minibatch, *args, **kwargs)
        finally:
            self._inside = False
