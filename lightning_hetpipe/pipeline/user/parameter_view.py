"""The parameters that ``training_step`` sees: the version of its minibatch (law L1).

Calls of pipelined modules run on copies. Other code of ``training_step`` may use a parameter: a learnable temperature,
an L2 term, the norm of a weight. It holds the *live* one, which has another version or is being changed. So in a
minibatch's thread torch's functions get the version's copy instead, on the device of user code. The gradients of the
copies belong to the live parameters.

A tensor that was given to a pipelined module has a stand-in after the call. It leads through the call's boundary in the
graph, so that the gradients of its uses are added in the order of a plain backward.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from lightning_hetpipe.accelerator import accelerates
from lightning_hetpipe.errors import PipelineRefusal, SettingError
from lightning_hetpipe.pipeline.weight_stash import Live, VersionedLayers
from lightning_hetpipe.rules.versions import Reading
from lightning_hetpipe.torch_private.modes import OwnMode, UntoldFunction, enter_function_mode, leave_function_mode
from lightning_hetpipe.torch_private.tensors import (
    address_of,
    behind_functorch,
    pytree,
    unseen_change,
    version_counter,
    viewed,
)

if TYPE_CHECKING:
    from lightning_hetpipe.pipeline.user.minibatch import Minibatch

_METADATA = {"shape", "dtype", "ndim", "layout", "itemsize", "nbytes", "is_meta"}
_METADATA |= {"size", "dim", "numel", "nelement", "ndimension", "stride", "element_size", "__len__"}
_METADATA |= {"is_contiguous", "is_floating_point", "is_complex", "is_sparse"}
"""Properties that are equal in every version."""

_PLACE = {"device", "get_device", "is_cpu", "is_cuda", "is_xpu"}
"""Properties that are answered for the device of user code if a parameter is concerned."""

_OF_THE_TENSOR = {"register_hook", "register_post_accumulate_grad_hook", "retain_grad", "retains_grad", "grad"}
_OF_THE_TENSOR |= {"grad_fn", "is_leaf", "output_nr", "requires_grad", "requires_grad_", "backward"}
"""Properties of a tensor itself with all its uses, even if it has a stand-in."""

_FRAMES = 12
"""Largest number of calls within torch from a user's function to a method of a tensor."""

_LASTING = {"register_hook", "register_post_accumulate_grad_hook", "requires_grad_"}
"""Methods that would affect only one version's copy, and be lost with it."""


@dataclass(frozen=True)
class _Weight:
    name: str
    live: nn.Parameter
    stash: VersionedLayers
    index: int  # in the stash


@dataclass(frozen=True)
class _Buffer:
    name: str
    live: Tensor
    changes: bool  # forwards change it


class VersionedTensors:
    """Live parameters, whose versions are in ``stashes``, and live buffers of ``layers``, which stages copy. The
    ``root`` module names the tensors. ``changing`` has the ``id`` of each live buffer that forwards change."""

    def __init__(
        self,
        root: nn.Module,
        stashes: Sequence[tuple[Live, VersionedLayers]],
        layers: Sequence[nn.Module],
        changing: Collection[int] = (),
    ) -> None:
        names = {id(tensor): name for name, tensor in (*root.named_parameters(), *root.named_buffers())}
        self.known: dict[int, _Weight | _Buffer] = {}
        for own, stash in stashes:
            for index, live in enumerate(own.parameters):
                self.known.setdefault(id(live), _Weight(names.get(id(live), "of a layer"), live, stash, index))
        for buffer in (buffer for layer in layers for buffer in layer.buffers()):
            self.known[id(buffer)] = _Buffer(names.get(id(buffer), "of a layer"), buffer, id(buffer) in changing)
        self.memory = {
            address_of(found.live): found
            for found in self.known.values()
            if (found.changes if isinstance(found, _Buffer) else found.live.requires_grad)
        }
        """Known tensors that change, by the address of their memory."""
        self.memory.pop(None, None)  # of tensors at hosts

    def of_version(self, live: nn.Parameter, weights: Reading) -> Tensor:
        """Return the tensor of a ``live`` parameter in ``weights``."""
        weight = self.known[id(live)]
        assert isinstance(weight, _Weight)
        return weight.stash.tensor(weight.index, weights)


class _StandIn:
    """A tensor that was given to a pipelined module, and its stand-in from then on. Both lie in the same memory.
    Autograd does not know that, and each may have views."""

    def __init__(self, live: Tensor, later: Tensor) -> None:
        self.live, self.later = live, later
        self._nodes = self._now()

    def get(self) -> Tensor:
        """Return ``later``. If ``live`` was changed in place, first make it lead through ``later``.

        Raises:
            SettingError: if another tensor's change of the memory bypasses ``later``.
        """
        live, later = self._now()
        if live is not self._nodes[0]:
            raise PipelineRefusal(
                f"training_step uses a tensor of shape {tuple(self.live.shape)} that it gave to a pipelined module and"
                " has changed in place meanwhile by way of another tensor (a view of it, or what it is a view of);"
                " change a clone() of that"
            )
        if later is not self._nodes[1]:
            follow: Any = _Follow.apply  # torch has no types here
            with torch.enable_grad(), unseen_change(self.live):
                follow(self.live, self.later)
            self._nodes = self._now()
        return self.later

    def _now(self) -> tuple[Any, Any]:
        """Return the nodes of both in autograd's graph. A view's node is made anew after each change of its memory."""
        return viewed(self.live).grad_fn, viewed(self.later).grad_fn


class _Follow(UntoldFunction):
    """A function that gives ``live``, its views and its base the history of ``later``."""

    @staticmethod
    def forward(ctx: Any, live: Tensor, later: Tensor) -> Tensor:
        ctx.mark_dirty(live)
        return live

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(gradients[0]), gradients[0]


@dataclass(frozen=True)
class UsedParameter:
    """A parameter that user code has used in one region, between two calls of pipelined modules.

    Attributes:
        copy: The leaf for it, on the device of the version.
        seen: The tensor for user code: ``copy``, or its copy on the device of user code.
        counter: How often ``seen`` had been changed in place when it was made.
    """

    name: str
    live: nn.Parameter
    copy: nn.Parameter
    seen: Tensor
    counter: int

    def check(self) -> None:
        if version_counter(self.seen) != self.counter:
            raise changes_parameter(self.name)


class ParameterView(OwnMode):
    """A mode that gives torch's functions the parameters of ``weights``, opened in the thread of one minibatch. If
    minibatches may run ``ahead``, live buffers and gradients are of another moment. User code computes on
    ``device``."""

    def __init__(self, tensors: VersionedTensors, weights: Reading, ahead: bool, device: torch.device) -> None:
        super().__init__()
        self._known = tensors.known
        self._memory = tensors.memory
        self._weights = weights
        self._ahead = ahead
        self._device = device
        self.region = 0
        """Number of calls of pieces so far. Uses after each call have their own gradients."""
        self.calls: Minibatch | None = None
        """The minibatch, until :meth:`close`. The minibatch holds this view, and a cycle would keep its tensors."""
        self._shown = 0  # the region in which it was called last
        self._used: dict[tuple[int, int], UsedParameter] = {}
        self._stand_ins: dict[int, _StandIn] = {}
        self._suspended = False

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Context manager in which functions get their arguments unchanged."""
        before, self._suspended = self._suspended, True
        left = leave_function_mode(self)  # otherwise the mode would still be called
        try:
            yield
        finally:
            if left:
                enter_function_mode(self)
            self._suspended = before

    def stand_in(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Replace the first tensor of each of ``pairs`` by the second from now on."""
        for given, later in pairs:
            for key, held in self._stand_ins.items():  # a stand-in was given: it stood for a tensor of the user's
                if held.later is given:
                    self._stand_ins[key] = _StandIn(held.live, later)
            self._stand_ins[id(given)] = _StandIn(given, later)

    def close(self) -> None:
        """Release the minibatch and the tensors that were given to pipelined modules."""
        self.calls = None
        self._stand_ins.clear()

    def used(self, region: int) -> list[UsedParameter]:
        """Return trained parameters that were used in ``region``, in the order of their first use."""
        return [used for (where, _), used in self._used.items() if where == region and used.copy.requires_grad]

    def ids(self) -> set[int]:
        """Return the ``id`` of every copy that was used."""
        return {id(used.copy) for used in self._used.values()}

    def check(self) -> None:
        """Refuse changes of a parameter, which only this version's copy has seen, by its name."""
        for used in self._used.values():
            used.check()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # A compiled function would be compiled again for each parameter that the lines below look up.
        if self._suspended or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if func is Tensor.register_hook:
            self._refuse_joint_hook()
        concerned: list[_Weight | _Buffer | _StandIn] = []
        self._find(args, concerned)
        if kwargs:
            self._find(kwargs.values(), concerned)
        if not concerned:
            return func(*args, **kwargs)
        name, kind = _name(func)
        if name in _METADATA and kind != "__set__":
            return func(*args, **kwargs)
        weights = [found for found in concerned if isinstance(found, _Weight)]
        if name in _PLACE:
            return func(torch.empty(0, device=self._device) if weights else concerned[0].live)
        buffers = [found for found in concerned if isinstance(found, _Buffer)]
        if not weights and not buffers and (name in _OF_THE_TENSOR or func is torch.autograd.grad):
            return func(*args, **kwargs)
        if weights and name == "grad" and func is not torch.autograd.grad and not self._ahead:
            return func(*args, **kwargs)
        self._refuse(func, name, kind, weights, buffers)
        if self._shown != self.region and any(buffer.changes for buffer in buffers):
            self._shown = self.region
            if self.calls is not None:
                with self.suspended():
                    self.calls.show_buffers()
        before = [version_counter(buffer.live) for buffer in buffers]
        if weights and name == "data":  # in-place changes of a detached tensor are counted, of .data not
            result = self._use(weights[0]).seen.detach()
        else:
            result = func(*self.replaced(tuple(args)), **self.replaced(kwargs))
        for weight in weights:
            self._use(weight).check()
        for found in concerned:
            if isinstance(found, _StandIn) and found.get() is result:
                result = found.live
        for buffer, counter in zip(buffers, before, strict=True):
            if version_counter(buffer.live) != counter:
                raise PipelineRefusal(
                    f"training_step changes '{buffer.name}' of a pipelined module in place, which stages would not"
                    " see; do it in a callback or hook, such as on_train_batch_end"
                )
        return result

    def _refuse_joint_hook(self) -> None:
        """Refuse a hook on several tensors whose gradients may come in several passes of autograd."""
        frame = inspect.currentframe()
        for _ in range(_FRAMES):
            if frame is not None and frame.f_code is not register_multi_grad_hook.__code__:
                frame = frame.f_back
        is_joint = frame is not None and frame.f_code is register_multi_grad_hook.__code__
        tensors: Sequence[Tensor] = frame.f_locals["tensors"] if frame is not None and is_joint else ()
        if len(tensors) > 1 and self.calls is not None and not all(map(self.calls.is_above, tensors)):
            raise PipelineRefusal(
                "training_step puts a joint hook (register_multi_grad_hook) on tensors that are not all computed behind"
                " the last call of a pipelined module, and the pipeline computes their gradients one after the other;"
                " put a hook on each of them (register_hook)"
            )

    def _refuse(
        self, func: Callable[..., Any], name: str, kind: str, weights: Sequence[_Weight], buffers: Sequence[_Buffer]
    ) -> None:
        if weights and func is torch.autograd.grad:
            raise PipelineRefusal(
                f"training_step asks for the gradient of the parameter '{weights[0].name}', and the pipeline computes"
                " gradients once, of the loss that training_step returns; use them in on_before_optimizer_step"
            )
        if weights and (name in _LASTING or kind in ("__set__", "__delete__") or name == "grad"):
            raise PipelineRefusal(_refusal(weights[0].name, name, kind))
        for buffer in buffers:
            if self._ahead and buffer.changes:
                raise SettingError(
                    f"training_step uses the buffer '{buffer.name}' of a pipelined module, which forwards of other"
                    " minibatches in flight change; use it in on_train_batch_end, where it is step p's, or set"
                    " in_flight=1"
                )

    def _find(self, values: Iterable[Any], found: list[_Weight | _Buffer | _StandIn]) -> None:
        """Add to ``found`` the tensors among and within ``values`` that have versions or stand-ins."""
        known, stand_ins = self._known, self._stand_ins
        for value in values:
            if isinstance(value, Tensor):
                if (one := known.get(id(value))) is not None:
                    found.append(one)
                elif (other := stand_ins.get(id(value))) is not None:
                    found.append(other)
                elif (inner := behind_functorch(value)) is not None and (one := known.get(id(inner))) is not None:
                    raise _within_torch_func(one.name)
                elif value.grad_fn is None and (place := address_of(value)) in self._memory:
                    self._find_behind(value, place, found)
            elif isinstance(value, list | tuple):
                self._find(value, found)
            elif isinstance(value, dict):
                self._find(value.values(), found)

    def _find_behind(self, view: Tensor, place: int | None, found: list[_Weight | _Buffer | _StandIn]) -> None:
        """Add to ``found`` a ``view`` of the live memory at ``place``, which has no versions."""
        known = self._memory[place]
        if address_of(known.live) != place:  # it has other memory meanwhile
            return
        if isinstance(known, _Weight) and self._ahead:
            raise PipelineRefusal(
                f"training_step uses the memory of the parameter '{known.name}' by another tensor (a view of it, or its"
                " .data, made before), of which the pipeline keeps no versions; use the parameter itself"
            )
        found.append(_Buffer(known.name, view, isinstance(known, _Buffer)))

    def replaced(self, value: Any) -> Any:
        """Replace live parameters in ``value`` by copies, and tensors with stand-ins by the stand-ins."""
        if isinstance(value, Tensor):
            found = self._known.get(id(value))
            if isinstance(found, _Weight):
                return self._use(found).seen
            return value if (stand_in := self._stand_ins.get(id(value))) is None else stand_in.get()
        if isinstance(value, list | tuple):
            parts = [self.replaced(part) for part in value]
            if all(map(operator.is_, parts, value)):
                return value
            return type(value)(*parts) if pytree.is_namedtuple_instance(value) else type(value)(parts)
        if isinstance(value, dict):
            return {key: self.replaced(part) for key, part in value.items()}
        return value

    def _use(self, weight: _Weight) -> UsedParameter:
        key = (self.region, id(weight.live))
        if (used := self._used.get(key)) is None:
            with torch.inference_mode(False):
                copy = weight.stash.parameter(weight.index, self._weights)
                if behind_functorch(copy) is not None:
                    raise _within_torch_func(weight.name)
                seen: Tensor = copy
                if copy.device != self._device:
                    with torch.enable_grad():  # user code may look at it without first, and use it then
                        seen = copy.to(self._device, non_blocking=accelerates(self._device))
            self._used[key] = used = UsedParameter(weight.name, weight.live, copy, seen, version_counter(seen))
        return used


def changes_parameter(name: str) -> SettingError:
    return PipelineRefusal(
        f"training_step changes the parameter '{name}' in place, which stages would not see; do it in a callback or"
        " hook, such as on_train_batch_end"
    )


def _name(func: Callable[..., Any]) -> tuple[str, str]:
    """Return the name of ``func``. For a property, return its name and "__get__", "__set__" or "__delete__"."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return getattr(getattr(func, "__self__", None), "__name__", ""), name
    return name, ""


def _within_torch_func(parameter: str) -> PipelineRefusal:
    return PipelineRefusal(
        f"'{parameter}' is used in a function of torch.func, where the pipeline cannot put this minibatch's version in"
        f" its place; use {parameter}.clone() there, made before that function is called (torch.func.functional_call)"
    )


def _refusal(parameter: str, name: str, kind: str) -> str:
    if name == "grad":
        return (
            f"training_step uses the gradient of '{parameter}', which Lightning's loop changes at a moment that depends"
            " on timing while minibatches are in flight; use it in on_before_optimizer_step, or leave zero_grad()"
            " to Lightning"
        )
    what = f"sets {name} of" if kind else f"calls {name}() of"
    return (
        f"training_step {what} the parameter '{parameter}', which stages would not see; do it before fit or in a hook"
    )
