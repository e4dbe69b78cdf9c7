"""Bytes that a stage holds, counted by the engine: now, and at the most.

Weight versions
    The version buffers that hold one; what several versions share counts once. (All Nm are allocated when the pipeline
    is built.) Parameters only: modules' buffers are small, and are not versions.
Activations
    What a stage keeps from a minibatch's forward until its backward is done: the inputs and outputs of its layers, and
    what autograd has saved between them. A block of memory counts once, the version's weights and the buffers do not.
    Stages on one device that hand a tensor on without a copy count it both, as each keeps it.
Gradients
    What a stage's backward has found, until weights have it; a sparse one as if it were dense. How many wait
    is a matter of how fast Lightning's thread is, which no plan knows, and in an evaluation between two steps those of
    all minibatches in flight do. What the device has no room for waits on the host (:class:`PlannedMemory`).

The bound: a stage holds the activations of at most Nm minibatches, and Nm versions, as minibatch p enters the pipeline
when version p - Nm is published (law L1; HetPipe, section 4), and leaves every stage before version p is. The last
stage holds one minibatch, where all of the model is one piece: forward, loss and backward are one task there. How many
it really is, is a matter of the schedule: :func:`~lightning_hetpipe.planning.model.simulate.simulate` says it. Where
real times differ from simulated ones, a stage may be handed more minibatches than its device has room for: these wait,
in order, until it has done the backward of one that it holds.

To ask autograd what it saves costs 5 us for each tensor (*measured*). So a segment's activations are counted with the
first minibatch of its inputs' sizes since the pipeline started empty, and remembered; the rest, 2.5 us for each
minibatch and stage, is always on. What a user's ``torch.autograd.Function`` keeps without ``save_for_backward`` is not
seen.

Where a forward is computed again for its backward (``recompute``), a stage keeps only the inputs of the minibatches
that it holds, and all of the one that it computes right now.

Here are also the notes on errors for want of memory, and :func:`keep_freed_memory`.
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
    """Memory of a stage, as its plan has it.

    Attributes:
        total: Bytes that the stage takes of its device.
        limit: Bytes of the device; None where these are no limit.
        room: Bytes that activations and waiting gradients may take together; None where there is no limit.
    """

    total: int
    limit: int | None = None
    room: int | None = None

    def __str__(self) -> str:
        return in_bytes(self.total) if self.limit is None else f"{in_bytes(self.total)} of {in_bytes(self.limit)}"


class Level:
    """A quantity, now and at the most."""

    def __init__(self) -> None:
        self.now = 0
        self.most = 0

    def add(self, amount: int) -> None:
        self.now += amount
        if self.now > self.most:
            self.most = self.now


class Memory:
    """Bytes that one stage holds; counted by its own thread and Lightning's.

    Attributes:
        limited: Whether activations and waiting gradients have a limit.
        visits: How often each minibatch comes to the stage.
        versions, activations, gradients: Bytes.
        total: Bytes of the three together, at any one time.
        on_host: Bytes of gradients that wait on the host, as the stage has no room for them.
        minibatches: How many minibatches' activations there are.
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
        self._largest = 0  # what one minibatch has kept after all of its visits
        self._waiting: dict[int, int] = {}
        self._out: dict[int, int] = {}

    def lacks(self, coming: int) -> bool:
        """Return True if activations, waiting gradients and what is ``coming`` exceed their room."""
        return self.activations.now + self.gradients.now + coming > self._room

    def holds(self, minibatch: int) -> bool:
        """Return True if something is kept of ``minibatch``, beside gradients."""
        return minibatch in self._held

    def admits(self, coming: int) -> bool:
        """Return True if there is room for one minibatch more, which keeps ``coming`` bytes of its first visit."""
        with self._lock:
            if not self._held:
                return True
            if self.visits > 1 and not self._largest:
                return False
            held = sum(max(self._largest, sum(visits.values())) for visits in self._held.values())
            return held + max(self._largest, coming) <= self._room

    def waiting(self) -> list[int]:
        """The minibatches whose gradients wait on the device, and of which nothing else is kept."""
        with self._lock:
            return [minibatch for minibatch in self._waiting if minibatch not in self._held]

    def move_out(self, minibatch: int) -> None:
        """The gradients of ``minibatch`` wait on the host from now on."""
        with self._lock:
            moved = self._out[minibatch] = self._waiting.pop(minibatch, 0)
            self._add(self.gradients, -moved)
            self.on_host.add(moved)

    def told(self) -> str:
        """The bytes that there are now, and what was planned, for messages."""
        held = self.minibatches.now
        now = (
            f"{in_bytes(self.versions.now)} of weight versions, {in_bytes(self.activations.now)} of activations of"
            f" {held} minibatch{'' if held == 1 else 'es'} and {in_bytes(self.gradients.now)} of waiting gradients"
        )
        if self.planned is None:
            return now
        return f"{now}; the plan has {self.planned} for it, with live weights and optimizer state"

    def publish(self, versions: int) -> None:
        """The versions are now so many bytes."""
        if versions != self.versions.now:
            with self._lock:
                self._add(self.versions, versions - self.versions.now)

    def hold(self, minibatch: int, visit: Hashable, activations: int) -> None:
        """Note the bytes that a ``visit`` of ``minibatch`` to a segment now keeps there."""
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
        """Nothing is kept of that ``visit`` any more, but ``gradients`` wait for Lightning's step."""
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
        """Weights have the gradients of ``minibatch``."""
        with self._lock:
            self._add(self.gradients, -self._waiting.pop(minibatch, 0))
            self.on_host.add(-self._out.pop(minibatch, 0))

    def forget(self, minibatch: int) -> None:
        """Nothing of ``minibatch`` is kept any more."""
        for visit in [*self._held.get(minibatch, ())]:
            self.release(minibatch, visit)
        self.take(minibatch)

    def clear(self) -> None:
        """Nothing is in flight."""
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
        """All that is counted."""
        return [self.versions, self.activations, self.gradients, self.on_host, self.total, self.minibatches]

    def mirror(self, levels: Sequence[Sequence[int]]) -> None:
        """Show what is counted elsewhere: of each of :meth:`levels` what it is now, and at the most."""
        for level, (now, most) in zip(self.levels(), levels, strict=True):
            level.now, level.most = now, most
        self._since = max(self._since, self.total.now)

    def most_lately(self) -> int:
        """The most in total since this was last asked."""
        with self._lock:
            most, self._since = self._since, self.total.now
        return most

    def _add(self, level: Level, amount: int) -> None:
        if not amount:
            return
        # Written out, as calls of `add` would cost more than the rest.
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
    """Counts what the forwards of one segment leave behind, by the sizes of their inputs."""

    def __init__(self) -> None:
        self._known: dict[Any, Kept] = {}

    def clear(self) -> None:
        """Counts anew from now on: layers may have been frozen, say."""
        self._known.clear()

    def known(self, inputs: Sequence[Tensor]) -> Kept | None:
        """Bytes that a forward of such ``inputs`` leaves, if there was one."""
        return self._known.get(_sizes(inputs))

    def kept(
        self, inputs: Sequence[Tensor], forward: Callable[[], T], besides: Callable[[], Iterable[Tensor]]
    ) -> tuple[T, Kept]:
        """Run ``forward``; return its result and the bytes that it leaves, without those of ``besides``."""
        if len(self._known) == REMEMBERED:
            self._known.clear()
        watched = weakref.WeakSet[_Saved]()  # what the graph still needs

        def pack(tensor: Tensor) -> _Saved:
            # An output that was saved as it is would keep its own graph alive, which keeps it: it would never go.
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
"""Bytes of the largest allocation from which glibc learns; measured: 32 MiB less what it adds of its own."""


def keep_freed_memory() -> None:
    """Have the C library keep freed memory, rather than give it back to the system after each minibatch.

    By default a thread's free memory of more than twice the largest block that was mapped alone goes back. A stage
    frees all activations of a minibatch at once, and each page of the next minibatch then costs a fault: a fifth of
    the time of small convolutions. To free one large block teaches glibc to keep up to 64 MiB for each of its arenas
    (mallopt(3), M_MMAP_THRESHOLD); other C libraries just free it.
    """
    torch.empty(LARGEST_LEARNED, dtype=torch.uint8)


_BEGIN = "HetPipeStrategy: "


def explain(error: torch.OutOfMemoryError, text: str) -> None:
    """Add a note with ``text`` to ``error``, unless it has such a note already."""
    if not any(note.startswith(_BEGIN) for note in getattr(error, "__notes__", ())):
        error.add_note(f"{_BEGIN}{text}")


def less(in_flight: int, recompute: bool) -> str:
    """Say how stages take less memory, as the end of a sentence."""
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
    """Say what each device of ``stages`` holds, a line for each; nothing for a CPU.

    Args:
        stages: The device of each stage.
        planned: What a plan, or the limit of a device, has for it.
    """
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
