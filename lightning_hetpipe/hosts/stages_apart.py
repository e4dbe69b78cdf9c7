"""Stages that a plan has on other machines than the last one, each of which has its host there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from secrets import token_hex
from typing import Any

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

NO_ACCELERATORS: Mapping[int, Sequence[tuple[int, str]]] = {}
NO_NODES: Mapping[int, str] = {}


class StagesApart:
    """Makes stages, and knows those on other machines.

    Args:
        addresses: Of the hosts of stages that are on other machines, by their numbers.
        security: Certificates and token for these.
        emulation: Of the stages, where their devices are not here.
        accelerators: Number and name, on their machines, of the accelerators that stages of ``addresses`` are on, and
            then of each member of their groups.
        nodes: Names of their machines in the plan.
        worker: Number of the virtual worker; None where there is but one.
    """

    def __init__(
        self,
        addresses: Mapping[int, str],
        security: Security,
        emulation: Emulation | None = None,
        accelerators: Mapping[int, Sequence[tuple[int, str]]] = NO_ACCELERATORS,
        nodes: Mapping[int, str] = NO_NODES,
        worker: int | None = None,
    ) -> None:
        self._addresses, self._security, self._emulation = addresses, security, emulation
        self._accelerators, self._nodes = accelerators, nodes
        self._whose = "" if worker is None else f" of virtual worker {worker}"
        self._stages: list[RemoteStage] = []
        self._unreached: dict[int, str] = {}
        self._apart_from: dict[tuple[int, int], str] = {}

    def adopt(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Have states of ``optimizers`` where their weights are."""
        for stage in self._stages:
            stage.adopt(optimizers)

    def holder(self, channel: Channel, parameter: Tensor) -> WeightHolder:
        """The holder of ``parameter``, where it is to be sent to the server that ``channel`` leads to."""
        stage = self._owner(parameter)
        if stage is None:
            return HERE
        assert isinstance(channel, SessionChannel)
        inside = is_loopback(split(channel.address)[0]) and not is_loopback(split(self._addresses[stage.index])[0])
        why = f"{channel.address} is of this machine alone" if inside else stage.holder.cannot_reach(channel)
        if why is None:
            return stage.holder
        self._unreached.setdefault(stage.index, why)
        return HERE

    def machine(self, parameter: Tensor) -> str:
        """The machine that has ``parameter``, as the host of its address; empty for this one."""
        stage = self._owner(parameter)
        return "" if stage is None else self._machine(stage)

    def _owner(self, parameter: Tensor) -> RemoteStage | None:
        return next((stage for stage in self._stages if stage.has(parameter)), None)

    def _machine(self, stage: RemoteStage) -> str:
        return split(self._addresses[stage.index])[0]

    def close(self) -> None:
        """End the hosts."""
        with ExitStack() as ends:  # of all, also where one fails
            for stage in reversed(self._stages):
                ends.callback(stage.close)

    def make(self, *, index: int, segments: Sequence[Segment], layers: Sequence[Layer], **more: Any) -> Stage:
        """Make stage ``index``, with the arguments of :class:`~lightning_hetpipe.pipeline.stage.Stage`.

        Raises:
            SettingError: if it is planned for another machine, and a layer has no graph.
        """
        address = self._addresses.get(index)
        if address is None:
            return Stage(index=index, segments=segments, layers=layers, **more)
        try:
            CODE.write(layers_as_data([layers[number] for segment in segments for number in segment.layers]))
        except NotPlain as reason:
            raise SettingError(
                f"stage {index} is planned for another machine, and has to stay in this process, as {reason}; plan its"
                " layers for the node of the last stage"
            ) from None
        connect = partial(HostConnection, address, self._security, self._nodes.get(index, ""))
        own = self._accelerators.get(index, ())
        stage = RemoteStage(connect, own, index=index, segments=segments, layers=layers, **more)
        stage.emulation, stage.whose = self._emulation, self._whose
        self._stages.append(stage)
        return stage

    def check(self, stages: Sequence[Stage]) -> None:
        """Refuse a stage that is planned for another machine, and is here; wait until hosts have the others' weights.

        Raises:
            SettingError: as it holds the loss, or a host has not got a device.
            torch.OutOfMemoryError: if a device has no room for the weights.
        """
        for index in self._addresses:
            if not isinstance(stages[index], RemoteStage):
                raise SettingError(
                    f"stage {index} is planned for another machine, and the loss follows it, which stays in this"
                    " process; plan its layers for the node of the last stage"
                )
        for stage in self._stages:
            stage.await_weights()

    def await_hosts(self) -> None:
        """Wait until all hosts are ready for the first minibatch, once they were told all that they need for it."""
        for stage in self._stages:
            stage.await_host()

    def join(self, engine: Engine) -> None:
        """Have hosts on other machines hand activations and gradients over to each other, where they can."""
        followers, away = engine.followers, {stage.index: stage for stage in self._stages}
        stages = {segment.index: stage.index for stage in engine.stages for segment in stage.segments}
        listening: dict[int, tuple[str, str]] = {}
        for stage in self._stages:
            after, before = (
                {segment.index: stages[to] for segment in stage.segments if (to := each[segment.index]) is not None}
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
        """Say what goes by this process, once hosts were joined, and :meth:`holder` was asked for all weights."""
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
        """Say where stages on other machines are, once for all virtual workers."""
        if self._addresses:
            told = "; ".join(f"stage {index} is at {address}" for index, address in self._addresses.items())
            rank_zero_info(f"hetpipe: {told}")
