"""Messages between a stage's host and the process of Lightning's loop, besides the stage's own messages.

    to the host      Do, and once the stage is set up its tasks
    from the host    results of tasks, Brought, and Broken at the end
    host to host     Handed, Forgotten

They travel in one order. So a version is at the host before the first minibatch that uses it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_hetpipe.emulation import Pad, Padded
from lightning_hetpipe.pipeline.memory import PlannedMemory
from lightning_hetpipe.pipeline.random.generators import RandomGenerators
from lightning_hetpipe.pipeline.split.member_pool import DeviceGroup
from lightning_hetpipe.pipeline.stage import StageSettings
from lightning_hetpipe.rules.channel_layouts import ChannelCounts
from lightning_hetpipe.rules.schedule import Segment


class Held(NamedTuple):
    """A tensor that the host has, by its number."""

    number: int


class Do(NamedTuple):
    """Call of a method that the host offers (``stage_host.Host``). ``number`` is the number of the :class:`Brought`
    with its result, or None if nobody waits for the result."""

    method: str
    arguments: Sequence[Any]
    number: int | None = None


class SetUp(NamedTuple):
    """Settings from which a host makes its stage.

    Attributes:
        layers: Layers as data.
        settings: Settings of all stages. ``before_pass`` and ``compile`` are None: they belong to the leader's process.
        planned: Planned memory of the stage, or None for no limit.
        timeout: Seconds after which a wait in which nothing moves ends.
        pad: Pad of the stage, or None if no device is emulated.
        group: Devices that divide its layers, if several do, as the leader's process sees them.
    """

    stage: int
    segments: Sequence[Segment]
    layers: Sequence[Any]
    settings: StageSettings
    planned: PlannedMemory | None
    visits: int
    timeout: float
    pad: Pad | None
    modes: Sequence[Any]
    group: DeviceGroup | None


class ServerAnswered(NamedTuple):
    """Answer of a parameter server. ``refused`` or ``silent`` has the reason if there is no answer."""

    header: str = ""
    refused: str | None = None
    silent: str | None = None


class HandedOver(NamedTuple):
    """Replacement of a tensor that the host of ``stage`` hands over to another host, by its number."""

    stage: int
    number: int


class Handed(NamedTuple):
    """A tensor of ``minibatch``, from host to host."""

    minibatch: int
    number: int
    tensor: Tensor


class Forgotten(NamedTuple):
    """Notice from host to host that no task needs the tensors of ``minibatch`` any more."""

    minibatch: int


class Run(NamedTuple):
    """An operator on tensors of the host and other tensors.

    Attributes:
        operator: Name of an operator of torch's own.
        args, kwargs: Its arguments, with a :class:`Held` for each tensor of the host.
        results: Numbers of the tensors that it makes, or None if its result is the answer.
    """

    operator: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    results: Sequence[int] | None


class Brought(NamedTuple):
    """Result of the :class:`Do` of this ``number``."""

    number: int
    result: Any


class KeptTensor(NamedTuple):
    """Looks of a gradient that the host keeps."""

    dtype: torch.dtype
    shape: Sequence[int]
    stride: Sequence[int]


class SparseTensor(NamedTuple):
    """Gradient of an embedding that asks for sparse gradients."""

    indices: Tensor
    values: Tensor
    shape: Sequence[int]
    coalesced: bool


class Taken(NamedTuple):
    """Gradients that a host has handed over.

    Attributes:
        gradients: Gradients of weights, by number.
        memory: Present value and maximum of each counted quantity of the stage's memory.
        busy: Seconds that the stage has computed.
        padded: Record of an emulated stage, or None.
    """

    gradients: Mapping[int, KeptTensor | SparseTensor]
    memory: Sequence[Sequence[int]]
    busy: float
    padded: Padded | None


class Broken(NamedTuple):
    """Last message of a host that cannot go on."""

    error: BaseException


RECORDS: Sequence[type[Any]] = [
    *(each for each in [*globals().values()] if isinstance(each, type) and each.__module__ == __name__),
    *(ChannelCounts, DeviceGroup, Pad, Padded, PlannedMemory, RandomGenerators, Segment, StageSettings),
]
"""Classes of messages, and classes of the values in messages."""
