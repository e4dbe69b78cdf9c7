"""Profile of a model: seconds of each layer on each type of device, and bytes of each layer."""

from __future__ import annotations

import math
import operator
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Annotated, NamedTuple

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.planning.model.catalogue import canonical, gpus, known, nearest_gpu
from lightning_hetpipe.planning.model.cluster import Device, Link
from lightning_hetpipe.settings import Bounds, Key, Size

Seconds = Annotated[float, Bounds(0)]
Bytes = Annotated[int, Bounds(0)]
Layer = Annotated[int, Bounds(0)]
"""Index of a layer among all layers of a model."""


class Times(NamedTuple):
    """Seconds that a layer takes for one minibatch."""

    forward: Annotated[Seconds, Key("forward_s")]
    backward: Annotated[Seconds, Key("backward_s")]
    update: Annotated[Seconds, Key("update_s")] = 0.0

    def divided(self, speed: float) -> Times:
        return Times(*(seconds / speed for seconds in self))


SHORTEST = Times(20e-6, 40e-6)
"""Seconds that any layer takes on a GPU: about four kernels in its forward, eight in its backward, and 5 us per launch.

An estimate for times that are derived from a CPU, where small layers take less than the ratio of speeds says.
"""


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of one layer, which are the same on every device.

    Attributes:
        parameters: Weights.
        kept: What the forward of one minibatch keeps until the backward, inputs and outputs included.
        output: Output. Its gradient has the same size.
        given: Input, such as the batch. 0 if the input is the output of the layer before.
        changes_buffers: Whether the forward changes buffers, as BatchNorm's does.
        frozen: Weights that are not trained. ``parameters`` includes them.
    """

    name: str
    parameters: Annotated[Bytes, Key("parameter_bytes")]
    kept: Annotated[Bytes, Key("kept_bytes")]
    output: Annotated[Bytes, Key("output_bytes")]
    given: Annotated[Bytes, Key("input_bytes")] = 0
    changes_buffers: bool = False
    frozen: Annotated[Bytes, Key("frozen_bytes")] = 0


@dataclass(frozen=True)
class UserBytes:
    """Bytes that ``training_step`` takes beside the layers, on the device of the last stage.

    Attributes:
        trained: Trained weights of modules that are not pipelined.
        frozen: Frozen weights of these modules, and their buffers.
        batch: One minibatch. All minibatches in flight lie there.
        kept: What user code before the last pipelined module keeps of each minibatch until its backward.
        loss: What user code behind that module keeps of one minibatch. Its backward follows at once.
    """

    trained: Annotated[Bytes, Key("trained_bytes")] = 0
    frozen: Annotated[Bytes, Key("frozen_bytes")] = 0
    batch: Annotated[Bytes, Key("batch_bytes")] = 0
    kept: Annotated[Bytes, Key("kept_bytes")] = 0
    loss: Annotated[Bytes, Key("loss_bytes")] = 0

    def total(self, in_flight: int, state: float) -> int:
        """Return the bytes for ``in_flight`` minibatches and versions, with ``state`` optimizer bytes per weight byte.

        The sum includes the gradients of two minibatches, and ``loss`` bytes for gradients of the loss's backward.
        """
        weights = self.frozen + int((3 + in_flight + state) * self.trained)
        return weights + in_flight * (self.batch + self.kept) + 2 * self.loss


class Width(NamedTuple):
    """Seconds that a device takes for ``part`` of a layer's channels, like :class:`Times` for all channels."""

    part: Annotated[float, lambda part: 0 < part <= 1, "more than 0 and at most 1"]
    forward: Annotated[Seconds, Key("forward_s")]
    backward: Annotated[Seconds, Key("backward_s")]
    update: Annotated[Seconds, Key("update_s")] = 0.0


@dataclass(frozen=True)
class LayerWidths:
    """Division of one layer by its channels among the devices of a group: the number of units, and the parts' times.

    Attributes:
        run: First layer of the run that contains this layer. Devices hand their channels on within a run.
        units: Number of channels, groups of channels or heads of each divided module, by name as in a plan's
            :class:`~lightning_hetpipe.planning.plan.planned_worker.PlannedSplit`. Empty for a layer such as an
            activation, which works on any channels.
        sums: Whether outputs of the devices must be added, as for the second linear layer of a transformer's MLP.
        measured: For each device's name, times of some parts in ascending order. The last part is the whole layer.
    """

    run: int
    units: Mapping[str, Size] = field(default_factory=dict)
    sums: bool = False
    measured: Mapping[str, Sequence[Width]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "measured", {name: tuple(own) for name, own in self.measured.items()})

    def seconds(self, device: str | None, whole: float, units: int) -> list[float]:
        """Return the seconds of 0, 1, ... ``units`` of ``units`` equal parts of a layer, which never decrease.

        Between two measured parts the time of the larger part counts, since kernels compute channels in blocks. If
        ``device`` was not measured, another device stands for it. Measured times are scaled to ``whole``, the seconds
        of forward and backward of the whole layer. If nothing was measured, equal parts take equal times.
        """
        own = self.measured.get(device or "") or next(iter(self.measured.values()), ())
        known = [each.forward + each.backward for each in own]
        if not known or not known[-1]:
            return [whole * count / units for count in range(units + 1)]
        least = [*accumulate(reversed(known), min)][::-1]  # what disturbed a measurement has added to it
        places = [round(each.part * units, 6) for each in own]  # a float's last digits put no part behind its own
        at = [min(bisect_left(places, count), len(least) - 1) for count in range(1, units + 1)]
        return [0.0, *(least[place] / known[-1] * whole for place in at)]


def layers_of_runs(widths: Mapping[int, LayerWidths], layers: Iterable[int]) -> list[list[int]]:
    """Group ``layers`` by their run, in order."""
    found: dict[int, list[int]] = {}
    for layer in sorted(layers):
        found.setdefault(widths[layer].run, []).append(layer)
    return [*found.values()]


@dataclass(frozen=True)
class Profile:
    """Layers of a model, and times of each layer by the name of a device.

    Attributes:
        samples: Samples in a minibatch.
        times: For each device's name, the median times of each layer.
        memory: Bytes of these devices, if known.
        estimated: Names of devices with estimated times, each with the name of the device from which they come.
        calls: If a step calls a module several times, the layers of each call in order: first layer, and layer behind
            the last. Times and bytes are sums over all calls of a minibatch.
        user: What user code takes beside the layers.
        speeds: Measured FLOP/s of devices that the catalogue does not know, such as a CPU, by the rule of
            :func:`~lightning_hetpipe.planning.model.catalogue.speed_by`.
        widths: How a group of devices may divide a layer, by the layer's index. Other layers run whole.

    Raises:
        SettingError: if a device does not have one time for each layer, or if calls do not cover all layers.
    """

    model: str
    samples: int
    layers: Sequence[LayerBytes]
    times: Mapping[str, Sequence[Times]]
    memory: Mapping[str, int]
    estimated: Mapping[str, str] = field(default_factory=dict)
    calls: Sequence[tuple[int, int]] = ()
    user: UserBytes = field(default_factory=UserBytes)
    speeds: Mapping[str, float] = field(default_factory=dict)
    widths: Mapping[int, LayerWidths] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        object.__setattr__(self, "times", {name: tuple(times) for name, times in self.times.items()})
        for name, times in self.times.items():
            if len(times) != len(self.layers):
                raise SettingError(
                    f"the profile of {self.model} has {len(times)} times of '{name}' and {len(self.layers)} layers; one"
                    " for each is needed"
                )
        for layer in self.layers:
            if layer.frozen > layer.parameters:
                raise SettingError(
                    f"the profile of {self.model} has frozen_bytes={layer.frozen} in '{layer.name}', of"
                    f" parameter_bytes={layer.parameters}; profile anew"
                )
        if (last := max([0, *self.widths, *(each.run for each in self.widths.values())])) >= len(self.layers) > 0:
            raise SettingError(
                f"the profile of {self.model} has widths of layer {last}, and {len(self.layers)} layers; profile anew"
            )
        object.__setattr__(self, "calls", tuple(self.calls))
        starts, ends = [first for first, _ in self.pieces], [after for _, after in self.pieces]
        if [*starts, len(self.layers)] != [0, *ends] or any(map(operator.ge, starts, ends)):
            raise SettingError(
                f"the profile of {self.model} has calls of the layers {', '.join(map(str, self.pieces))}, and these are"
                f" not all of its {len(self.layers)} layers, each once"
            )

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """Layers of each module that is called: the first layer, and the layer behind the last."""
        return sorted({*self.calls}) or [(0, len(self.layers))]

    def called(self, layer: int) -> int:
        """Count the calls of ``layer`` in a minibatch."""
        return sum(first <= layer < after for first, after in self.calls) or 1

    def crossing(self, link: Link, boundary: int) -> float:
        """Return the seconds of one minibatch's values over ``link`` in one direction, across ``boundary``."""
        calls = self.called(boundary - 1)
        return calls * link.seconds(self.layers[boundary - 1].output // calls)

    def times_on(self, device: Device) -> Sequence[Times]:
        """Return the times of each layer on ``device``: times under its name, or of the only profiled device.

        The times are divided by the device's speed. Beside devices with estimated times, a device of another name must
        say its speed, as its name may be a typing error.

        Raises:
            SettingError: if neither applies.
        """
        profiled = [own for name, own in self.times.items() if name not in self.estimated] or [*self.times.values()]
        if (name := self.name_of(device)) is not None:
            measured = self.times[name]
        elif len(profiled) == 1 and (device.speed != 1.0 or len(self.times) == 1):
            (measured,) = profiled
        else:
            by_speed = ", or say its speed relative to the device that was profiled" if len(profiled) == 1 else ""
            way_out = f"; profile the model on it, name another device{by_speed}"
            raise SettingError(
                f"the profile of {self.model} has no times of '{device.name}'; it has those of"
                f" {', '.join(sorted(self.times))}, and the catalogue of GPUs does not know it"
                f"{nearest_gpu(device.name, [*gpus(), *self.times]) or way_out}"
            )
        return list(measured) if device.speed == 1.0 else [each.divided(device.speed) for each in measured]

    def name_of(self, device: Device) -> str | None:
        """Return the name of ``device`` in this profile, perhaps in another spelling, or None without its times."""
        if device.name in self.times:
            return device.name
        mine = {canonical(name): name for name in self.times}
        return mine.get(canonical(device.name))

    def with_estimates(self, devices: Sequence[Device], precision: str = "32") -> Profile:
        """Add times of ``devices`` that only the catalogue knows, and list these devices in ``estimated``.

        The times are derived from the profiled GPU of nearest speed
        (:meth:`~lightning_hetpipe.planning.model.catalogue.Gpu.speed`). If no GPU of the catalogue was profiled, as on
        a machine with a CPU only, times are derived from the profiled device's speed in ``speeds``. They are at least
        :data:`SHORTEST`. Without such a speed, the only profiled device stands for the fastest of ``devices``, so that
        only ratios are estimated. Devices that say their speed stay as they are.
        """
        unknown = {
            d.name: gpu for d in devices if d.speed == 1.0 and (gpu := known(d.name)) and self.name_of(d) is None
        }
        bases = {name: gpu.speed(precision) for name in self.times if (gpu := known(name)) is not None}
        bases = bases or {name: self.speeds[name] for name in self.times if name in self.speeds}
        if len(self.times) == 1 and not bases:
            bases = dict.fromkeys(self.times, max((gpu.speed(precision) for gpu in unknown.values()), default=1.0))
        times, estimated = dict(self.times), dict(self.estimated)
        for name, gpu in unknown.items() if bases else ():
            speed = gpu.speed(precision)
            base = min(bases, key=lambda each: abs(math.log(speed / bases[each])))
            least = SHORTEST if self.is_scaled(base) else Times(0.0, 0.0)
            times[name] = [Times(*map(max, each.divided(speed / bases[base]), least)) for each in self.times[base]]
            estimated[name] = base
        return replace(self, times=times, estimated=estimated)

    def is_scaled(self, base: str) -> bool:
        """Return True if estimates from ``base`` follow from its measured speed: the catalogue does not know it."""
        return base in self.speeds and known(base) is None

    def joined(self, other: Profile) -> Profile:
        """Merge with ``other``, a profile of the same layers on other devices. Values of ``other`` take precedence.

        Raises:
            SettingError: if layers, calls or the size of minibatches differ.
        """
        if (other.layers, other.samples, other.calls) != (self.layers, self.samples, self.calls):
            raise SettingError(
                f"the profiles of {self.model} and {other.model} are of different layers or minibatches; profile anew"
            )
        kept = {name: base for name, base in self.estimated.items() if name not in other.times}
        return replace(
            self,
            times={**self.times, **other.times},
            memory={**self.memory, **other.memory},
            estimated={**kept, **other.estimated},
            speeds={**self.speeds, **other.speeds},
            widths={
                layer: replace(own, measured={**self.widths[layer].measured, **own.measured})
                if layer in self.widths
                else own
                for layer, own in {**self.widths, **other.widths}.items()
            },
        )
