"""Operations whose operands lie on several devices: the operands are brought together, where the weights are.

This is what lets Python run over modules that lie on several devices as if these were one (plain model parallelism):
``x + self.layer(x)`` in user code knows nothing of devices. One autograd graph results, in which each move is a node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_hetpipe.pipeline.values import nested_tensors
from lightning_hetpipe.torch_private import (
    UnseenMode,
    enter_function_mode,
    leave_function_mode,
    pytree,
    without_override,
)

T = TypeVar("T")

_CROSSING = frozenset(
    {"backward", "copy_", "cpu", "cuda", "grad", "set_data", "swap_tensors", "to", "type", "type_as", "__set__"}
)
"""Functions that are made for tensors on several devices."""

_WRITES = frozenset({"batch_norm", "instance_norm"})
"""Functions that write into their second argument, the running mean, and the third one."""


class OperandsTogether:
    """Within it, this thread's operations have their operands brought to one of ``devices``, and backwards run in it.

    A backward has a queue for each device unless it runs in one thread, and would add the gradients of a tensor with
    several uses in order of arrival. (It is no generator, so that a Trainer that holds it can be copied and pickled.)

    Args:
        devices: Those that layers lie on, in the layers' order. Tensors on any other device stay where they are. With
            fewer than two nothing is changed.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        distinct = list(dict.fromkeys(devices))
        self._mode = _Together(distinct) if len(distinct) > 1 else None
        self._one_thread: torch.autograd.set_multithreading_enabled

    @contextmanager
    def told(self, operands: Callable[[Sequence[Tensor]], None]) -> Iterator[None]:
        """Within it, ``operands`` is called before each operation, with its operands on the devices."""
        if self._mode is None:
            yield
            return
        self._mode.told = operands
        try:
            yield
        finally:
            self._mode.told = _nobody

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
    """Within it, ``module`` can be run where its tensors lie, with what lies on ``others``."""
    return OperandsTogether([*others, *(tensor.device for tensor in (*module.parameters(), *module.buffers()))])


class _Together(UnseenMode):
    """Moves operands: one differentiable move for each use, as sums of gradients are those of a run on one device.

    An operation runs where it writes, else where its parameter lies, else where most of its operands' bytes are, and
    of equal ones on the later device. What torch has written in Python is run operation by operation, since it may use
    an operand several times, or ask whether two are the same, as attention does.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        super().__init__()
        self._order = {device: place for place, device in enumerate(devices)}
        self.told: Callable[[Sequence[Tensor]], None] = _nobody
        self._home: torch.device | None = None  # where the parameters of the function lie that is run piecemeal

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        operands = [tensor for tensor in nested_tensors((args, kwargs)) if tensor.device in self._order]
        self.told(operands)
        if len({tensor.device for tensor in operands}) < 2:
            return func(*args, **kwargs)
        name = _name(func)
        if name in _CROSSING or name.startswith("_foreach_"):
            return func(*args, **kwargs)
        if isinstance(func, FunctionType) and all(type(each) in (Tensor, nn.Parameter) for each in operands):
            before, self._home = self._home, _device_of_parameter(operands) or self._home
            try:
                with self:
                    return without_override(func)(*args, **kwargs)
            finally:
                self._home = before
        device = self._place(name, args, kwargs, operands)
        return func(*self._at(device, args), **self._at(device, dict(kwargs)))

    def end(self) -> None:
        """From now on nothing is moved."""
        self._order.clear()

    def _place(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        operands: Sequence[Tensor],
    ) -> torch.device:
        """The device on which the function ``name`` runs."""
        if (written := next(nested_tensors(kwargs.get("out")), None)) is not None:
            return written.device
        if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
            return next(nested_tensors(args)).device
        if name in _WRITES:
            return operands[-1].device
        found = _device_of_parameter(operands) or self._home
        return found or max(operands, key=lambda each: (each.nbytes, self._order[each.device])).device

    def _at(self, device: torch.device, value: T) -> T:
        """``value`` with the tensors in it on ``device``, those that lie on another one of the devices."""

        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(device) if tensor.device in self._order and tensor.device != device else tensor

        found: T = pytree.tree_map_only(Tensor, moved, value)
        return found


def _nobody(operands: Sequence[Tensor]) -> None: ...


def _device_of_parameter(operands: Sequence[Tensor]) -> torch.device | None:
    return next((each.device for each in operands if isinstance(each, nn.Parameter)), None)


def _name(func: Callable[..., Any]) -> str:
    """The function's name, without that of an overload."""
    return str(getattr(func, "__name__", "")).partition(".")[0]
