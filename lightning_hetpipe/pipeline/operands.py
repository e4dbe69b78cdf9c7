"""Operations whose operands lie on several devices: the operands are brought together where the weights are.

So Python runs over modules on several devices as if these were one (plain model parallelism). ``x + self.layer(x)`` in
user code knows nothing of devices. One autograd graph results, in which each move is a node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from inspect import signature
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.pipeline.values import nested_tensors
from lightning_hetpipe.torch_private.modes import OwnMode, enter_function_mode, leave_function_mode, without_override
from lightning_hetpipe.torch_private.tensors import pytree, version_counter

T = TypeVar("T")


class OperandsTogether:
    """Context manager that moves operands of this thread's operations to one of ``devices``.

    Backwards run in the thread: with several threads autograd has a queue for each device, and would add the gradients
    of a tensor's uses in order of arrival. ``devices`` are the layers' devices in the layers' order. Tensors on other
    devices stay there. With fewer than two devices nothing changes. (This is no generator: a Trainer that holds it can
    be pickled.)
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        distinct = list(dict.fromkeys(devices))
        self._mode = _Together(distinct) if len(distinct) > 1 else None
        self._one_thread: torch.autograd.set_multithreading_enabled

    def told(self, operands: Callable[[Sequence[Tensor]], None]) -> AbstractContextManager[None]:
        """Context manager in which ``operands`` is called before each operation, with its operands on the devices."""
        return nullcontext() if self._mode is None else self._mode.telling(operands)

    def __enter__(self) -> None:
        if self._mode is not None:
            self._one_thread = torch.autograd.set_multithreading_enabled(False)
            enter_function_mode(self._mode)

    def __exit__(self, *exception: object) -> None:
        if self._mode is not None:
            if not leave_function_mode(self._mode):  # a user's mode is inside of it, and stays
                self._mode.end()
            self._one_thread.__exit__(None, None, None)


def across_devices_of(module: nn.Module, others: Iterable[torch.device] = ()) -> OperandsTogether:
    """Context manager in which ``module`` runs where its tensors lie, with tensors on ``others``."""
    return OperandsTogether([*others, *(tensor.device for tensor in (*module.parameters(), *module.buffers()))])


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class _Together(OwnMode):
    """A mode that moves operands: one differentiable move for each use, so that sums of gradients are as on one device.

    :meth:`_device` maps functions by name to a device. Functions that torch has written in Python run operation by
    operation. They may use an operand several times, or ask whether two are the same, as attention does. A custom
    autograd function has all its operands on one device, and so all that its backward is given.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        super().__init__()
        self.devices = devices
        self._order = {device: place for place, device in enumerate(devices)}
        self.told: Callable[[Sequence[Tensor]], None] = _nobody
        self._home: torch.device | None = None  # device of the parameters of the piecemeal function
        self._piecemeal: tuple[Callable[..., Any], ...] = ()  # from the outermost one

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given: Arguments = args, dict(kwargs or {})
        operands = [tensor for tensor in nested_tensors(given) if tensor.device in self._order]
        if func in _BACKWARDS:
            given = self._with_own_devices(func, *given)
            with self:
                return without_override(func)(*given[0], **given[1])
        self.told(operands)
        if len({tensor.device for tensor in operands}) < 2:
            return func(*given[0], **given[1])
        # What asks again under its own name is run whole.
        is_plain = isinstance(func, FunctionType) and all(type(each) in (Tensor, nn.Parameter) for each in operands)
        if is_plain and func not in self._piecemeal:
            before = self._home, self._piecemeal
            self._home, self._piecemeal = _at_parameter(operands) or self._home, (*self._piecemeal, func)
            try:
                with self:
                    return without_override(func)(*given[0], **given[1])
            finally:
                self._home, self._piecemeal = before
        name = str(getattr(func, "__name__", "")).partition(".")[0]
        if name in _CROSSING:
            return func(*given[0], **given[1])
        copies = list[Tensor]()
        if name.startswith("_foreach_"):
            given = self._pairs(*given, copies)
        else:
            given = self._at(self._device(name, given, operands), given, copies)
        found = func(*given[0], **given[1])
        if any(not copy.is_inference() and version_counter(copy) for copy in copies):
            raise SettingError(
                f"{getattr(func, '__qualname__', name)} changes a tensor in place that lies on another device than"
                " others that it is given; have it give a new one"
            )
        return found

    @contextmanager
    def telling(self, operands: Callable[[Sequence[Tensor]], None]) -> Iterator[None]:
        self.told = operands
        try:
            yield
        finally:
            self.told = _nobody

    def end(self) -> None:
        """Move nothing from now on."""
        self._order.clear()
        self.devices = ()

    def _device(self, name: str, given: Arguments, operands: Sequence[Tensor]) -> torch.device:
        """Return the device for the operands of function ``name``: by default of a parameter, else of most bytes of
        operands, of equal ones the later device. What is written stays where it is."""
        first, out = next(nested_tensors(given)).device, next(nested_tensors(given[1].get("out")), None)
        if out is not None:
            return out.device
        if name in _IN_PLACE or (name.endswith("_") and not name.endswith("__")):
            return first
        if name in ("batch_norm", "instance_norm"):
            return operands[-1].device  # of the running variance, which is written
        if (parameter := _at_parameter(operands)) is not None:
            return parameter
        if name in ("expand_as", "reshape_as", "view_as"):
            return first  # a view of the first operand
        return self._home or max(operands, key=lambda each: (each.nbytes, self._order[each.device])).device

    def _at(self, device: torch.device, value: T, copies: list[Tensor]) -> T:
        """Return ``value`` with its tensors on ``device``. Tensors that were moved are added to ``copies``."""
        leaves, form = pytree.tree_flatten(value)
        for place, leaf in reversed(list(enumerate(leaves))):  # in reverse: a backward adds the first move's first
            if isinstance(leaf, Tensor) and leaf.device in self._order and leaf.device != device:
                leaves[place] = leaf.to(device)
                copies.append(leaves[place])
        found: T = pytree.tree_unflatten(leaves, form)
        return found

    def _pairs(self, args: tuple[Any, ...], kwargs: dict[str, Any], copies: list[Tensor]) -> Arguments:
        """Return the arguments of a function of lists, each on the device of its tensor in the first list."""
        first: Sequence[Tensor] = next(iter((*args, *kwargs.values())))

        def beside(value: Any) -> Any:
            if isinstance(value, list | tuple) and len(value) == len(first):
                return [self._at(one.device, each, copies) for one, each in zip(first, value, strict=True)]
            return self._at(first[0].device, value, copies)

        return tuple(map(beside, args)), {name: beside(value) for name, value in kwargs.items()}

    def _with_own_devices(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Return the arguments of a backward, with each given gradient on the device of its output."""
        bound = signature(func).bind(*args, **kwargs)
        outputs, gradients = (bound.arguments.get(name) for name in _BACKWARDS[func])  # type: Any, Any
        if isinstance(outputs, Tensor):
            gradients = self._at(outputs.device, gradients, [])
        elif gradients is not None:
            gradients = [gradients] if isinstance(gradients, Tensor) else gradients
            gradients = [self._at(one.device, each, []) for one, each in zip(outputs, gradients, strict=True)]
        bound.arguments[_BACKWARDS[func][1]] = gradients
        return bound.args, bound.kwargs


def _nobody(operands: Sequence[Tensor]) -> None: ...


def _at_parameter(operands: Sequence[Tensor]) -> torch.device | None:
    return next((each.device for each in operands if isinstance(each, nn.Parameter)), None)


_CROSSING = frozenset(
    {"_foreach_copy_", "copy_", "cpu", "cuda", "set_data", "swap_tensors", "to", "type", "type_as", "__set__"}
)
"""Functions that are made for tensors on several devices."""

_IN_PLACE = frozenset(
    {"__setitem__"}
    | {f"__i{name}__" for name in ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow")}
    | {f"__i{name}__" for name in ("and", "or", "xor", "lshift", "rshift")}
)
"""Functions that write into their first operand, besides functions with a name that ends in one underscore."""

_BACKWARDS: dict[Any, tuple[str, str]] = {
    Tensor.backward: ("self", "gradient"),
    torch.autograd.backward: ("tensors", "grad_tensors"),
    torch.autograd.grad: ("outputs", "grad_outputs"),
}
"""Functions in which operations of the user run (checkpoints, hooks, custom autograd functions). Their values name the
parameters for outputs and for gradients, which are moved to the outputs."""
