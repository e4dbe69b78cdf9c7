"""What ``training_step`` sees of parameters: those of its minibatch's version (law L1).

Calls of pipelined modules run on copies. Whatever else ``training_step`` does with a parameter (a learnable
temperature, an L2 term, the norm of a weight) is Python that holds the *live* one, which is of another version, or
being changed. So in a minibatch's thread torch's functions are given the version's copy instead, and the gradients of
such copies belong to the live parameters.

A stage's copies lie on its device. User code computes on the last stage's, as in a plain run on one, and so is given
them there; autograd takes the gradients back.

In the same way a tensor that was given to a pipelined module has a stand-in after the call, which leads through the
call's seam, so that the gradients of its uses are added in the order of a plain backward.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.pipeline.live import Live
from lightning_hetpipe.pipeline.weight_stash import WeightStash
from lightning_hetpipe.torch_private import (
    behind_functorch,
    enter_function_mode,
    leave_function_mode,
    pytree,
    unseen_change,
    version_counter,
    viewed,
)

_METADATA = {"shape", "dtype", "ndim", "layout", "itemsize", "nbytes", "is_meta"}
_METADATA |= {"size", "dim", "numel", "nelement", "ndimension", "stride", "element_size", "__len__"}
_METADATA |= {"is_contiguous", "is_floating_point", "is_complex", "is_sparse"}
"""What is the same for every version."""

_PLACE = {"device", "get_device", "is_cpu", "is_cuda"}
"""What tells where it is: a parameter, where user code computes."""

_OF_THE_TENSOR = {"register_hook", "register_post_accumulate_grad_hook", "retain_grad", "retains_grad", "grad"}
_OF_THE_TENSOR |= {"grad_fn", "is_leaf", "output_nr", "requires_grad", "requires_grad_", "backward"}
"""What is asked of a tensor itself, with all its uses, also where it has a stand-in."""

_LASTING = {"register_hook", "register_post_accumulate_grad_hook", "requires_grad_"}
"""What would be done to one version's copy and be lost with it."""


@dataclass(frozen=True)
class _Weight:
    name: str
    live: nn.Parameter
    stash: WeightStash
    place: int


@dataclass(frozen=True)
class _Buffer:
    name: str
    live: Tensor
    changes: bool  # whether forwards change it


class Weights:
    """Where the versions of live parameters are, and which live buffers stages have copies of.

    Args:
        root: Names them.
        stashes: Hold the versions, of these live parameters.
        layers: The live layers, whose buffers are copied.
        changing: The ``id`` of each live buffer that forwards change.
    """

    def __init__(
        self,
        root: nn.Module,
        stashes: Sequence[tuple[Live, WeightStash]],
        layers: Sequence[nn.Module],
        changing: Collection[int] = (),
    ) -> None:
        names = {id(tensor): name for name, tensor in (*root.named_parameters(), *root.named_buffers())}
        self.known: dict[int, _Weight | _Buffer] = {}
        for of_stash, stash in stashes:
            for place, live in enumerate(of_stash.parameters):
                self.known.setdefault(id(live), _Weight(names.get(id(live), "of a layer"), live, stash, place))
        for buffer in (buffer for layer in layers for buffer in layer.buffers()):
            self.known[id(buffer)] = _Buffer(names.get(id(buffer), "of a layer"), buffer, id(buffer) in changing)


class _Given:
    """A tensor that was given to a pipelined module, and what stands in for it from then on.

    Both lie in the same memory. Autograd does not know that, and each may have views.
    """

    def __init__(self, live: Tensor, later: Tensor) -> None:
        self.live, self.later = live, later
        self._places = self._now()

    def stand_in(self) -> Tensor:
        """``later``, after ``live`` was made to lead through it where that was changed in place.

        Raises:
            SettingError: if the memory was changed by way of another tensor, so that ``later`` leads past the change.
        """
        live, later = self._now()
        if live is not self._places[0]:
            raise SettingError(
                f"training_step uses a tensor of shape {tuple(self.live.shape)} that it gave to a pipelined module and"
                " has changed in place meanwhile by way of another tensor (a view of it, or what it is a view of);"
                " change a clone() of that"
            )
        if later is not self._places[1]:
            follow: Any = _Follow.apply  # torch has no types here
            with torch.enable_grad(), unseen_change(self.live):
                follow(self.live, self.later)
            self._places = self._now()
        return self.later

    def _now(self) -> tuple[Any, Any]:
        """Where both are in autograd's graph. (A view's own node is made anew wherever its memory has changed.)"""
        return viewed(self.live).grad_fn, viewed(self.later).grad_fn


class _Follow(torch.autograd.Function):
    """Gives ``live``, and with it its views and what it is a view of, the history of ``later``."""

    @staticmethod
    def forward(ctx: Any, live: Tensor, later: Tensor) -> Tensor:
        ctx.mark_dirty(live)
        return live

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(gradients[0]), gradients[0]


@dataclass(frozen=True)
class Used:
    """A parameter that user code has used between two calls of pipelined modules, or before or after them.

    Attributes:
        live: The parameter.
        copy: The leaf that stands for it, where the version is.
        seen: What user code was given: ``copy``, or its copy on the device of user code.
    """

    live: nn.Parameter
    copy: nn.Parameter
    seen: Tensor


@dataclass(frozen=True)
class _Leaf:
    weight: _Weight
    copy: nn.Parameter
    seen: Tensor
    counter: int  # how often that had been changed in place when it was made

    def check(self) -> None:
        if version_counter(self.seen) != self.counter:
            raise changes_parameter(self.weight.name)


class View(TorchFunctionMode):
    """Gives torch's functions the parameters of ``version``; opened in the thread of one minibatch.

    Args:
        weights: Where they are.
        version: max(v_e, p - Nm).
        ahead: Whether later minibatches may be in flight, so that live buffers and gradients are of another moment.
        device: Where user code computes.
    """

    def __init__(self, weights: Weights, version: int, ahead: bool, device: torch.device) -> None:
        super().__init__()
        self._weights = weights
        self._version = version
        self._ahead = ahead
        self._device = device
        self.region = 0
        """How many calls of pieces lie behind: each has gradients of its own for what is used after it."""
        self._leaves: dict[tuple[int, int], _Leaf] = {}
        self._given: dict[int, _Given] = {}
        self._resting = False

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Within it, functions are given what they are called with."""
        before, self._resting = self._resting, True
        left = leave_function_mode(self)  # else it would be asked all the same
        try:
            yield
        finally:
            if left:
                enter_function_mode(self)
            self._resting = before

    def stand_in(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """From now on the second tensor of each of ``pairs`` stands in for the first."""
        for given, later in pairs:
            for key, held in self._given.items():  # a stand-in was given: it stood for a tensor of the user's
                if held.later is given:
                    self._given[key] = _Given(held.live, later)
            self._given[id(given)] = _Given(given, later)

    def close(self) -> None:
        """Lets go of the tensors that were given to pipelined modules."""
        self._given.clear()

    def leaves(self, region: int) -> list[Used]:
        """Live parameters that were used in ``region``, if they are trained."""
        return [
            Used(leaf.weight.live, leaf.copy, leaf.seen)
            for (where, _), leaf in self._leaves.items()
            if where == region and leaf.copy.requires_grad
        ]

    def ids(self) -> set[int]:
        """The ``id`` of every copy that was used."""
        return {id(leaf.copy) for leaf in self._leaves.values()}

    def check(self) -> None:
        """Refuses changes of a parameter, which only this version's copy has seen.

        Raises:
            SettingError: which names it.
        """
        for leaf in self._leaves.values():
            leaf.check()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # A compiled function would be compiled again for each parameter that the lines below look up.
        if self._resting or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        concerned: list[_Weight | _Buffer | _Given] = []
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
        if weights and func is torch.autograd.grad:
            raise SettingError(
                f"training_step asks for the gradient of the parameter '{weights[0].name}', and the pipeline computes"
                " gradients once, of the loss that training_step returns; use them in on_before_optimizer_step, or"
                " train with another strategy where the loss itself needs them"
            )
        if weights and (name in _LASTING or kind in ("__set__", "__delete__") or name == "grad"):
            if name == "grad" and not self._ahead:
                return func(*args, **kwargs)
            raise SettingError(_refusal(weights[0].name, name, kind))
        for buffer in buffers:
            if self._ahead and buffer.changes:
                raise SettingError(
                    f"training_step uses the buffer '{buffer.name}' of a pipelined module, which forwards of other"
                    " minibatches in flight change; use it in on_train_batch_end, where it is step p's, or set"
                    " in_flight=1"
                )
        before = [version_counter(buffer.live) for buffer in buffers]
        if weights and name == "data":  # in-place changes of .data are not counted, those of a detached tensor are
            result = self._leaf(weights[0]).seen.detach()
        else:
            result = func(*self.replaced(tuple(args)), **self.replaced(kwargs))
        for weight in weights:
            self._leaf(weight).check()
        for found in concerned:
            if isinstance(found, _Given) and found.stand_in() is result:
                result = found.live
        for buffer, counter in zip(buffers, before, strict=True):
            if version_counter(buffer.live) != counter:
                raise SettingError(
                    f"training_step changes the buffer '{buffer.name}' of a pipelined module in place, which stages"
                    " would not see; do it in a callback or hook, such as on_train_batch_end"
                )
        return result

    def _find(self, values: Iterable[Any], found: list[_Weight | _Buffer | _Given]) -> None:
        """Adds to ``found`` what ``values`` hold of ours."""
        known, given = self._weights.known, self._given
        for value in values:
            if isinstance(value, Tensor):
                if (one := known.get(id(value))) is not None:
                    found.append(one)
                elif (other := given.get(id(value))) is not None:
                    found.append(other)
                elif (inner := behind_functorch(value)) is not None and (one := known.get(id(inner))) is not None:
                    raise SettingError(
                        f"training_step gives '{one.name}' to a function of torch.func, where the pipeline cannot put"
                        f" this minibatch's version in its place; give it {one.name}.clone()"
                    )
            elif isinstance(value, list | tuple):
                self._find(value, found)
            elif isinstance(value, dict):
                self._find(value.values(), found)

    def replaced(self, value: Any) -> Any:
        """``value`` with copies in the place of live parameters."""
        if isinstance(value, Tensor):
            found = self._weights.known.get(id(value))
            if isinstance(found, _Weight):
                return self._leaf(found).seen
            return value if (given := self._given.get(id(value))) is None else given.stand_in()
        if isinstance(value, list | tuple):
            parts = [self.replaced(part) for part in value]
            if all(map(operator.is_, parts, value)):
                return value
            return type(value)(*parts) if pytree.is_namedtuple_instance(value) else type(value)(parts)
        if isinstance(value, dict):
            return {key: self.replaced(part) for key, part in value.items()}
        return value

    def _leaf(self, weight: _Weight) -> _Leaf:
        key = (self.region, id(weight.live))
        if (known := self._leaves.get(key)) is None:
            with torch.inference_mode(False):
                copy = weight.stash.parameter(weight.place, self._version)
                seen: Tensor = copy
                if copy.device != self._device:
                    with torch.enable_grad():  # user code may look at it without first, and use it then
                        seen = copy.to(self._device, non_blocking=self._device.type == "cuda")
            self._leaves[key] = known = _Leaf(weight, copy, seen, version_counter(seen))
        return known


def changes_parameter(name: str) -> SettingError:
    return SettingError(
        f"training_step changes the parameter '{name}' in place, which stages would not see; do it in a callback or"
        " hook, such as on_train_batch_end"
    )


def _name(func: Callable[..., Any]) -> tuple[str, str]:
    """What ``func`` is called, and of a property also whether it is read or set."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return getattr(getattr(func, "__self__", None), "__name__", ""), name
    return name, ""


def _refusal(parameter: str, name: str, kind: str) -> str:
    if name == "grad":
        return (
            f"training_step uses the gradient of '{parameter}', which Lightning's loop changes at a moment that depends"
            " on timing while minibatches are in flight; use it in on_before_optimizer_step, leave zero_grad() to"
            " Lightning, or set in_flight=1"
        )
    what = f"sets {name} of" if kind else f"calls {name}() of"
    return (
        f"training_step {what} the parameter '{parameter}', which stages would not see; do it before fit or in a hook"
    )
