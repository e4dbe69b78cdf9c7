"""Temporary replacement of a method of one object, and the interceptor of calls of modules, which replaces ``forward``.

The watched step, the pipeline and evaluation are handlers of an interceptor. Hooks of users on a module run around the
call as usual.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from torch import nn


class Redirect:
    """Temporary replacement of the method ``name`` of one object. Calls go to ``handler(redirect, ...)``.

    It stands in the ``__dict__`` of ``owner``. It is an object rather than a closure, so that a deep copy or a pickle
    of the owner gets its own plain method.
    """

    def __init__(self, owner: Any, name: str, handler: Callable[..., Any]) -> None:
        self.owner = owner
        self.name = name
        self.original: Callable[..., Any] = getattr(owner, name)
        self._shadowed = name in vars(owner)
        self._handler = handler
        # Without setattr, which Module, Metric and LightningModule override.
        vars(owner)[name] = self

    @property
    def replaced(self) -> Callable[..., Any] | None:
        """Method that the user had put into the owner's ``__dict__`` instead of the class's method, or None."""
        return self.original if self._shadowed else None

    def remove(self) -> None:
        """Restore the owner's ``__dict__``, unless other code has replaced the entry meanwhile."""
        if vars(self.owner).get(self.name) is not self:
            return
        if self._shadowed:
            vars(self.owner)[self.name] = self.original
        else:
            del vars(self.owner)[self.name]

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Context manager in which the owner has its own method."""
        self.remove()
        try:
            yield
        finally:
            vars(self.owner)[self.name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._handler(self, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        method: Callable[..., Any] = copy.deepcopy(self.original, memo)
        return method

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self.original,)


def _itself(method: Callable[..., Any]) -> Callable[..., Any]:
    return method


NOT_TAKEN = object()
"""Result of a handler in place of an output, which makes the module's own ``forward`` run as user code."""


@dataclass(eq=False)
class ModuleCall:
    """One call of a module: its path ``name`` in the LightningModule, and the arguments of ``forward``.

    ``redirect`` replaces ``forward``. ``calls`` has the state of calls in this thread.
    """

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    redirect: Redirect
    calls: _Calls

    def own_forward(self) -> AbstractContextManager[None]:
        """Return a context in which the module has its own ``forward``."""
        return self.redirect.suspended()

    def run(self) -> Any:
        """Run the module's own ``forward``. Modules that it calls are not intercepted."""
        return self.run_with(self.args, self.kwargs)

    def run_with(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module's own ``forward`` on other arguments."""
        return self.redirect.original(*args, **kwargs)

    @contextmanager
    def intercepting(self) -> Iterator[None]:
        """Context manager in which calls of modules are intercepted, as outside of every call."""
        self.calls.handling = False
        try:
            yield
        finally:
            self.calls.handling = True


class Interceptor:
    """Redirection of calls of ``modules``, given by names, to ``handler``, until :meth:`remove` or the ``with`` block's
    end.

    Only outermost calls are intercepted: modules that ``handler`` itself calls, in its own thread, run normally, except
    within :meth:`ModuleCall.intercepting`. If it returns ``NOT_TAKEN``, the module runs, and calls that it makes are
    intercepted. Any number of threads may call modules at once. With ``one_step``, a single step runs at a time, so
    calls in threads that a handled module starts belong to its call.
    """

    def __init__(
        self, modules: Iterable[tuple[str, nn.Module]], handler: Callable[[ModuleCall], Any], *, one_step: bool = False
    ) -> None:
        self._handler = handler
        self._calls: _Calls = _Calls() if one_step else _ThreadCalls()
        self._redirects = [Redirect(module, "forward", partial(self._intercept, name)) for name, module in modules]

    def remove(self) -> None:
        """Give the modules their own ``forward`` back."""
        for redirect in self._redirects:
            redirect.remove()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Context manager in which the modules have their own ``forward``."""
        with ExitStack() as stack:
            for redirect in self._redirects:
                stack.enter_context(redirect.suspended())
            yield

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def _intercept(self, name: str, redirect: Redirect, /, *args: Any, **kwargs: Any) -> Any:
        if not self._calls.handling:
            self._calls.handling = True
            try:
                output = self._handler(ModuleCall(name, redirect.owner, args, kwargs, redirect, self._calls))
            finally:
                self._calls.handling = False
            if output is not NOT_TAKEN:
                return output
        return redirect.original(*args, **kwargs)


class _Calls:
    handling = False


class _ThreadCalls(threading.local, _Calls):
    """State of calls, separate for each thread."""
