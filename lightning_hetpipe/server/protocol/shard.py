"""One server's share of w_global: whole parameters, to which updates are added in the commit order (law L4).

    content        goes to        when
    ------------------------------------------------------------------------------------------------
    <epoch>        <generation>   fresh; weights of that generation begin to arrive over it
    <generation>   loaded         they are there
    loaded         <generation>   weights of a later generation begin to arrive over it

Only ``Load`` over what the shard holds replaces it, so weights that come late (from a VW that was thought dead) do not.

Bounds: in host memory lie the weights, once, and of each VW one update: arriving, or staged until the first pull after
its commit, in a block that is kept for its next one: (1 + N) times the shard's bytes. The update of a VW whose memory
the server sees stays in the VW's memory, and takes none of the server's. A VW pushes again, and so changes that memory,
only after its own pull, which has had its update added. A VW whose bytes still arrive in an earlier request is told to
ask again (``BUSY``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from lightning_hetpipe.server.protocol.identifiers import Commit, Refusal, RemoteFault, UpdateId
from lightning_hetpipe.server.protocol.messages import (
    Holding,
    Load,
    Parameter,
    Read,
    Refused,
    ShardRequest,
    StageUpdate,
)
from lightning_hetpipe.server.transport.shared_memory import memory

CHUNK = 1 << 18
"""Elements that are worked on before the next ones: they stay in a core's cache from one operation to the next."""


def dtype_of(name: str) -> torch.dtype:
    """
    Raises:
        RemoteFault: if torch has no dtype of that name.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise RemoteFault(Refusal.MALFORMED, f"there is no dtype {name[:40]!r}")
    return dtype


@dataclass(frozen=True)
class ShardLayout:
    """How parameters lie in one block of bytes: one after the other, each at a multiple of its size of an element."""

    parameters: tuple[Parameter, ...]
    update: bool
    """Whether the block is of an update, in the dtypes of updates."""
    places: tuple[tuple[int, torch.dtype, tuple[int, ...]], ...] = field(init=False)
    size: int = field(init=False)

    def __post_init__(self) -> None:
        places, start = [], 0
        for parameter in self.parameters:
            dtype = dtype_of(parameter.update_dtype if self.update else parameter.dtype)
            if min(parameter.shape, default=0) < 0:
                raise RemoteFault(Refusal.MALFORMED, f"'{parameter.name}' has the shape {list(parameter.shape)}")
            start = -(-start // dtype.itemsize) * dtype.itemsize
            places.append((start, dtype, parameter.shape))
            start += math.prod(parameter.shape) * dtype.itemsize
        object.__setattr__(self, "places", tuple(places))
        object.__setattr__(self, "size", start)

    def views(self, block: Tensor) -> list[Tensor]:
        """The parameters in ``block``, ``size`` bytes of dtype uint8."""
        return [
            block[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for start, dtype, shape in self.places
        ]

    def not_finite(self, views: Sequence[Tensor]) -> str | None:
        """The name of the first parameter with a NaN or infinity."""
        for parameter, view in zip(self.parameters, views, strict=True):
            if not finite(view):
                return parameter.name
        return None


def finite(values: Tensor) -> bool:
    """Whether there is no NaN and no infinity."""
    if not values.numel() or not (values.is_floating_point() or values.is_complex()):
        return True
    real = torch.view_as_real(values) if values.is_complex() else values
    # The extremes carry a NaN on, and take no memory.
    low, high = real.aminmax()
    return bool(low.isfinite() and high.isfinite())


def copy_finite(target: Tensor, source: Tensor) -> bool:
    """Copies ``source`` into ``target``, which is contiguous, unless it is there; returns whether it is `finite`."""
    if source.shape != target.shape or source.device != target.device or not source.is_contiguous():
        target.copy_(source)
        source = target
    there = source.data_ptr() == target.data_ptr() and source.dtype == target.dtype
    to, data = target.view(-1), source.view(-1)
    for start in range(0, len(to), CHUNK):
        part = to[start : start + CHUNK]
        if not there:
            part.copy_(data[start : start + CHUNK])
        if not finite(part):
            return False
    return True


def block_of(size: int) -> Tensor:
    """Bytes, all 0, aligned for every dtype; many of them lie where other processes of this host can see them."""
    return torch.frombuffer(memory(size), dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)


def memory_of(block: Tensor) -> memoryview:
    """The bytes of ``block``; they live for as long as either does."""
    array: np.ndarray[tuple[int], np.dtype[np.uint8]] = block.numpy()
    return memoryview(array)  # type: ignore[arg-type]  # arrays are buffers, which numpy says from Python 3.12 on


def add(weight: Tensor, updates: Sequence[tuple[Tensor, int]]) -> None:
    """``weight += update / divisor`` for each of ``updates``, in order, in the weight's dtype; all are contiguous."""
    exact = weight.is_floating_point() or weight.is_complex()
    flat = weight.view(-1)
    for start in range(0, len(flat), CHUNK):
        part = flat[start : start + CHUNK]
        for update, divisor in updates:
            addend = update.view(-1)[start : start + CHUNK].to(weight.dtype)
            if divisor != 1:
                addend = addend.div(divisor, rounding_mode=None if exact else "trunc")
            part.add_(addend)


class Shard:
    """
    Args:
        epoch: the server's.
        limit: bytes of weights that the shard may hold; ``None`` for any number.
    """

    def __init__(self, epoch: str, limit: int | None = None) -> None:
        self.epoch = epoch
        self.content = epoch
        self.loaded = False
        self.applied = 0
        """How many of the generation's commits have been added."""
        self.staged: dict[int, tuple[UpdateId, Tensor]] = {}
        self._limit = limit
        self._weights = block_of(0)
        self._views: list[Tensor] = []
        self._last: dict[int, UpdateId] = {}
        """The last update of each VW that has been added."""
        self._weight_layout = ShardLayout((), update=False)
        self._update_layout = ShardLayout((), update=True)
        self._arriving: set[int] = set()
        """VWs of which weights or an update are on the way."""
        self._rooms: dict[int, Tensor] = {}
        """By VW, the block that its updates come into, one after the other: fresh memory costs more than to copy."""

    @property
    def bytes_held(self) -> int:
        """Of weights and updates, in this process's memory and in that of VWs."""
        seen = [block for vw, (_, block) in self.staged.items() if vw not in self._rooms]
        return sum(block.numel() for block in (self._weights, *self._rooms.values(), *seen))

    def open(self, message: ShardRequest, size: int, offered: memoryview | None = None) -> memoryview:
        """Memory for the body of ``message``: for an update ``offered``, if it is.

        Raises:
            RemoteFault: before memory is taken, if the body is not wanted.
        """
        if isinstance(message, Load):
            self._check_load(message, size)
            self._check_idle(message.vw)
            # From here on the former weights are of no use: they make room.
            self.content, self.loaded, self.applied = message.generation, False, 0
            self._weights, self._views = block_of(0), []
            self.staged.clear()
            self._rooms.clear()
            self._last = {mark.vw: mark for mark in message.included}
        elif isinstance(message, StageUpdate):
            self._check_stage(message, size)
            self._check_idle(message.vw)
            self.staged.pop(message.vw, None)  # of an update that was never pushed, or of its former incarnation
        elif size:
            raise RemoteFault(Refusal.MALFORMED, f"{size} bytes do not come with a {type(message).__name__}")
        else:
            return memoryview(bytearray())
        self._arriving.add(message.vw)
        if isinstance(message, Load):
            return memory_of(block_of(size))
        if offered is not None:
            self._rooms.pop(message.vw, None)
            return offered
        if message.vw not in self._rooms:
            self._rooms[message.vw] = torch.empty(size, dtype=torch.uint8)
        return memory_of(self._rooms[message.vw])

    def abandoned(self, message: ShardRequest) -> None:
        """What ``open`` made room for will not come."""
        if isinstance(message, Load | StageUpdate):
            self._arriving.discard(message.vw)

    def run(self, message: ShardRequest, body: memoryview) -> tuple[Holding | Refused, Sequence[memoryview]]:
        """The answer, and the weights where they were asked for; ``body`` is what ``open`` gave."""
        self.abandoned(message)
        try:
            if isinstance(message, Load):
                self._check_load(message, len(body))
                self._load(message, body)
            elif isinstance(message, StageUpdate):
                self._check_stage(message, len(body))
                self.staged[message.vw] = UpdateId(message.vw, message.incarnation, message.clock), _taken(body)
            elif isinstance(message, Read):
                return self._read(message)
            return self._holding(message.vw), ()
        except RemoteFault as fault:
            return Refused(self.epoch, fault.refusal, str(fault)), ()

    def _check_idle(self, vw: int) -> None:
        if vw in self._arriving:
            raise RemoteFault(Refusal.BUSY, f"VW {vw} still sends in an earlier request")

    def _holding(self, vw: int) -> Holding:
        last = self.staged[vw][0] if vw in self.staged else self._last.get(vw)
        return Holding(self.epoch, self.content, self.loaded, last)

    def _check_load(self, message: Load, size: int) -> None:
        if self.content != (message.generation if self.content == message.generation else message.over):
            raise RemoteFault(Refusal.GENERATION, "the shard holds other weights than those that were to be replaced")
        if self.content == message.generation and self.loaded:
            raise RemoteFault(Refusal.STALE, "the weights are there already")
        wanted = ShardLayout(message.parameters, update=False).size
        if size != wanted:
            raise RemoteFault(Refusal.MALFORMED, f"{size} bytes of weights came for parameters of {wanted}")
        if self._limit is not None and size > self._limit:
            raise RemoteFault(Refusal.TOO_LARGE, f"{size} bytes of weights are more than the {self._limit} allowed")

    def _load(self, message: Load, body: memoryview) -> None:
        self._weight_layout = ShardLayout(message.parameters, update=False)
        self._update_layout = ShardLayout(message.parameters, update=True)
        self._weights = _taken(body)
        self._views = self._weight_layout.views(self._weights)
        self.loaded = True

    def _of(self, generation: str) -> None:
        if self.content != generation or not self.loaded:
            raise RemoteFault(Refusal.GENERATION, "the shard does not hold this generation")

    def _check_stage(self, message: StageUpdate, size: int) -> None:
        self._of(message.generation)
        mark = UpdateId(message.vw, message.incarnation, message.clock)
        last = self._holding(message.vw).last
        if last is not None and last >= mark:
            raise RemoteFault(Refusal.STALE, f"the shard has had {mark}")
        if size != self._update_layout.size:
            raise RemoteFault(
                Refusal.MALFORMED, f"{size} bytes of an update came for parameters of {self._update_layout.size}"
            )

    def examine(self, message: StageUpdate, body: memoryview) -> None:
        """Reads all of the update, which takes time, and changes nothing.

        Raises:
            RemoteFault: if it has a NaN or infinity.
        """
        layout = self._update_layout
        name = layout.not_finite(layout.views(_taken(body))) if len(body) == layout.size else None
        if name is not None:
            raise RemoteFault(
                Refusal.NOT_FINITE,
                f"the update of VW {message.vw} of wave {message.clock} has a NaN or infinity in '{name}', and is not"
                " added",
            )

    def _read(self, message: Read) -> tuple[Holding | Refused, Sequence[memoryview]]:
        self._of(message.generation)
        end = message.start + len(message.tail)
        if self.applied > end:
            raise RemoteFault(Refusal.STALE, f"the shard has gone on to commit {self.applied} from {end}")
        if self.applied < message.start:
            raise RemoteFault(Refusal.MALFORMED, f"commits {self.applied} to {message.start} are missing")
        self._apply(message.tail[self.applied - message.start :])
        return self._holding(message.vw), (memory_of(self._weights),)

    def _apply(self, commits: Sequence[Commit]) -> None:
        updates: list[tuple[list[Tensor], int]] = []
        staged = dict(self.staged)
        for commit in commits:
            mark, block = staged.pop(commit.update.vw, (None, None))
            if mark != commit.update or block is None or commit.divisor < 1:
                raise RemoteFault(Refusal.MALFORMED, f"{commit.update} is to be added, and was never staged")
            updates.append((self._update_layout.views(block), commit.divisor))
        for index, weight in enumerate(self._views):
            add(weight, [(views[index], divisor) for views, divisor in updates])
        self.staged = staged
        self._last.update((commit.update.vw, commit.update) for commit in commits)
        self.applied += len(commits)


def _taken(body: memoryview) -> Tensor:
    """The bytes of ``body``, without a copy."""
    return torch.from_numpy(np.asarray(body)) if len(body) else block_of(0)
