"""Bytes that a stage holds, counted by the engine: present and maximal.

Weight versions
    Version buffers with a version. Memory that several versions share counts once. (All Nm are allocated when the
    pipeline is built.) Only parameters count, because modules' buffers are small and have no versions.
Activations
    Memory that a stage keeps from a minibatch's forward until its backward is done: the inputs and outputs of its
    layers, and tensors that autograd has saved between them. A block of memory counts once. The version's weights and
    the buffers do not count. If stages on one device share a tensor without a copy, each counts it.
Gradients
    Gradients of a stage's backward, until weights have them. A sparse one counts as if it were dense. No plan knows
    how many wait: it depends on the speed of Lightning's thread, and all in flight wait in an evaluation between two
    steps. Gradients for which the device has no room wait on the host (:class:`PlannedMemory`).

Stages hold Nm versions, and activations of at most Nm minibatches. Minibatch p enters the pipeline when version p - Nm
is published (law L1 and HetPipe, section 4), and leaves every stage before version p is. If the whole model is one
piece, the last stage holds one minibatch: forward, loss and backward are one task there. The schedule decides on the
actual number (:func:`~lightning_hetpipe.planning.model.simulate.simulate`). If real times differ from simulated ones, a
stage may get more minibatches than its device has room for. They wait, in order, until it has done a backward.

To ask autograd for its saved tensors costs 5 us for each (*measured*). So a segment's activations are counted with the
first minibatch of its inputs' sizes since the pipeline started empty, and remembered. All other counting costs 2.5 us
for each minibatch and stage, and is always on. Tensors that a user's ``torch.autograd.Function`` keeps without
``save_for_backward`` are not seen. With ``recompute``, a stage keeps only the inputs of the minibatches that it holds,
and all activations of the minibatch that it computes right now.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_hetpipe.accelerator import accelerates
from lightning_hetpipe.pipeline.values import blocks, tensors_of
from lightning_hetpipe.planning.model.units import in_bytes
from lightning_hetpipe.torch_private.tensors import pytree, strided_parts

T = TypeVar("T")

REMEMBERED = 256
"""Number of combinations of input sizes that a segment remembers."""


@dataclass(frozen=True)
class Kept:
    """Bytes of one minibatch at one segment: all that its forward leaves for its backward, and its inputs alone."""

    all: int
    inputs: int


@dataclass(frozen=True)
class PlannedMemory:
    """Memory of a stage by its plan, in bytes.

    Attributes:
        total: Bytes of the device that the stage takes.
        limit: Bytes of the device, or None if they are no limit.
        room: Bytes for activations and waiting gradients together, or None for no limit.
    """

    total: int
    limit: int | None = None
    room: int | None = None

    def __str__(self) -> str:
        return in_bytes(self.total) if self.limit is None else f"{in_bytes(self.total)} of {in_bytes(self.limit)}"


class Level:
    """A quantity, its present value and its maximum."""

    def __init__(self) -> None:
        self.now = 0
        self.most = 0

    def add(self, amount: int) -> None:
        self.now += amount
        if self.now > self.most:
            self.most = self.now


class Memory:
    """Bytes that one stage holds, counted by its own thread and Lightning's.

    Attributes:
        visits: Number of visits of each minibatch to the stage.
        total: Bytes of versions, activations and gradients at one time.
        on_host: Bytes of gradients on the host, for which the stage has no room.
        minibatches: Number of minibatches with activations.
    """

    def __init__(self, planned: PlannedMemory | None = None, visits: int = 1) -> None:
        self.planned = planned
        self.visits = visits
        self.limited = planned is not None and planned.room is not None
        self._room = math.inf if planned is None or planned.room is None else planned.room
        self.versions = Level()
        self.activations = Level()
        self.gradients = Level()
        self.on_host = Level()
        self.total = Level()
        self.minibatches = Level()
        self._lock = threading.Lock()
        self._since = 0  # the most in total since `most_lately` was asked
        self._held: dict[int, dict[Hashable, int]] = {}
        self._largest = 0  # bytes of one minibatch after all of its visits
        self._waiting: dict[int, int] = {}
        self._out: dict[int, int] = {}

    def lacks(self, coming: int) -> bool:
        """Return True if activations, waiting gradients and ``coming`` bytes exceed their room."""
        return self.activations.now + self.gradients.now + coming > self._room

    def holds(self, minibatch: int) -> bool:
        """Return True if anything but gradients is kept of ``minibatch``."""
        return minibatch in self._held

    def admits(self, coming: int) -> bool:
        """Return True if there is room for one more minibatch, whose first visit keeps ``coming`` bytes."""
        with self._lock:
            if not self._held:
                return True
            if self.visits > 1 and not self._largest:
                return False
            held = sum(max(self._largest, sum(visits.values())) for visits in self._held.values())
            return held + max(self._largest, coming) <= self._room

    def waiting(self) -> list[int]:
        """Return the minibatches of which only gradients are kept, on the device."""
        with self._lock:
            return [minibatch for minibatch in self._waiting if minibatch not in self._held]

    def move_out(self, minibatch: int) -> None:
        """Record that the gradients of ``minibatch`` wait on the host from now on."""
        with self._lock:
            moved = self._out[minibatch] = self._waiting.pop(minibatch, 0)
            self._add(self.gradients, -moved)
            self.on_host.add(moved)

    def told(self) -> str:
        """Describe the present bytes and the planned ones, for messages."""
        held = self.minibatches.now
        now = (
            f"{in_bytes(self.versions.now)} of weight versions, {in_bytes(self.activations.now)} of activations of"
            f" {held} minibatch{'' if held == 1 else 'es'} and {in_bytes(self.gradients.now)} of waiting gradients"
        )
        if self.planned is None:
            return now
        return f"{now}; the plan has {self.planned} for it, with live weights and optimizer state"

    def publish(self, versions: int) -> None:
        """Record that versions now take ``versions`` bytes."""
        if versions != self.versions.now:
            with self._lock:
                self._add(self.versions, versions - self.versions.now)

    def hold(self, minibatch: int, visit: Hashable, activations: int) -> None:
        """Record the bytes that a ``visit`` of ``minibatch`` to a segment now keeps there."""
        with self._lock:
            held = self._held.get(minibatch)
            if held is None:
                held = self._held[minibatch] = {}
                self.minibatches.add(1)
            self._add(self.activations, activations - held.get(visit, 0))
            held[visit] = activations
            if len(held) == self.visits > 1:
                self._largest = max(self._largest, sum(held.values()))

    def release(self, minibatch: int, visit: Hashable, gradients: int = 0) -> None:
        """Record that nothing is kept of ``visit`` any more, but ``gradients`` bytes wait for Lightning's step."""
        with self._lock:
            held = self._held.get(minibatch)
            if held is not None:
                self._add(self.activations, -held.pop(visit, 0))
                if not held:
                    del self._held[minibatch]
                    self.minibatches.add(-1)
            if gradients:
                self._waiting[minibatch] = self._waiting.get(minibatch, 0) + gradients
                self._add(self.gradients, gradients)

    def take(self, minibatch: int) -> None:
        """Record that weights have the gradients of ``minibatch``."""
        with self._lock:
            self._add(self.gradients, -self._waiting.pop(minibatch, 0))
            self.on_host.add(-self._out.pop(minibatch, 0))

    def forget(self, minibatch: int) -> None:
        """Record that nothing of ``minibatch`` is kept any more."""
        for visit in [*self._held.get(minibatch, ())]:
            self.release(minibatch, visit)
        self.take(minibatch)

    def clear(self) -> None:
        """Record that nothing is in flight."""
        with self._lock:
            self._add(self.activations, -self.activations.now)
            self._add(self.gradients, -self.gradients.now)
            self.minibatches.add(-self.minibatches.now)
            self.on_host.add(-self.on_host.now)
            self._held.clear()
            self._largest = 0
            self._waiting.clear()
            self._out.clear()

    def levels(self) -> list[Level]:
        return [self.versions, self.activations, self.gradients, self.on_host, self.total, self.minibatches]

    def mirror(self, levels: Sequence[Sequence[int]]) -> None:
        """Show counts from elsewhere: for each of :meth:`levels` its present value and its maximum."""
        for level, (now, most) in zip(self.levels(), levels, strict=True):
            level.now, level.most = now, most
        self._since = max(self._since, self.total.now)

    def most_lately(self) -> int:
        """Return the maximal total since the last call."""
        with self._lock:
            most, self._since = self._since, self.total.now
        return most

    def _add(self, level: Level, amount: int) -> None:
        if not amount:
            return
        # Written out, because calls of `add` would cost more than the rest.
        now = level.now = level.now + amount
        if now > level.most:
            level.most = now
        total = self.total
        now = total.now = total.now + amount
        if now > self._since:
            self._since = now
            if now > total.most:
                total.most = now


class Counter:
    """A counter of what the forwards of one segment leave behind, by the sizes of their inputs."""

    def __init__(self) -> None:
        self._known: dict[Any, Kept] = {}

    def clear(self) -> None:
        """Count anew from now on, because layers may have been frozen, for example."""
        self._known.clear()

    def known(self, inputs: Sequence[Tensor]) -> Kept | None:
        """Return the bytes that a forward of such ``inputs`` left, if there was one."""
        return self._known.get(_sizes(inputs))

    def kept(
        self, inputs: Sequence[Tensor], forward: Callable[[], T], besides: Callable[[], Iterable[Tensor]]
    ) -> tuple[T, Kept]:
        """Run ``forward``. Return its result and the bytes that it leaves, without the tensors of ``besides``."""
        if len(self._known) == REMEMBERED:
            self._known.clear()
        watched = weakref.WeakSet[_Saved]()  # what the graph still needs

        def pack(tensor: Tensor) -> _Saved:
            # An output that is saved undetached would keep its own graph alive, and the graph the output, for ever.
            saved = _Saved(tensor if tensor.grad_fn is None else tensor.detach())
            watched.add(saved)
            return saved

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
            output = forward()
        left_out = blocks(besides())
        held = [*inputs, *tensors_of(output), *(saved.tensor for saved in watched)]
        kept = Kept(_bytes(held, left_out), _bytes(inputs, left_out))
        self._known[_sizes(inputs)] = kept
        return output, kept


def _sizes(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    return tuple([(tensor.shape, tensor.dtype) for tensor in tensors])


class _Saved:
    """A tensor that autograd has saved, for as long as its graph needs it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _bytes(tensors: Iterable[Tensor], left_out: dict[tuple[torch.device, int], int]) -> int:
    return sum(size for block, size in blocks(tensors).items() if block not in left_out)


LARGEST_LEARNED = 2**25 - 2**16
"""Bytes of the largest allocation from which glibc learns. Measured: 32 MiB without glibc's own addition."""


def keep_freed_memory() -> None:
    """Make the C library keep freed memory instead of giving it back to the system after each minibatch.

    By default a thread gives back free memory above twice the largest block that was mapped alone. A stage frees all
    activations of a minibatch at once, and each page of the next minibatch then costs a fault: a fifth of the time of
    small convolutions. Freeing one large block teaches glibc to keep up to 64 MiB for each of its arenas (mallopt(3),
    M_MMAP_THRESHOLD). Other C libraries just free it.
    """
    torch.empty(LARGEST_LEARNED, dtype=torch.uint8)


_BEGIN = "HetPipeStrategy: "


def explain(error: torch.OutOfMemoryError, text: str) -> None:
    """Add a note with ``text`` to ``error``, unless it has our note already."""
    if not any(note.startswith(_BEGIN) for note in getattr(error, "__notes__", ())):
        error.add_note(f"{_BEGIN}{text}")


def less(in_flight: int, recompute: bool) -> str:
    """Describe how stages take less memory, as the end of a sentence."""
    ways = [f"in_flight below {in_flight}"] if in_flight > 1 else []
    ways += [] if recompute else ["recompute=True"]
    ways.append("smaller batches" if not ways else "or smaller batches")
    return f"set {', '.join(ways)}, or give more devices, or ones with more memory"


def held(
    module: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    stages: Sequence[torch.device],
    planned: Mapping[torch.device, str],
) -> str:
    """Describe what each device of ``stages`` holds, a line for each, without CPUs. ``stages`` has the device of each
    stage, ``planned`` the plan or limit of a device."""
    states = pytree.tree_leaves([each for optimizer in optimizers for each in optimizer.state.values()])
    parts = {
        "weights": [*module.parameters(), *module.buffers()],
        "gradients": [each.grad for each in module.parameters() if each.grad is not None],
        "optimizer state": [each for each in states if isinstance(each, Tensor)],
    }
    lines = []
    for device in dict.fromkeys(each for each in stages if accelerates(each)):
        numbers = [str(number) for number, each in enumerate(stages) if each == device]
        here = {part: [t for t in tensors if t.device == device] for part, tensors in parts.items()}
        own = {part: sum(each.nbytes for t in tensors for each in strided_parts(t)) for part, tensors in here.items()}
        sizes = [f"{in_bytes(size)} of {part}" for part, size in own.items()]
        lines.append(
            f"  stage{'s' if len(numbers) > 1 else ''} {' and '.join(numbers)} on {device}: {', '.join(sizes)}, and"
            f" {in_bytes(torch.accelerator.memory_allocated(device))} with all else"
            f"{f'; {planned[device]}' if device in planned else ''}"
        )
    return "\n".join(["; devices hold", *lines]) if lines else ""
