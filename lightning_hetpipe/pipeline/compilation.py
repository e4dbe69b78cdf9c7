"""A segment's layers, compiled by ``torch.compile``: one graph for all versions of its weights.

The layers of a segment are compiled as one function of their weights, buffers and input. All Nm versions of weights use
the same code. Other code is compiled for another *kind* of call: other sizes, frozen weights, another state of
autocast. Torch decides: after the first other size it compiles for any size.

While torch's compiler works it changes state of the whole process, such as random state and the default dtype, and
restores it. In all threads ``torch.compiler.is_compiling()`` is true, by which torch's optimizers decide how they
compute (*measured*: weights after an AdamW step that overlapped differed by 1e-7). So the first forward and the first
backward of each kind run alone: no stage computes, and no user code runs (:mod:`~lightning_hetpipe.pipeline.threads`).

Guards look at the process's default dtype, and would compile anew whenever user code changes it in another thread. So
guards are left out. All else that they check is the same for every call of a stage except autocast, and each state of
autocast has its own code. A layer that cannot be compiled runs as it is, and its neighbours are compiled separately.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from itertools import groupby
from types import FunctionType
from typing import Any

import torch
from torch import nn

from lightning_hetpipe.errors import PipelineRefusal, first_line
from lightning_hetpipe.pipeline.dtypes import Autocast
from lightning_hetpipe.pipeline.graph_layer import here, set_here
from lightning_hetpipe.pipeline.random.generators import counters, generator_of
from lightning_hetpipe.pipeline.random.graph_draws import NoDropout, refuse_other_draws, register
from lightning_hetpipe.pipeline.stage_messages import Flags
from lightning_hetpipe.pipeline.values import Value
from lightning_hetpipe.redirect import Redirect
from lightning_hetpipe.torch_private.graphs import CompilerError, CompilerLimit, compiled
from lightning_hetpipe.torch_private.modes import without_dispatch_modes

REMEMBERED = 1024
"""Number of kinds of calls that a segment remembers."""

Kind = Hashable
Run = Callable[[Sequence[nn.Module], Any], Any]


@dataclass(frozen=True)
class CompiledGroup:
    """Neighbouring layers, from ``first`` up to but without ``last``, either compiled together or run as they are."""

    first: int
    last: int
    compiled: bool


class KindsOfCalls:
    """Kinds of calls that a segment has computed, for which torch has nothing left to compile."""

    def __init__(self) -> None:
        self._forwards: dict[Kind, bool] = {}  # whether compiled code runs for that kind
        self._backwards: dict[Kind, None] = {}

    def kind(self, value: Value, flags: Flags, autocast: Autocast) -> Kind:
        """Return the key of a call. Calls with equal keys run the same compiled code."""
        tensors = tuple([(t.shape, t.stride(), t.dtype) for t in value.tensors])
        others = tuple([other if isinstance(other, int | float | str) else type(other) for other in value.others])
        return tensors, value.requires_grad, others, flags, autocast

    def is_new(self, kind: Kind) -> bool:
        """Return True if no forward of this kind has been computed."""
        return kind not in self._forwards

    def computed(self, kind: Kind, *, compiled: bool = True) -> None:
        """Record that a forward of this kind was computed, by ``compiled`` code or not."""
        _remember(self._forwards, kind, compiled)

    def begins_backward(self, kind: Kind) -> bool:
        """Return True for the first backward of this kind."""
        if kind in self._backwards:
            return False
        _remember(self._backwards, kind, None)
        return True


class Compiled(KindsOfCalls):
    """The layers of one segment, on ``device``.

    Args:
        calls: Callable for each layer that runs as it is.
        options: Options of ``torch.compile``.
        fused: Whether attention may contain a dropout, because the device has no other fast attention.
    """

    def __init__(
        self,
        names: Sequence[str],
        layers: Sequence[nn.Module],
        calls: Sequence[Callable[..., Any]],
        options: Mapping[str, Any],
        device: torch.device,
        *,
        fused: bool = True,
    ) -> None:
        super().__init__()
        register(generator_of)
        constant: Any = torch.compiler.assume_constant_result  # torch has no types here
        constant(here)
        self._names = list(names)
        self._layers = layers
        self._calls = calls
        self._counters = [counters(layer) for layer in layers]
        self._options = options
        self._device = device
        self._fused = fused
        self._cannot: set[int] = set()
        self._functions: dict[tuple[CompiledGroup, Autocast], Run] = {}
        self._regroup(self._cannot)

    def __call__(self, kind: Kind, value: Any, autocast: Autocast) -> Any:
        """Run the layers on ``value``. If the kind is new, nothing else may compute."""
        set_here(self._device)
        compiled = self._forwards.get(kind)
        if compiled is None:
            return self._first(kind, value, autocast)
        for group in self._groups:
            value = self._run(group, value, autocast) if compiled else self._plain(group, value)
        return value

    def _first(self, kind: Kind, value: Any, autocast: Autocast) -> Any:
        """First run for one kind of input: compile group after group. From the first refused group on, run eagerly."""
        compiled, reasons = True, dict[int, str]()
        for group in self._groups:
            if not compiled:
                value = self._plain(group, value)
                continue
            try:
                value = self._run(group, value, autocast)
            except CompilerLimit as error:
                compiled = False
                self._warn(group, f"it was given inputs of too many kinds: {compiler_reason(error)}")
                value = self._plain(group, value)
            except (CompilerError, NoDropout):
                for index in range(group.first, group.last):
                    value = self._single(CompiledGroup(index, index + 1, True), value, autocast, reasons)
        if reasons:
            self._regroup(reasons)
        else:
            self.computed(kind, compiled=compiled)
        return value

    def _single(self, layer: CompiledGroup, value: Any, autocast: Autocast, reasons: dict[int, str]) -> Any:
        """Run one layer of a group that could not be compiled as a whole."""
        try:
            return self._run(layer, value, autocast)
        except (CompilerError, CompilerLimit, NoDropout) as error:
            reasons[layer.first] = compiler_reason(error)
            value = self._plain(layer, value)  # an error of the layer itself is raised here unchanged
            self._warn(layer, reasons[layer.first])
            return value

    def _regroup(self, cannot: Iterable[int]) -> None:
        """Run the layers ``cannot`` uncompiled from now on. The next forward of any kind compiles the other layers."""
        self._cannot |= {*cannot}
        found = [list(of) for _, of in groupby(range(len(self._names)), key=lambda index: index in self._cannot)]
        self._groups = [CompiledGroup(of[0], of[-1] + 1, of[0] not in self._cannot) for of in found]
        self._functions.clear()
        self._forwards.clear()
        self._backwards.clear()

    def _run(self, group: CompiledGroup, value: Any, autocast: Autocast) -> Any:
        if not group.compiled:
            return self._plain(group, value)
        run = self._functions.get((group, autocast))
        if run is None:
            function = under_own_code(_in_order, f"{self._names[group.first]} to {self._names[group.last - 1]}")
            run = compiled(function, self._options, functools.partial(refuse_other_draws, fused=self._fused))
            self._functions[group, autocast] = run
        for of_layer in self._counters[group.first : group.last]:
            for counter in of_layer:
                counter.in_graph = 0
        return run(self._layers[group.first : group.last], value)

    def _plain(self, group: CompiledGroup, value: Any) -> Any:
        for call in self._calls[group.first : group.last]:
            value = call(value)
        return value

    def _warn(self, group: CompiledGroup, reason: str) -> None:
        which = names_of(self._names[group.first], self._names[group.last - 1])
        warnings.warn(f"torch.compile cannot compile {which}, which a stage runs uncompiled: {reason}", stacklevel=2)


def names_of(first: str, last: str) -> str:
    return f"layer {first}" if first == last else f"layers {first} to {last}"


def under_own_code(function: Callable[..., Any], name: str) -> FunctionType:
    """Copy ``function`` with a code object of its own, called ``name``. Torch keeps compiled code with the function's
    code object, at most eight for each: stages and groups must not share one."""
    assert isinstance(function, FunctionType)
    return FunctionType(function.__code__.replace(co_name=name), function.__globals__)


def _in_order(layers: Sequence[nn.Module], value: Any) -> Any:
    for layer in layers:
        value = layer(value)
    return value


def _remember(known: dict[Kind, Any], kind: Kind, what: Any) -> None:
    if kind not in known and len(known) == REMEMBERED:
        known.clear()
    known[kind] = what


def compiler_reason(error: BaseException) -> str:
    """Summarise a compiler's error, which may hold another error and have pages, in one line."""
    lines = [line.strip() for line in str(getattr(error, "inner_exception", error)).splitlines() if line.strip()]
    context = [line.partition(_CONTEXT)[2].strip() for line in lines if line.startswith(_CONTEXT)]
    return ": ".join([*lines[:1], *context[:1]]) or type(error).__name__


_CONTEXT = "Developer debug context:"

Exclusively = Callable[[int, str], AbstractContextManager[None]]
"""Given a minibatch's number and who asks, opens a context without user code or computations in other threads."""


@contextmanager
def compiled_calls_apart() -> Iterator[None]:
    """Context manager in which functions of torch may compile their arguments in each call, in any thread. Examples are
    ``torch.cond`` and ``flex_attention``. Dynamo cannot trace our modes, and leaves traces of the attempt. So
    ``torch.cond`` runs the chosen branch, and other code that torch compiles within a call runs without our modes."""
    with ExitStack() as stack:
        stack.callback(Redirect(torch, "cond", _decided).remove)
        stack.callback(Redirect(torch, "compile", _apart).remove)
        yield


def _decided(redirect: Redirect, pred: Any, true_fn: Any, false_fn: Any, operands: Any = ()) -> Any:
    """Run one branch, as ``torch.cond`` is documented to do. A graph around it then depends on its data."""
    if torch.compiler.is_dynamo_compiling():
        return redirect.original(pred, true_fn, false_fn, operands)
    return (true_fn if pred else false_fn)(*operands)


def _apart(redirect: Redirect, model: Any = None, **options: Any) -> Any:
    """Compile ``model`` so that compilation within one of our modes runs without the mode."""
    if model is None:
        return functools.partial(_apart, redirect, **options)
    made: Callable[..., Any] = redirect.original(model, **options)
    if not isinstance(made, FunctionType):
        return made

    @functools.wraps(made)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            with without_dispatch_modes():
                return made(*args, **kwargs)
        except CompilerError as error:
            torch.compiler.reset()  # what was compiled half would fail in later runs of the process
            raise PipelineRefusal(
                "torch could not compile what a function of its own, such as torch.cond, was given in a minibatch"
                f" ({first_line(error).rstrip('.:')}); call torch.cond by that name, or write it with torch.where"
            ) from error

    return run
