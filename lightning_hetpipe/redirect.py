"""Temporary replacement of a method of one object."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


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
