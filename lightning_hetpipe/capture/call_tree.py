"""Calls of modules in the watched step, with the calls that these make, and so on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from lightning_hetpipe.capture.frozen import FrozenValues
from lightning_hetpipe.capture.pieces import Piece
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.pipeline.autocast import Autocast
from lightning_hetpipe.pipeline.values import Value, blocks, tensors_of
from lightning_hetpipe.torch_private.tensors import version_counter


class Checked:
    """Something that may be refused, with the first reason."""

    refusal: Exception | None

    def check(self, check: Callable[[], object]) -> None:
        """Call ``check``, unless this is refused already, and keep the error that it raises."""
        try:
            if self.refusal is None:
                check()
        except SettingError as error:
            self.refusal = error


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
        gave: What it gave; None until it is over.
        outputs: The tensors in that, where they are in autograd's graph.
        frozen: What it may have read of Python outside itself.
        autocast: What autocast did at the call.
        counters: How often each tensor of ``given`` and ``gave`` had been changed in place when it was over.
        refusal: Why no graph can stand for the module, as far as the call has shown that, though it needs none.
    """

    given: Value
    inputs: Sequence[Tensor]
    buffers: dict[str, Tensor]
    frozen: FrozenValues
    autocast: Autocast = field(default_factory=Autocast.current)
    gave: Value | None = None
    outputs: Sequence[Tensor] = ()
    counters: list[int] = field(default_factory=list)
    refusal: Exception | None = None

    def end(self, module: nn.Module, gave: Any) -> None:
        """Note that the call of ``module`` is over, and ``gave`` this."""
        self.gave, self.outputs = Value.of(gave), tensors_of(gave)
        self.counters = self._count()
        for path, buffer in module.named_buffers():
            if path not in self.buffers or self.buffers[path].shape != buffer.shape:
                self.buffers[path] = buffer.clone()  # it is made in the first forward

    @property
    def was_changed(self) -> bool:
        """True if later code has changed in place what it was given or gave."""
        return self.counters != self._count()

    def _count(self) -> list[int]:
        tensors = self.given.tensors + (() if self.gave is None else self.gave.tensors)
        return [version_counter(tensor) for tensor in tensors]
