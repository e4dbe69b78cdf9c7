"""Search for the pieces among the calls of a watched step: the outermost calls that can be captured.

A module that ``torch.export`` refuses is taken apart: the calls of its ``forward`` are tried instead, and the code
around them runs as user code. A class is tried once, and the search has a limit in seconds.
"""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from lightning_hetpipe.capture.effects import SideEffect
from lightning_hetpipe.capture.export import chain_of
from lightning_hetpipe.capture.grouping import is_torchs_own, layers_of
from lightning_hetpipe.capture.observation import CallNode, WatchedCall
from lightning_hetpipe.capture.parity_check import capture
from lightning_hetpipe.capture.pieces import Piece
from lightning_hetpipe.errors import SettingError, reason_of
from lightning_hetpipe.pipeline.random.generators import RandomGenerators

NAMED = 4
"""Largest number of pieces that a message names."""

CAPTURE_TIMEOUT = 60.0
"""Default seconds for taking modules apart."""


@dataclass(frozen=True)
class TakenApart:
    """Modules that ``training_step`` calls and that no pipeline can run as a whole. False if there are none.

    Attributes:
        modules: These modules, by their paths. Their own code runs as user code.
        reasons: Why they are not pipelined, by their paths.
        pieces: Names of the pieces, in these modules and beside them.
        share: Fraction of ``training_step``'s seconds in pieces.
        timed_out: Whether the time was over before everything was tried.
        shared: The first side effect outside its module, which minibatches in flight would share.
    """

    modules: Mapping[str, nn.Module] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    pieces: Sequence[str] = ()
    share: float = 1.0
    timed_out: bool = False
    shared: SideEffect | None = None

    def __bool__(self) -> bool:
        return bool(self.modules)

    def explanation(self) -> str:
        """Explain to people which modules are pipelined and which are not."""
        name, *others = self.modules
        also = f" ({len(others)} more are taken apart, too)" if others else ""
        pieces = [f"'{piece}'" for piece in self.pieces]
        if len(pieces) > NAMED:
            pieces[NAMED - 1 : -1] = [f"{len(pieces) - NAMED} more"]
        return (
            f"HetPipe: '{name}' cannot be pipelined as a whole, so that it was taken apart{also}: pipelined"
            f" {'are' if len(pieces) > 1 else 'is'} {', '.join(pieces)}, which take {self.share:.0%} of training_step's"
            f" time, and all else in it runs as user code, because {self.reasons[name]}"
        )

    def timeout_warning(self, seconds: float) -> str:
        """Explain that not everything was tried."""
        return (
            f"taking '{next(iter(self.modules))}' apart took more than capture_timeout={seconds:g} seconds, so that"
            " the modules in it that were not tried by then are not pipelined; set capture_timeout to more, or name the"
            " modules to pipeline (module=[...])"
        )


@dataclass(eq=False)
class PieceSearch:
    """Search for the pieces among ``calls``, the outermost calls of modules in a watched step, in their order.

    After ``timeout`` seconds of taking modules apart, nothing more is tried. ``without_graph`` has a line for each
    Sequential of the user's modules that explains why it has no graph.
    """

    calls: Sequence[CallNode]
    generators: RandomGenerators
    minibatch: int
    timeout: float
    without_graph: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._times_called = Counter(node.piece.module for call in self.calls for node in call.all())
        self._refused: dict[object, Exception] = {}
        self._found: list[Piece] = []
        self._seconds = 0.0
        self._timed_out = False

    def pieces(self, *, whole: bool) -> list[Piece]:
        """Return the pieces, with their layers, in the order of their calls. With ``whole``, all must be pieces.

        Raises:
            SettingError: if there is no piece, or if a call that must be a piece is none, with the first reason.
        """
        refusals = [error for call in self.calls if (error := self._settle(call, whole)) is not None]
        if refusals and not self._found:
            raise refusals[0]
        return list(self._found)

    def called(self) -> list[int]:
        """Return the pieces that the step called, as indices into :meth:`pieces`, in the order of the calls."""
        return [self._found.index(node.piece) for node in self._nodes(self.calls)]

    def _nodes(self, nodes: Sequence[CallNode]) -> Iterator[CallNode]:
        for node in nodes:
            if node.piece in self._found:
                yield node
            else:
                yield from self._nodes(node.inner)

    def taken_apart(self, seconds: float) -> TakenApart:
        """Describe the modules that are not pipelined as a whole, in a step that took ``seconds``."""
        left = [call for call in self.calls if call.piece not in self._found]
        return TakenApart(
            {call.piece.name: call.piece.module for call in left},
            {call.piece.name: reason_of(call.refusal) for call in left if call.refusal is not None},
            [piece.name for piece in self._found],
            min(1.0, sum(node.seconds for node in self._nodes(self.calls)) / max(seconds, 1e-9)),
            self._timed_out,
            next((r for r in (call.refusal for call in left) if isinstance(r, SideEffect) and r.is_shared), None),
        )

    def _settle(self, node: CallNode, whole: bool) -> Exception | None:
        """Find the pieces in ``node``. If it is no piece itself, return the reason."""
        calls = [call for call in self.calls if call.piece is node.piece] or [node]
        if node is not calls[0]:  # the first of them has settled it
            return None
        try:
            self._take(node.piece, calls)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever torch.export raises, the module itself has computed
            if whole or (isinstance(error, SideEffect) and error.is_lost):
                raise
            for call in calls:
                call.refusal = error
            for inner in node.inner if len(calls) == 1 else []:  # the parts of several calls have no order
                self._settle(inner, whole)
            return error
        self._found.append(node.piece)
        return None

    def _take(self, piece: Piece, calls: Sequence[CallNode]) -> None:
        """Give ``piece`` its layers, as its ``calls`` in the step show them, or raise the reason why it is no piece."""
        for call in calls:
            if call.refusal is not None:
                raise call.refusal
        if self._seconds > self.timeout:
            self._timed_out = True
            raise SettingError(f"'{piece.name}' was not tried, as the time for taking modules apart was over")
        if self._times_called[piece.module] > len(calls):
            # Each call would name its random numbers, unlike in a graph of the whole module.
            raise SettingError(f"'{piece.name}' is called several times inside another module")
        parts = set(piece.module.modules())
        if any(other.module in parts or piece.module in other.module.modules() for other in self._found):
            raise SettingError(f"'{piece.name}' is a part of another pipelined module, or that of it")
        graphs = [call.graph for call in calls if call.graph is not None]
        if not graphs:
            return
        for graph in graphs:
            graph.own_buffers(piece.name, piece.module)
        if piece.needs_graph():
            self._capture(piece, graphs, type(piece.module), type(piece.module).__name__)
            return
        # Without a graph its layers are known anyway.
        layers, inputs = piece.layers, piece.inputs
        piece.layers, piece.inputs = [], []
        kinds = {type(layer) for _, layer in layers_of("", piece.module) if not is_torchs_own(layer)}
        try:
            for graph in graphs:
                if graph.refusal is not None:
                    raise graph.refusal
            self._capture(piece, graphs, frozenset(kinds), "such Sequential")
        except (torch.OutOfMemoryError, SideEffect):  # which the layers would have without a graph, too
            raise
        except Exception as error:  # whatever torch.export raises, the module itself has computed
            piece.layers, piece.inputs, piece.captured = layers, inputs, None
            self.without_graph.append(without_graph(piece, error))

    def _capture(self, piece: Piece, graphs: Sequence[WatchedCall], kind: object, name: str) -> None:
        """Capture ``piece``, unless another piece of its ``kind``, called ``name``, was refused."""
        if kind in self._refused:
            raise SettingError(f"another {name} could not be captured: {reason_of(self._refused[kind])}")
        began, apart = time.perf_counter(), bool(self._refused)
        try:
            capture(piece, graphs, self.generators, self.minibatch)
        except Exception as error:
            self._refused[kind] = error
            raise
        finally:
            if apart:
                self._seconds += time.perf_counter() - began


def without_graph(piece: Piece, error: Exception) -> str:
    """Explain that the layers of ``piece``, a Sequential, are its children because it has no graph."""
    child = _raised_in(piece, error)
    which = f" (in its layer '{child}')" if child else ""
    return (
        f"HetPipe: '{piece.name}' has no graph, so that stages begin between its children only, and run their Python"
        f" code, because{which} {reason_of(error)}"
    )


def _raised_in(piece: Piece, error: BaseException) -> str | None:
    """Return the child of the Sequential ``piece`` whose code raised ``error``, or a cause of it."""
    owners = {id(vars(part)): name for name, layer in layers_of(piece.name, piece.module) for part in layer.modules()}
    for frame in (frame for each in chain_of(error) for frame, _ in traceback.walk_tb(each.__traceback__)):
        owner = frame.f_locals.get("self")
        # While a module is traced, its replacement shares its attributes.
        if isinstance(owner, nn.Module) and id(vars(owner)) in owners:
            return owners[id(vars(owner))]
    return None
