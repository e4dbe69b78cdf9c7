"""Weights of a VW at their holders: processes that have some of its parameters, and send their updates themselves.

The holder is the client's process, except for stages on other machines. If the server is on the stage's machine, the
weights of the stage cross no network.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from lightning_hetpipe.server.protocol.identifiers import Refusal, RemoteFault
from lightning_hetpipe.server.protocol.messages import Answer, Load, Parameter, Read, ShardRequest, StageUpdate
from lightning_hetpipe.server.protocol.shard import ShardLayout, block_of, copy_finite, memory_of
from lightning_hetpipe.server.transport.interface import Channel


class WeightHolder(Protocol):
    """Process that has parameters, and calls servers for the client."""

    def block(self, size: int) -> Tensor:
        """Make a block of zeroed bytes in that process."""
        ...

    def call(
        self, channel: Channel, method: str, header: bytes, body: Tensor | None, into: Tensor | None, timeout: float
    ) -> bytes:
        """Call the server behind ``channel`` as `Channel.call` does, with blocks as bodies."""
        ...


class _Here:
    """Holder in the client's own process."""

    def block(self, size: int) -> Tensor:
        return block_of(size)

    def call(
        self, channel: Channel, method: str, header: bytes, body: Tensor | None, into: Tensor | None, timeout: float
    ) -> bytes:
        sent, taken = ([] if block is None else [memory_of(block)] for block in (body, into))
        return channel.call(method, header, sent, taken, timeout)


HERE: WeightHolder = _Here()


class WeightPart:
    """Parameters of one server that one holder has.

    Args:
        indices: The server's parameters, by their indices in the model.
        parameters: All parameters of the model.
        numbers: Parameters of the part, by their numbers in the server's shard.

    Attributes:
        part: Numbers of the parameters as in a ``StageUpdate``.
        indices: Indices of the part's parameters in the model.
        weights, weight_views: Two blocks, of the last pull and of the next, and the parameters in these blocks.
        update, update_views: Block of the update, and the parameters in it.
    """

    def __init__(
        self, indices: Sequence[int], parameters: Sequence[Parameter], numbers: Sequence[int], holder: WeightHolder
    ) -> None:
        self.part = () if len(numbers) == len(indices) else tuple(numbers)
        self.indices = [indices[number] for number in numbers]
        self.holder = holder
        self._parameters = tuple(parameters[index] for index in self.indices)
        weights, update = (ShardLayout(self._parameters, update=which) for which in (False, True))
        self.weights = [holder.block(weights.size) for _ in range(2)]
        self.weight_views = [weights.views(block) for block in self.weights]
        self.update = holder.block(update.size)
        self.update_views = update.views(self.update)

    def take(self, update: Sequence[Tensor]) -> str | None:
        """Copy ``update``, of all the model's parameters, into the part's block. Return the name of the first parameter
        that is not finite, or None. Only the server checks parameters in other processes."""
        for parameter, index, view in zip(self._parameters, self.indices, self.update_views, strict=True):
            if self.holder is HERE:
                if not copy_finite(view, update[index]):
                    return parameter.name
            elif update[index] is not view:
                view.copy_(update[index])
        return None


@dataclass(frozen=True)
class ShardCall:
    """Call of a server's shard, with a body or with room for the answer's body."""

    server: int
    message: ShardRequest
    by: WeightHolder = HERE
    body: Tensor | None = None
    into: Tensor | None = None


class HeldWeights:
    """Weights and updates of a VW at their holders. At first this process is the holder of all parameters.

    ``parameters`` are all of the model. ``placement`` has the indices of each server's parameters.
    """

    def __init__(self, parameters: Sequence[Parameter], placement: Sequence[Sequence[int]]) -> None:
        self._parameters = parameters
        self._placement = placement
        self._parts = self._held_by(lambda server, index: HERE)

    def hold(self, holder: Callable[[int, int], WeightHolder], newest: int) -> None:
        """Move the weights in the blocks ``newest``, 0 or 1, to other holders. ``holder`` returns the holder of a
        parameter, given its server and its index."""
        before, self._parts = self.weights(newest), self._held_by(holder)
        for view, value in zip(self.weights(newest), before, strict=True):
            view.copy_(value)

    def weights(self, newest: int) -> list[Tensor]:
        """Return all parameters in the blocks ``newest``."""
        return self._in_order(lambda part: part.weight_views[newest])

    def update(self) -> list[Tensor]:
        """Return the update of all parameters, as views of its blocks."""
        return self._in_order(lambda part: part.update_views)

    def take(self, update: Sequence[Tensor]) -> str | None:
        """Copy an update into all parts, as :meth:`WeightPart.take` does."""
        names = (part.take(update) for part in itertools.chain(*self._parts))
        return next((name for name in names if name is not None), None)

    def calls(self, server: int, message: ShardRequest, newest: int) -> list[ShardCall]:
        """Return the calls for ``message`` to ``server``, given the blocks ``newest`` of the last pull."""
        parts = self._parts[server]
        if isinstance(message, Load):
            return [ShardCall(server, message, body=self._whole(server, newest))]
        if isinstance(message, StageUpdate):
            return [ShardCall(server, replace(message, part=own.part), own.holder, body=own.update) for own in parts]
        if isinstance(message, Read):
            return [
                ShardCall(server, replace(message, part=own.part), own.holder, into=own.weights[1 - newest])
                for own in parts
            ]
        return [ShardCall(server, message)]

    def _held_by(self, holder: Callable[[int, int], WeightHolder]) -> list[list[WeightPart]]:
        """Make the parts of each server."""
        found: list[list[WeightPart]] = []
        for server, indices in enumerate(self._placement):
            numbers: dict[WeightHolder, list[int]] = {}
            for number, index in enumerate(indices):
                numbers.setdefault(holder(server, index), []).append(number)
            parts = numbers.items() or [(HERE, list[int]())]
            found.append([WeightPart(indices, self._parameters, own, each) for each, own in parts])
        return found

    def _in_order(self, views: Callable[[WeightPart], Sequence[Tensor]]) -> list[Tensor]:
        found: dict[int, Tensor] = {}
        for part in itertools.chain(*self._parts):
            found.update(zip(part.indices, views(part), strict=True))
        return [found[index] for index in sorted(found)]

    def _whole(self, server: int, newest: int) -> Tensor:
        """Return a server's weights of the last pull in one block of this process."""
        parts, indices = self._parts[server], self._placement[server]
        if len(parts) == 1 and parts[0].holder is HERE:
            return parts[0].weights[newest]
        layout = ShardLayout(tuple(self._parameters[index] for index in indices), update=False)
        block, values = block_of(layout.size), self.weights(newest)
        for index, view in zip(indices, layout.views(block), strict=True):
            view.copy_(values[index])
        return block


def decisive(answers: Sequence[Answer | RemoteFault | None]) -> Answer | RemoteFault | None:
    """Return the answer that decides, of a server's answers to calls for its parts. None is a missing answer."""

    def precedence(answer: Answer | RemoteFault | None) -> int:
        if isinstance(answer, RemoteFault):
            return 2 if answer.refusal is Refusal.STALE else 0  # a stale request had arrived before
        return 1 if answer is None else 3

    return min(answers, key=precedence)
