"""Calls of modules in the watched step, with the calls that these make, and what the step holds beside them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_hetpipe.capture.contents import SetsState
from lightning_hetpipe.capture.frozen import FrozenValues
from lightning_hetpipe.capture.pieces import Piece
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.pipeline.autocast import Autocast
from lightning_hetpipe.pipeline.values import Value, blocks, tensors_of
from lightning_hetpipe.planning.model.profile import UserBytes
from lightning_hetpipe.torch_private.autograd import graph_nodes
from lightning_hetpipe.torch_private.subclasses import address_of
from lightning_hetpipe.torch_private.tensors import version_counter

T = TypeVar("T")


class Checked:
    """Something that may be refused, with the first reason."""

    refusal: Exception | None

    def check(self, check: Callable[[], T]) -> T | None:
        """Call ``check``, unless this is refused already, and keep the error that it raises."""
        if self.refusal is None:
            try:
                return check()
            except SettingError as error:
                self.refusal = error
        return None


@dataclass
class CallNode(Checked):
    """One call of a module.

    Attributes:
        piece: The module, as the piece that it is if a pipeline can run it.
        inner: The calls that it made of modules with trainable parameters, in order.
        seconds: How long it took, with those.
        refusal: Why no pipeline can run it, as far as the call has shown that.
        graph: What is needed to make its graph; None if it is to have none.
        inputs, outputs: Nodes of autograd's graph that what it was given, and what it returned, come from.
        blocks: Blocks of memory that its output lies in.
        training: Whether the module was in training mode.
    """

    piece: Piece
    inner: list[CallNode] = field(default_factory=list)
    seconds: float = 0.0
    refusal: Exception | None = None
    graph: WatchedCall | None = None
    inputs: list[Any] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    blocks: Collection[Any] = ()
    training: bool = True

    def ends(self, given: Any, output: Any) -> None:
        """Note where the call lies in autograd's graph."""
        given, made = tensors_of(given), tensors_of(output)
        self.inputs = [tensor.grad_fn for tensor in given if tensor.grad_fn is not None]
        self.outputs = [tensor.grad_fn for tensor in made if tensor.grad_fn is not None]
        self.blocks = blocks(made)

    def all(self) -> Iterator[CallNode]:
        """This call and all below it, in order."""
        yield self
        for each in self.inner:
            yield from each.all()


@dataclass
class WatchedCall(Checked):
    """The watched call of a module of which a graph is to be made.

    Attributes:
        given: What it was given: (args, kwargs).
        inputs: The tensors in that, where they are in autograd's graph.
        buffers: Copies of its buffers from before, by path.
        memory: The addresses of its buffers before, by path.
        gave: What it gave; None until it is over.
        outputs: The tensors in that, where they are in autograd's graph.
        frozen: What it may have read of Python outside itself.
        autocast: What autocast did at the call.
        counters: How often each tensor of ``given`` and ``gave`` had been changed in place when it was over.
        lent: The path of a buffer that shared memory with one of these tensors when it was over.
        refusal: Why an ``nn.Sequential`` gets no graph, although it can run without one; None if that is not known.
    """

    given: Value
    inputs: Sequence[Tensor]
    buffers: dict[str, Tensor]
    memory: Mapping[str, int | None]
    frozen: FrozenValues
    autocast: Autocast = field(default_factory=Autocast.current)
    gave: Value | None = None
    outputs: Sequence[Tensor] = ()
    counters: list[int] = field(default_factory=list)
    lent: str | None = None
    refusal: Exception | None = None

    def end(self, module: nn.Module, gave: Any) -> None:
        """Note that the call of ``module`` is over, and ``gave`` this."""
        self.gave, self.outputs = Value.of(gave), tensors_of(gave)
        self.counters = self._count()
        seen = {address_of(tensor) for tensor in self._tensors()} - {None}
        for path, buffer in module.named_buffers():
            if path not in self.buffers or self.buffers[path].shape != buffer.shape:
                self.buffers[path] = buffer.clone()  # it is made in the first forward
            if address_of(buffer) in seen:
                self.lent = path

    def own_buffers(self, name: str, module: nn.Module) -> None:
        """Give the buffers of ``module``, which has this ``name``, memory of their own, as stages write to them.

        Raises:
            SetsState: if later code has changed one in place, through what the call was given or gave.
        """
        if self.lent is not None and self.was_changed:
            raise SetsState(
                f"'{name}' shares the memory of its buffer '{name}.{self.lent}' with what it is given or returns, which"
                " is changed in place later in training_step; give it, or return, a clone()"
            )
        for path, buffer in module.named_buffers():
            if address_of(buffer) != self.memory.get(path):  # it was assigned, maybe a view of a batch
                buffer.data = buffer.detach().clone()

    @property
    def was_changed(self) -> bool:
        """True if later code has changed in place what it was given or gave."""
        return self.counters != self._count()

    def _count(self) -> list[int]:
        return [version_counter(tensor) for tensor in self._tensors()]

    def _tensors(self) -> Sequence[Tensor]:
        return self.given.tensors + (() if self.gave is None else self.gave.tensors)


def user_bytes(
    root: nn.Module, loss: Tensor, batch: Any, calls: Sequence[CallNode], pieces: Collection[nn.Module]
) -> UserBytes:
    """Count what lies on the last stage's device besides layers.

    Args:
        root: The LightningModule.
        loss: Of the watched step, before its backward.
        batch: Arguments of the step.
        calls: Calls of ``pieces`` in it.
        pieces: The modules that are pipelined.
    """
    inside = {id(tensor) for piece in pieces for tensor in (*piece.parameters(), *piece.buffers())}
    outside = [each for each in (*root.parameters(), *root.buffers()) if id(each) not in inside]
    trained = sum(each.nbytes for each in outside if each.requires_grad)
    ends = {node for call in calls for node in call.outputs}
    behind = {*graph_nodes([loss.grad_fn], ends)}
    before = {*graph_nodes((node for call in calls for node in call.inputs), ends)}
    own = blocks(tensors_of(batch))
    counted = {*own, *blocks((*root.parameters(), *root.buffers())), *(each for call in calls for each in call.blocks)}
    kept, saved = _saved(before), _saved(behind - before)
    return UserBytes(
        trained,
        sum(each.nbytes for each in outside) - trained,
        sum(own.values()),
        sum(size for block, size in kept.items() if block not in counted),
        sum(size for block, size in saved.items() if block not in counted and block not in kept),
    )


def _saved(nodes: Iterable[Any]) -> dict[tuple[torch.device, int], int]:
    """The blocks of memory that ``nodes`` keep for their backward."""
    return blocks([tensor for node in nodes for tensor in _saved_by(node)])


def _saved_by(node: Any) -> Iterator[Tensor]:
    """Yield what ``node`` keeps; where hooks have packed it, the packed tensor, since to unpack would run user code."""
    for name in _names(node.__class__):
        value = getattr(node, name)
        packed = (each.data for each in (value if isinstance(value, tuple) else [value]) if hasattr(each, "data"))
        yield from (each for each in packed if isinstance(each, Tensor))


@cache
def _names(kind: Any) -> list[str]:
    """The attributes of nodes of that ``kind`` that hold saved tensors, as torch documents them."""
    return [name for name in dir(kind) if name.startswith("_raw_saved_")]
