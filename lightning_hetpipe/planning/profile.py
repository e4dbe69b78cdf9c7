"""What is known of a model's layers: how long each takes on which device, and how many bytes it has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.planning.cluster import Device


class Times(NamedTuple):
    """Seconds that a layer takes for one minibatch."""

    forward: float
    backward: float
    update: float = 0.0

    def divided(self, speed: float) -> Times:
        return Times(*(seconds / speed for seconds in self))


@dataclass(frozen=True)
class LayerBytes:
    """The bytes of one layer, named ``name``; the same on every device.

    Attributes:
        parameters: Of its weights.
        kept: Of what its forward keeps until its backward, inputs and outputs included, of one minibatch.
        output: Of what crosses a cut behind it; a gradient of as many comes back.
    """

    name: str
    parameters: int
    kept: int
    output: int


@dataclass(frozen=True)
class Profile:
    """A model's ``layers``, and ``times`` of each layer by the name of a device.

    Attributes:
        model: What it is of, for people.
        samples: In a minibatch.
        layers: In order.
        times: For each device's name, of each layer.
        memory: Bytes that each of these devices has, where the profile knows.
    """

    model: str
    samples: int
    layers: Sequence[LayerBytes]
    times: Mapping[str, Sequence[Times]]
    memory: Mapping[str, int]

    def times_on(self, device: Device) -> Sequence[Times]:
        """Of each layer on ``device``: those of its name, or of the only device that was profiled; by its speed.

        Raises:
            SettingError: if there is neither.
        """
        if device.name in self.times:
            known = self.times[device.name]
        elif len(self.times) == 1:
            (known,) = self.times.values()
        else:
            raise SettingError(
                f"the profile of {self.model} has no times of '{device.name}'; it has those of"
                f" {', '.join(sorted(self.times))}"
            )
        return [each.divided(device.speed) for each in known]
