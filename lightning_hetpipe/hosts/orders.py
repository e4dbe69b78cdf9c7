"""Messages between a stage's host and the process of Lightning's loop, beside those of the stage itself.

    to the host      Do, and once the stage is set up its tasks
    from the host    results of tasks; Brought; Broken, last
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
    """Call a method that the host offers (``stage_host.Host``).

    Attributes:
        method, arguments: Its name, and what it is given.
        number: Number of the :class:`Brought` that has its result; None if nobody waits for that.
    """

    method: str
    arguments: Sequence[Any]
    number: int | None = None


class SetUp(NamedTuple):
    """The stage that the host is to be.

    Attributes:
        layers: As data.
        settings: Settings of all stages. ``before_pass`` and ``compile`` are None: they belong to the leader's process.
        planned: Its planned memory; None where there is no limit.
        timeout: Seconds after which a wait in which nothing moves ends.
        pad: Its pad; None where no device is emulated.
        group: Its group, where several devices divide its layers, as this process has it.
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


class CallServer(NamedTuple):
    """Call a parameter server.

    Attributes:
        method, timeout, header: As of ``Channel.call``; the header as text, which it is.
        body, into: Blocks, for the body of the call and of its answer.
    """

    address: str
    method: str
    timeout: float
    header: str = ""
    body: Held | None = None
    into: Held | None = None


class ServerAnswered(NamedTuple):
    """Answer to :class:`CallServer`.

    Attributes:
        refused, silent: Why the server has refused the call, or not answered; else None.
    """

    header: str = ""
    refused: str | None = None
    silent: str | None = None


class HandedOver(NamedTuple):
    """In the place of a tensor that the host of ``stage`` hands over to another one, by its number."""

    stage: int
    number: int


class Handed(NamedTuple):
    """From host to host: a tensor of ``minibatch``."""

    minibatch: int
    number: int
    tensor: Tensor


class Forgotten(NamedTuple):
    """From host to host: nobody wants any more what was handed over of ``minibatch``."""

    minibatch: int


class Run(NamedTuple):
    """An operator on tensors that the host has, and others.

    Attributes:
        operator: Its name; it is one of torch's own.
        args, kwargs: Its arguments, with a :class:`Held` for each tensor that the host has.
        results: Numbers of the tensors that it makes; None if its result is the answer.
        answers: Places of arguments of which those that are changed, and came with the order, are the answer.
    """

    operator: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    results: Sequence[int] | None
    answers: Sequence[int]


class Brought(NamedTuple):
    """Result of the :class:`Do` of that ``number``."""

    number: int
    result: Any


class KeptTensor(NamedTuple):
    """Looks of a gradient that the host keeps."""

    dtype: torch.dtype
    shape: Sequence[int]
    stride: Sequence[int]


class SparseTensor(NamedTuple):
    """Gradient of an embedding that asks for sparse ones."""

    indices: Tensor
    values: Tensor
    shape: Sequence[int]
    coalesced: bool


class Taken(NamedTuple):
    """Gradients that a host has handed over.

    Attributes:
        gradients: Of weights, by number.
        memory: What is counted of the stage's memory: of each quantity what it is now, and at the most.
        busy: Seconds that the stage has computed.
        padded: The record of a stage that is emulated, or None.
    """

    gradients: Mapping[int, KeptTensor | SparseTensor]
    memory: Sequence[Sequence[int]]
    busy: float
    padded: Padded | None


class Broken(NamedTuple):
    """The host cannot go on; its last message."""

    error: BaseException


RECORDS: Sequence[type[Any]] = [
    *(each for each in [*globals().values()] if isinstance(each, type) and each.__module__ == __name__),
    *(ChannelCounts, DeviceGroup, Pad, Padded, PlannedMemory, RandomGenerators, Segment, StageSettings),
]
"""Classes of messages, and classes of the values in messages."""
