"""Stages that a plan places on other machines than the last stage. Each has its host there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from secrets import token_hex
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from lightning_hetpipe.emulation import Emulation
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.hosts.remote_stage import RemoteStage
from lightning_hetpipe.hosts.wire import CODE, HostConnection
from lightning_hetpipe.pipeline.engine import Engine
from lightning_hetpipe.pipeline.graph_code import layers_as_data
from lightning_hetpipe.pipeline.plain_code import NotPlain
from lightning_hetpipe.pipeline.stage import Layer, Stage
from lightning_hetpipe.rules.schedule import Segment
from lightning_hetpipe.server.process.held_weights import HERE, WeightHolder
from lightning_hetpipe.server.process.sessions import SessionChannel
from lightning_hetpipe.server.transport.interface import Channel
from lightning_hetpipe.server.transport.security import Security, is_loopback, joined, split


class StageElsewhere(NamedTuple):
    """Place of a stage on another machine. ``node`` is the machine's name in the plan. ``accelerators`` are number and
    name, on that machine, of the stage's accelerator and then of each group member's, or empty for a CPU."""

    address: str
    node: str
    accelerators: Sequence[tuple[int, str]]


class StagesApart:
    """A maker of stages, which knows the stages on other machines.

    Args:
        places: Places of stages on other machines, by number.
        emulation: Emulation of the stages, if their devices are not here.
        worker: Number of the virtual worker, or None if there is only one.
    """

    def __init__(
        self, places: Mapping[int, StageElsewhere], security: Security, emulation: Emulation | None, worker: int | None
    ) -> None:
        self._places, self._security, self._emulation = places, security, emulation
        self._whose = "" if worker is None else f" of virtual worker {worker}"
        self._stages: list[RemoteStage] = []
        self._unreached: dict[int, str] = {}
        self._apart_from: dict[tuple[int, int], str] = {}

    def adopt(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Move states of ``optimizers`` to their weights."""
        for stage in self._stages:
            stage.adopt(optimizers)

    def holder(self, channel: Channel, parameter: Tensor) -> WeightHolder:
        """Return the holder of ``parameter`` for sending it to the server of ``channel``."""
        stage = self._owner(parameter)
        if stage is None:
            return HERE
        assert isinstance(channel, SessionChannel)
        inside = is_loopback(split(channel.address)[0]) and not is_loopback(self._machine(stage))
        why = f"{channel.address} is of this machine alone" if inside else stage.holder.cannot_reach(channel)
        if why is None:
            return stage.holder
        self._unreached.setdefault(stage.index, why)
        return HERE

    def machine(self, parameter: Tensor) -> str:
        """Return the machine that has ``parameter``, as the host of its address, or "" for this machine."""
        stage = self._owner(parameter)
        return "" if stage is None else self._machine(stage)

    def _owner(self, parameter: Tensor) -> RemoteStage | None:
        return next((stage for stage in self._stages if stage.has(parameter)), None)

    def _machine(self, stage: RemoteStage) -> str:
        return split(self._places[stage.index].address)[0]

    def close(self) -> None:
        with ExitStack() as ends:  # all end, even if one fails
            for stage in reversed(self._stages):
                ends.callback(stage.close)

    def make(self, *, index: int, segments: Sequence[Segment], layers: Sequence[Layer], **more: Any) -> Stage:
        """Make stage ``index``, with the arguments of :class:`~lightning_hetpipe.pipeline.stage.Stage`.

        Raises:
            SettingError: if it is planned for another machine, and a layer has no graph.
        """
        place = self._places.get(index)
        if place is None:
            return Stage(index=index, segments=segments, layers=layers, **more)
        try:
            CODE.write(layers_as_data([layers[number] for segment in segments for number in segment.layers]))
        except NotPlain as reason:
            raise SettingError(
                f"stage {index} is planned for another machine, and has to stay in this process, as {reason}; plan its"
                " layers for the node of the last stage"
            ) from None
        connect = partial(HostConnection, place.address, self._security, place.node)
        stage = RemoteStage(connect, place.accelerators, index=index, segments=segments, layers=layers, **more)
        stage.emulation, stage.whose = self._emulation, self._whose
        self._stages.append(stage)
        return stage

    def check(self, stages: Sequence[Stage]) -> None:
        """Refuse a stage here that is planned for another machine, and wait until hosts have the other stages' weights.

        Raises:
            SettingError: if a stage for another machine holds the loss, or a host lacks a device.
            torch.OutOfMemoryError: if a device has no room for the weights.
        """
        for index in self._places:
            if not isinstance(stages[index], RemoteStage):
                raise SettingError(
                    f"stage {index} is planned for another machine, and the loss follows it, which stays in this"
                    " process; plan its layers for the node of the last stage"
                )
        self.await_hosts()

    def await_hosts(self) -> None:
        """Wait until all hosts have done all orders so far."""
        for stage in self._stages:
            stage.await_host()

    def join(self, engine: Engine) -> None:
        """Connect hosts on other machines that can hand activations and gradients over to each other."""
        followers, away = (engine.following, engine.preceding), {stage.index: stage for stage in self._stages}
        listening: dict[int, tuple[str, str]] = {}
        for stage in self._stages:
            after, before = (
                {segment.index: to.stage for segment in stage.segments if (to := each[segment.index]) is not None}
                for each in followers
            )
            others = sorted(({*after.values(), *before.values()} & away.keys()) - {stage.index})
            for other in others:
                if other not in listening:
                    secret, its = token_hex(16), away[other]
                    listening[other] = joined(self._machine(its), its.listen(secret)), secret
            if not others:
                continue
            forwards, backwards = (
                {segment: others.index(to) for segment, to in each.items() if to in others} for each in (after, before)
            )
            reasons = zip(others, stage.hand_over([*map(listening.get, others)], forwards, backwards), strict=True)
            self._apart_from.update({(stage.index, other): why for other, why in reasons if why is not None})

    def tell_unreached(self) -> None:
        """Log what goes by way of this process. Called after :meth:`join`, and :meth:`holder` for all weights."""
        for (index, other), why in self._apart_from.items():
            rank_zero_info(
                f"hetpipe: what stage {index} gives to stage {other} goes by way of this process, as its host cannot"
                f" reach the other one: {why}"
            )
        for index, why in self._unreached.items():
            rank_zero_info(
                f"hetpipe: updates of stage {index} go to the servers by way of this process, as its host cannot call"
                f" them itself: {why}; WSPCallback(servers=[...]) names others that it may reach"
            )

    def tell(self) -> None:
        """Log where stages on other machines are."""
        if self._places:
            told = "; ".join(f"stage {index} is at {address}" for index, (address, *_) in self._places.items())
            rank_zero_info(f"hetpipe: {told}")
