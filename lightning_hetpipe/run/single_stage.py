"""One stage with one minibatch in flight: nothing to pipeline, so Lightning's own steps run, in its own thread.

Only random numbers are not plain: inside the modules that a pipeline would hold, random operations draw from the
minibatch's generators (law L7), so that results do not depend on the number of stages. Nothing is captured, copied or
versioned, so what ``training_step`` does to its modules is not restricted, and no thread is started.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning as L
from torch import nn

from lightning_hetpipe.capture.compiled_modules import is_compiled, look_through
from lightning_hetpipe.capture.interceptor import Interceptor, ModuleCall
from lightning_hetpipe.capture.pieces import Piece, layers_of, named_pieces, never_called
from lightning_hetpipe.pipeline.random.generators import RandomGenerators, may_draw
from lightning_hetpipe.placement.layout import device_bytes, device_name
from lightning_hetpipe.reporting.meter import Meter
from lightning_hetpipe.reporting.report import RunReport, StageReport
from lightning_hetpipe.rules.spans import BACKWARD, FORWARD
from lightning_hetpipe.run.lifecycle import Around, Extension
from lightning_hetpipe.run.run_settings import RunSettings, nothing_to_recompute, returned_none


def is_single_stage(settings: RunSettings) -> bool:
    """Tell from ``settings`` whether there is one stage with one minibatch in flight.

    Not so where there is something to compile, to emulate, to compare with a plan, or to synchronise, which is a
    stage's work.
    """
    if settings.compile is not None or settings.planned or settings.virtual_workers > 1:
        return False
    return settings.is_one_stage and not settings.may_run_ahead


class SingleStage(Extension):
    """Steps of a fit without a pipeline, of which it keeps the numbers and the random generators."""

    def __init__(
        self,
        module: L.LightningModule,
        settings: RunSettings,
        generators: RandomGenerators,
        computed: Callable[[str, int, float], None],
    ) -> None:
        self._computed = computed
        self._module = module
        self._settings = settings
        self._names = named_pieces(module, settings.module)
        self._generators = generators
        self._called: dict[str, Piece] = {}
        self._first = True
        self._meter = Meter(1)
        self._busy = 0.0
        draws = any(is_compiled(part) and may_draw(part) for part in module.modules())
        self._redirects = look_through(module) if draws else []

    @contextmanager
    def inline_step(self, minibatch: int) -> Iterator[None]:
        with self._busily(FORWARD, minibatch), self._drawing(minibatch):
            yield

    def inline_output(self, minibatch: int, args: Sequence[Any], output: Any) -> None:
        if output is None:
            raise returned_none()
        if self._first:
            self._begin()
        else:
            self._meter.count(args[0] if args else None)

    def inline_backward(self, minibatch: int) -> Around:
        return self._busily(BACKWARD, minibatch)

    def closed(self) -> None:
        for redirect in self._redirects:
            redirect.remove()

    def report(self) -> RunReport:
        if self._first:
            return RunReport()
        self._meter.stop()
        seconds, parameters = max(self._meter.seconds, 1e-9), self._module.parameters()
        layers = self._layers()
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
            layers = list(self._layers().values())
            is_one = len(layers) == 1 and not any(True for _ in layers[0].children())  # else it could be captured
            warnings.warn(one if is_one else several, stacklevel=2)
        if self._settings.recompute:
            nothing_to_recompute()
        self._busy = 0.0
        self._meter.start()

    def _layers(self) -> dict[str, nn.Module]:
        return dict(layer for name, piece in self._called.items() for layer in layers_of(name, piece.module))

    @contextmanager
    def _busily(self, work: str, minibatch: int) -> Iterator[None]:
        """The loss is counted with the forward, as nothing parts them here."""
        started = time.perf_counter()
        yield
        self._busy += time.perf_counter() - started
        if not self._first:
            self._computed(work, minibatch, started)

    @contextmanager
    def _drawing(self, minibatch: int) -> Iterator[None]:
        """Within it, random operations of the modules that a pipeline would hold draw from ``minibatch``'s generators.

        Only modules in which something may draw are touched, and those only for that long.
        """
        modules = [
            (name, module)
            for name, module in self._module.named_modules()
            if module is not self._module and (self._first or may_draw(module)) and self._is_wanted(name, module)
        ]

        calls = Counter[str]()

        def run(call: ModuleCall) -> Any:
            piece = self._called.setdefault(call.name, Piece.of(call.name, call.module))
            ordinal = calls[call.name]
            calls[call.name] += 1
            with call.own_forward():
                return piece.run(self._generators, minibatch, call.args, call.kwargs, ordinal)

        with Interceptor(modules, run, one_step=True):
            yield

    def _is_wanted(self, name: str, module: nn.Module) -> bool:
        if is_compiled(module):
            return False
        return name in self._names if self._names is not None else any(p.requires_grad for p in module.parameters())
