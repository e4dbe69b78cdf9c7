"""Private names of torch for modes, under which Python calls its functions and operators.

If torch does not have a name:

- ``_SingleLevelFunction``, ``_group_tensors_by_device_and_dtype``, ``_check_param_device``, ``_infer_device_type``,
  ``_get_current_function_mode_stack``, ``_python_dispatch``, ``_get_current_dispatch_mode``, ``_pop_mode``,
  ``_push_mode``: this module cannot be imported.
- ``_forward_cls``: from torch 2.14 on, each custom autograd function fails while a mode of ours is entered.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import groupby
from types import FunctionType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction, _SingleLevelFunction
from torch.nn.utils import clip_grad, convert_parameters
from torch.nn.utils.clip_grad import _group_tensors_by_device_and_dtype  # type: ignore[attr-defined]  # imported there
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, has_torch_function
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode, _push_mode
from torch.utils.checkpoint import _infer_device_type, get_device_states

from lightning_hetpipe.errors import SettingError


@contextmanager
def replaced(those: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Context manager that sets attributes, given as (owner, name, value), and restores them at its end."""
    with ExitStack() as stack:
        for owner, name, value in those:
            if name in vars(owner):
                stack.callback(setattr, owner, name, vars(owner)[name])
            else:
                stack.callback(delattr, owner, name)
            setattr(owner, name, value)
        yield


def enter_function_mode(mode: TorchFunctionMode) -> None:
    mode.__enter__()  # type: ignore[no-untyped-call]  # torch has no types here


_function_modes: Callable[[], list[TorchFunctionMode]] = _get_current_function_mode_stack  # torch has no types here


def _innermost_mode() -> TorchFunctionMode | None:
    return next(reversed(_function_modes()), None)


def _own_modes() -> list[OwnMode]:
    return [mode for mode in _function_modes() if isinstance(mode, OwnMode)]


def leave_function_mode(mode: TorchFunctionMode) -> bool:
    """Leave ``mode`` until its ``__enter__`` if it is the innermost mode of this thread, and return True if so."""
    if _innermost_mode() is not mode:
        return False
    mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    return True


@functools.cache
def without_override(function: FunctionType) -> Callable[..., Any]:
    """Copy a Python function of torch without its first question: whether a mode or a subclass of Tensor runs it.

    Functions that it calls still ask.
    """
    no = {name: lambda *_: False for name in _OVERRIDDEN}
    code, values, name = function.__code__, {**function.__globals__, **no}, function.__name__
    found = FunctionType(code, values, name, function.__defaults__, function.__closure__)
    found.__kwdefaults__ = function.__kwdefaults__
    return found


_OVERRIDDEN = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


class OwnMode(TorchFunctionMode):
    """A ``TorchFunctionMode`` of this package, which differs from torch's:

    - It also sees custom autograd functions, which torch shows to no mode.
    - Modules that ask for modes before they take fused operators do not see it, such as attention in evaluations.
    - Within it, the norm of gradients on several devices equals the norm on one, and ``parameters_to_vector`` works
      across devices.
    - Within it, checkpoints keep the states of all generators from which their functions may draw.
    """

    devices: Sequence[torch.device] = ()
    """Devices on which an operation may run, wherever its operands lie."""

    def __enter__(self) -> Self:
        global _entered
        with _enter_lock:
            if not _entered:
                _told.enter_context(replaced(_TELL))
            _entered += 1
        super().__enter__()  # type: ignore[no-untyped-call]  # torch has no types here
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        global _entered
        with _enter_lock:
            _entered -= 1
            if not _entered:
                _told.close()


TORCHS_APPLY = vars(torch.autograd.Function)["apply"]
"""The ``apply`` of torch. From torch 2.14 on it is no Python code, and calls nothing that could be replaced."""
_APPLY_IS_PYTHON = isinstance(TORCHS_APPLY, classmethod)
_entered = 0  # modes of ours, in all threads
_told = ExitStack()  # open while there are any
_enter_lock = threading.Lock()


def _seen_by_others(values: Iterable[Any]) -> bool:
    if isinstance(_innermost_mode(), OwnMode) and all(type(value) in (Tensor, nn.Parameter) for value in values):
        return False
    return has_torch_function(values)


def in_order(lists: list[list[Any]], with_indices: bool = False) -> Any:
    """Group tensors as ``clip_grad_norm_`` takes their norms, on several devices in the tensors' own order."""
    if len({tensor.device for tensor in lists[0]}) < 2:
        return _group_tensors_by_device_and_dtype(lists, with_indices)
    return _Groups((key, ([list(run)], None)) for key, run in groupby(lists[0], lambda each: (each.device, each.dtype)))


class _Groups(list[Any]):
    """Items of a mapping that may repeat a key."""

    def items(self) -> Self:
        return self


def _states_of_devices(*args: Any) -> Any:
    """Return the generator states that a checkpoint restores for its second run. Torch takes the arguments' devices,
    but weights on other devices draw there."""
    kind = _infer_device_type(*args)  # type: ignore[no-untyped-call]  # torch has no types here
    devices = {device for mode in _own_modes() for device in mode.devices}
    return get_device_states(*args, *(torch.empty(0, device=each) for each in devices if each.type == kind))


class UntoldFunction(torch.autograd.Function):
    """A custom autograd function that no mode sees."""


@dataclass(frozen=True)
class CustomFunction:
    """The ``apply`` of a custom autograd function, as ``mode`` sees it."""

    mode: OwnMode
    apply: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        mode: Any = self.mode  # torch has no types here
        return mode.__torch_function__(self.apply, (), args, kwargs)


def _apply(function: Any, *args: Any, **kwargs: Any) -> Any:
    apply: Callable[..., Any] = super(_SingleLevelFunction, function).apply
    if _entered and issubclass(function, torch.autograd.Function) and not issubclass(function, UntoldFunction):
        for mode in _own_modes():
            apply = CustomFunction(mode, apply if isinstance(apply, CustomFunction) else _Heard(function, apply))
    return apply(*args, **kwargs)


class _HeardFunction(threading.local):
    """The custom autograd function that this thread applies now, after its modes have seen it."""

    function: Any = None


_heard = _HeardFunction()


@dataclass(frozen=True)
class _Heard:
    """Torch's ``apply`` for ``function``, after modes have seen it."""

    function: Any
    apply: Callable[..., Any]

    @property
    def __name__(self) -> str:
        return "apply"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _heard.function = self.function
        return self.apply(*args, **kwargs)


def _refuse_unheard(node: Any) -> None:
    """Refuse an ``apply`` that our modes cannot see: called when torch makes a custom function's node."""
    function, heard = node._forward_cls, _heard.function
    _heard.function = None
    if function is heard or not issubclass(function, torch.autograd.Function) or issubclass(function, UntoldFunction):
        return
    if _own_modes():
        raise SettingError(
            f"'{function.__name__}.apply', which the model calls, was looked up before lightning_hetpipe was imported,"
            f" and torch {torch.__version__} tells nobody of its calls: the model would compute with other weights;"
            f" import lightning_hetpipe first, or write {function.__name__}.apply(...) where it is called"
        )


_TELL: list[tuple[Any, str, Any]] = [
    (torch.overrides, "has_torch_function", _seen_by_others),
    (clip_grad, "_group_tensors_by_device_and_dtype", in_order),
    (convert_parameters, "_check_param_device", lambda parameter, device: device),
    (checkpoint, "get_device_states", _states_of_devices),
    # Up to torch 2.13, ``torch.autograd.Function.apply`` calls the ``apply`` of _SingleLevelFunction.
    (_SingleLevelFunction, "apply", classmethod(_apply))
    if _APPLY_IS_PYTHON
    else (BackwardCFunction, "__init__", _refuse_unheard),
]
if not _APPLY_IS_PYTHON:
    setattr(torch.autograd.Function, "apply", classmethod(_apply))  # noqa: B010  # torch has another type


class ThreadDispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """A ``TorchDispatchMode`` that several threads may enter at once.

    Torch's own mode also sets process-wide flags for torch.compile and restores them like a stack. Threads that leave
    in another order would leave the flags set, and nothing in the process would be compiled from then on.
    """

    def __init__(self) -> None:
        """Leave out torch's, which prepares those flags."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: wrapping ``__torch_dispatch__`` against torch.compile would cost each operator 6 us."""
        return False

    def __enter__(self) -> Self:
        _push_mode(self)
        return self

    def __exit__(self, *exception: object) -> None:
        _pop_mode()

    def suspend(self) -> bool:
        """Leave the mode until ``__enter__`` if it is the innermost mode of this thread, and return True if so."""
        innermost = _pop_mode()
        if innermost is not self:
            _push_mode(innermost)
        return innermost is self


@contextmanager
def without_dispatch_modes() -> Iterator[None]:
    """Context manager that switches off each ``ThreadDispatchMode`` that is innermost in this thread."""
    left: list[ThreadDispatchMode] = []
    while isinstance(mode := _get_current_dispatch_mode(), ThreadDispatchMode):
        left.append(_pop_mode())
    try:
        yield
    finally:
        for mode in reversed(left):
            _push_mode(mode)
