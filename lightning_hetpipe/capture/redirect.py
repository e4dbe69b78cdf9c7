"""A method of one object, replaced for a while."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any


class Redirect:
    """Stands in for ``owner.<name>`` and calls ``handler(*args, **kwargs)`` instead.

    An object and not a closure, so that a deep copy or a pickle of the owner gets its plain method back.
    """

    def __init__(self, owner: Any, name: str, handler: Callable[..., Any]) -> None:
        self.owner = owner
        self.name = name
        self.original: Callable[..., Any] = getattr(owner, name)
        self._handler = handler
        self._replaced = vars(owner).get(name)
        vars(owner)[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._handler(*args, **kwargs)

    def remove(self) -> None:
        if vars(self.owner).get(self.name) is self:
            del vars(self.owner)[self.name]
            if self._replaced is not None:
                vars(self.owner)[self.name] = self._replaced

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return types.MethodType(getattr(type(self.owner), self.name), memo.get(id(self.owner), self.owner))

    def __reduce__(self) -> Any:
        return types.MethodType, (getattr(type(self.owner), self.name), self.owner)
