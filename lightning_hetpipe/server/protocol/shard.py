"""Shard: one server's part of w_global, whole parameters to which updates are added in commit order (law L4).

    content        goes to        when
    ------------------------------------------------------------------------------------------------
    <epoch>        <generation>   fresh; weights of that generation begin to arrive over it
    <generation>   loaded         they are there
    loaded         <generation>   weights of a later generation begin to arrive over it

Only a ``Load`` that names the present content replaces it. So late weights of a VW that counted as dead do not.

A VW's update may come in parts, one for each process that has weights of the VW. The parts of an update have different
parameters of the shard. Only an update with all parts present can be added.

Bounds: host memory holds the weights once and one update of each VW, (1 + N) times the shard's bytes. An update is held
until the first pull after its commit. Its block is kept for the VW's next update. If the server sees a VW's memory, the
update stays there and takes no memory of the server. The VW changes this memory only after its own pull, by which its
update was added. If an earlier request of a VW still arrives, the VW has to ask again (``BUSY``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from lightning_hetpipe.rules.waves import place_parameters
from lightning_hetpipe.server.protocol import messages
from lightning_hetpipe.server.protocol.identifiers import Commit, Refusal, RemoteFault, UpdateId
from lightning_hetpipe.server.transport.shared_memory import memory

CHUNK = 1 << 18
"""Number of elements processed at a time, so that they stay in a core's cache between operations."""


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of that name. Raise RemoteFault if torch has none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise RemoteFault(Refusal.MALFORMED, f"there is no dtype {name[:40]!r}")
    return dtype


class ShardLayout:
    """Layout of parameters in one block of bytes, in order, each at a multiple of its element's size. With ``update``,
    the layout has the dtypes of updates."""

    def __init__(self, parameters: tuple[messages.Parameter, ...], update: bool) -> None:
        self.parameters, self.update = parameters, update
        self.places: list[tuple[int, torch.dtype, tuple[int, ...]]] = []
        start = 0
        for parameter in parameters:
            dtype = dtype_of(parameter.update_dtype if update else parameter.dtype)
            if min(parameter.shape, default=0) < 0:
                raise RemoteFault(Refusal.MALFORMED, f"'{parameter.name}' has the shape {list(parameter.shape)}")
            start = -(-start // dtype.itemsize) * dtype.itemsize
            self.places.append((start, dtype, parameter.shape))
            start += math.prod(parameter.shape) * dtype.itemsize
        self.size = start

    def views(self, block: Tensor) -> list[Tensor]:
        """Return the parameters in ``block``, which has ``size`` bytes of dtype uint8."""
        return [
            block[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for start, dtype, shape in self.places
        ]

    def only(self, part: Sequence[int]) -> ShardLayout:
        """Return the layout of the parameters with the numbers ``part``, or of all if ``part`` is empty."""
        return ShardLayout(tuple(self.parameters[number] for number in part), self.update) if part else self

    def pieces(self, block: Tensor, part: Sequence[int]) -> list[memoryview]:
        """Return the bytes of ``block`` in the layout of :meth:`only`, in as few pieces as possible."""
        if not part:
            return [memory_of(block)]
        found: list[memoryview] = []
        begin = end = filled = 0
        for number, (target, dtype, shape) in zip(part, self.only(part).places, strict=True):
            source, gap = self.places[number][0], target - filled
            if source - gap != end:  # its place in the block does not follow the last parameter's
                found += [memory_of(block[begin:end]), memoryview(bytes(gap))]
                begin = source
            end = source + math.prod(shape) * dtype.itemsize
            filled = target + end - source
        return [piece for piece in (*found, memory_of(block[begin:end])) if len(piece)]


def finite(values: Tensor) -> bool:
    """Return True if ``values`` have no NaN and no infinity."""
    if not values.numel() or not (values.is_floating_point() or values.is_complex()):
        return True
    real = torch.view_as_real(values) if values.is_complex() else values
    # The extremes carry a NaN on, and take no memory.
    low, high = real.aminmax()
    return bool(low.isfinite() and high.isfinite())


def copy_finite(target: Tensor, source: Tensor) -> bool:
    """Copy ``source`` into the contiguous ``target``, unless both are one memory. Return True if it is `finite`."""
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
    """Return zeroed bytes, aligned for every dtype. Other processes of this host can map a large block."""
    return torch.frombuffer(memory(size), dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)


def memory_of(block: Tensor) -> memoryview:
    """Return a view of the bytes of ``block`` that keeps the block alive."""
    array: np.ndarray[tuple[int], np.dtype[np.uint8]] = block.numpy()
    return memoryview(array)  # type: ignore[arg-type]  # arrays are buffers, which numpy says from Python 3.12 on


def add(weight: Tensor, updates: Sequence[tuple[Tensor, int]]) -> None:
    """Compute ``weight += update / divisor`` for each of ``updates``, in order and in the weight's dtype."""
    exact = weight.is_floating_point() or weight.is_complex()
    flat = weight.view(-1)
    for start in range(0, len(flat), CHUNK):
        part = flat[start : start + CHUNK]
        for update, divisor in updates:
            addend = update.view(-1)[start : start + CHUNK].to(weight.dtype)
            if divisor != 1:
                addend = addend.div(divisor, rounding_mode=None if exact else "trunc")
            part.add_(addend)


@dataclass
class StagedUpdate:
    """Update with the blocks of its parts."""

    id: UpdateId
    blocks: dict[tuple[int, ...], Tensor] = field(default_factory=dict)


def _overlap(part: Sequence[int], other: Sequence[int]) -> bool:
    return not part or not other or not set(part).isdisjoint(other)


class Shard:
    """State of a shard. ``epoch`` is a random id of the server's start."""

    def __init__(self, epoch: str) -> None:
        self.content = epoch
        self.loaded = False
        self.applied = 0
        """Number of the generation's commits that have been added."""
        self.staged: dict[int, StagedUpdate] = {}
        self._weights = block_of(0)
        self._views: list[Tensor] = []
        self._last: dict[int, UpdateId] = {}
        """Last added update of each VW."""
        self._weight_layout = ShardLayout((), update=False)
        self._update_layout = ShardLayout((), update=True)
        self._arriving: set[tuple[int, tuple[int, ...]]] = set()
        """VW and part of each arriving body of weights or of an update."""
        self._blocks: dict[tuple[int, tuple[int, ...]], Tensor] = {}
        """Block that receives updates, by VW and part. It is reused, because fresh memory costs more than a copy."""

    @property
    def bytes_held(self) -> int:
        """Bytes of weights and updates, in the memory of this process and of VWs."""
        staged = ((vw, *each) for vw, update in self.staged.items() for each in update.blocks.items())
        seen = [block for vw, part, block in staged if (vw, part) not in self._blocks]
        return sum(block.numel() for block in (self._weights, *self._blocks.values(), *seen))

    def open(self, message: messages.ShardRequest, size: int, offered: memoryview | None = None) -> memoryview:
        """Return memory for the body of ``message``. For an update this is ``offered``, if given. If the request is
        refused, raise RemoteFault before memory is taken."""
        if isinstance(message, messages.Load):
            self._check_load(message, size)
            self._check_idle(message)
            # Free the memory of the former weights first, because they are not needed any more.
            self.content, self.loaded, self.applied = message.generation, False, 0
            self._weights, self._views = block_of(0), []
            self.staged.clear()
            self._blocks.clear()
            self._last = {update.vw: update for update in message.included}
        elif isinstance(message, messages.StageUpdate):
            self._check_stage(message, size)
            self._check_idle(message)
            if (staged := self.staged.get(message.vw)) is not None and staged.id != _id(message):
                del self.staged[message.vw]  # it was never pushed, or belongs to a former incarnation
        elif size:
            raise RemoteFault(Refusal.MALFORMED, f"{size} bytes do not come with a {type(message).__name__}")
        else:
            return memoryview(bytearray())
        sender = _sender(message)
        self._arriving.add(sender)
        if isinstance(message, messages.Load):
            return memory_of(block_of(size))
        for vw, part in [*self._blocks]:
            useless = part != message.part or offered is not None
            if vw == message.vw and useless and _overlap(part, message.part):
                del self._blocks[vw, part]
        if offered is not None:
            return offered
        if sender not in self._blocks:
            self._blocks[sender] = torch.empty(size, dtype=torch.uint8)
        return memory_of(self._blocks[sender])

    def abandoned(self, message: messages.ShardRequest) -> None:
        """Record that the body for which ``open`` gave memory will not come."""
        if isinstance(message, messages.Load | messages.StageUpdate):
            self._arriving.discard(_sender(message))

    def run(self, message: messages.ShardRequest, body: memoryview) -> tuple[messages.Holding, Sequence[memoryview]]:
        """Return the answer, and the weights for a ``Read``. ``body`` is the memory from ``open``. Raise RemoteFault to
        refuse the request."""
        self.abandoned(message)
        if isinstance(message, messages.Load):
            self._check_load(message, len(body))
            self._weight_layout = ShardLayout(message.parameters, update=False)
            self._update_layout = ShardLayout(message.parameters, update=True)
            self._weights = _taken(body)
            self._views = self._weight_layout.views(self._weights)
            self.loaded = True
        elif isinstance(message, messages.StageUpdate):
            self._check_stage(message, len(body))
            staged = self.staged.setdefault(message.vw, StagedUpdate(_id(message)))
            staged.blocks[message.part] = _taken(body)
        elif isinstance(message, messages.Read):
            return self._read(message)
        return messages.Holding(self.content), ()

    def _check_idle(self, message: messages.Load | messages.StageUpdate) -> None:
        vw, own = _sender(message)
        if any(other == vw and _overlap(own, part) for other, part in self._arriving):
            raise RemoteFault(Refusal.BUSY, f"an earlier request of VW {vw} is still arriving")

    def _check_load(self, message: messages.Load, size: int) -> None:
        if self.content != (message.generation if self.content == message.generation else message.over):
            raise RemoteFault(Refusal.GENERATION, "the shard does not hold the weights that were to be replaced")
        if self.content == message.generation and self.loaded:
            raise RemoteFault(Refusal.STALE, "the weights were loaded before")
        wanted = ShardLayout(message.parameters, update=False).size
        if size != wanted:
            raise RemoteFault(Refusal.MALFORMED, f"{size} bytes of weights for parameters of {wanted} bytes")

    def _check_stage(self, message: messages.StageUpdate, size: int) -> None:
        self._check_part(message)
        update, staged = _id(message), self.staged.get(message.vw)
        last = self._last.get(message.vw) if staged is None else staged.id
        here = staged.blocks if staged is not None and staged.id == update else {}
        if (last is not None and last >= update and not here) or message.part in here:
            raise RemoteFault(Refusal.STALE, f"the shard has received {update} before")
        if any(_overlap(message.part, part) for part in here):
            raise RemoteFault(Refusal.MALFORMED, f"parts of {update} have parameters in common")
        wanted = self._update_layout.only(message.part).size
        if size != wanted:
            raise RemoteFault(Refusal.MALFORMED, f"{size} bytes of an update for parameters of {wanted} bytes")

    def _check_part(self, message: messages.StageUpdate | messages.Read) -> None:
        if self.content != message.generation or not self.loaded:
            raise RemoteFault(Refusal.GENERATION, "the shard does not hold this generation")
        count, part = len(self._update_layout.parameters), message.part
        if list(part) != sorted({*part}) or (part and not 0 <= part[0] <= part[-1] < count):
            raise RemoteFault(Refusal.MALFORMED, f"a part of {count} parameters has the numbers {list(part)[:9]}")

    def examine(self, message: messages.StageUpdate, body: memoryview) -> None:
        """Check the whole update, which takes time and changes nothing. Raise RemoteFault if it has a NaN or
        infinity."""
        layout = self._update_layout.only(message.part)
        views = layout.views(_taken(body)) if len(body) == layout.size else []
        for parameter, view in zip(layout.parameters, views, strict=False):
            if not finite(view):
                raise RemoteFault(
                    Refusal.NOT_FINITE,
                    f"the update of VW {message.vw} of wave {message.clock} has a NaN or infinity in"
                    f" '{parameter.name}', and is not added",
                )

    def _read(self, message: messages.Read) -> tuple[messages.Holding, Sequence[memoryview]]:
        self._check_part(message)
        end = message.start + len(message.tail)
        if self.applied > end:
            raise RemoteFault(Refusal.STALE, f"the shard is at commit {self.applied} already, behind {end}")
        if self.applied < message.start:
            raise RemoteFault(Refusal.MALFORMED, f"commits {self.applied} to {message.start} are missing")
        self._apply(message.tail[self.applied - message.start :])
        return messages.Holding(self.content), self._weight_layout.pieces(self._weights, message.part)

    def _apply(self, commits: Sequence[Commit]) -> None:
        updates: list[tuple[list[Tensor], int]] = []
        staged = dict(self.staged)
        for commit in commits:
            update = staged.pop(commit.update.vw, None)
            if update is None or update.id != commit.update or commit.divisor < 1:
                raise RemoteFault(Refusal.MALFORMED, f"{commit.update} is to be added, but was never staged")
            updates.append((self._views_of(update), commit.divisor))
        for index, weight in enumerate(self._views):
            add(weight, [(views[index], divisor) for views, divisor in updates])
        self.staged = staged
        self._last.update((commit.update.vw, commit.update) for commit in commits)
        self.applied += len(commits)

    def _views_of(self, update: StagedUpdate) -> list[Tensor]:
        """Return all parameters of ``update`` from its parts."""
        layout, found = self._update_layout, dict[int, Tensor]()
        for part, block in update.blocks.items():
            numbers = part or range(len(layout.parameters))
            found.update(zip(numbers, layout.only(part).views(block), strict=True))
        if len(found) < len(layout.parameters):
            raise RemoteFault(Refusal.MALFORMED, f"{update.id} is to be added, and parts of it were never staged")
        return [found[number] for number in range(len(found))]


def _id(message: messages.StageUpdate) -> UpdateId:
    return UpdateId(message.vw, message.incarnation, message.clock)


def _sender(message: messages.Load | messages.StageUpdate) -> tuple[int, tuple[int, ...]]:
    return message.vw, message.part if isinstance(message, messages.StageUpdate) else ()


def _taken(body: memoryview) -> Tensor:
    """Return the bytes of ``body`` without a copy."""
    return torch.from_numpy(np.asarray(body)) if len(body) else block_of(0)


def place(
    parameters: Sequence[messages.Parameter], servers: int, how: str, homes: Sequence[int] = ()
) -> list[list[int]]:
    """Return the indices of the parameters on each server, ascending. ``how`` and ``homes`` are as for
    :func:`~lightning_hetpipe.rules.waves.place_parameters`, which raises SettingError for an unknown ``how``."""
    sizes = [math.prod(parameter.shape) * dtype_of(parameter.dtype).itemsize for parameter in parameters]
    return place_parameters(sizes, servers, how, homes)
