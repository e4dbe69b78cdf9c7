"""What a `_target_` names, and which arguments it takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module
from types import ModuleType
from typing import Any

from lightning_hetpipe.errors import SettingError


def locate(target: str, path: str) -> Callable[..., Any]:
    """Imports what `target` names.

    Args:
        target: dotted path of a class or function.
        path: the section whose `_target_` it is, for the error.

    Raises:
        SettingError: if nothing of that name exists. An error inside the module that is imported is not caught.
    """
    found: Any = None
    name = ""
    for part in target.split("."):
        parent, name = name, f"{name}.{part}" if name else part
        if parent and hasattr(found, part):
            found = getattr(found, part)
        elif parent and not isinstance(found, ModuleType):
            raise _not_found(target, path, f"{parent} has no {part}", found, part)
        else:
            try:
                found = import_module(name)
            except (ModuleNotFoundError, ValueError) as error:
                if isinstance(error, ModuleNotFoundError) and error.name != name:
                    raise  # the module is there; what is missing is something that it imports
                reason = f"{parent} has no {part}" if parent else f"there is no module {part}"
                raise _not_found(target, path, reason, found, part) from None
    if not callable(found):
        raise SettingError(f"{path}._target_={target} is a {type(found).__name__}; name a class or a function.")
    return found  # type: ignore[no-any-return]


def parameters(target: Callable[..., Any]) -> tuple[dict[str, inspect.Parameter], bool]:
    """The arguments that may be given by name, and whether any other name is taken too (`**kwargs`)."""
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):  # some builtins have none
        return {}, True
    named = {
        name: parameter
        for name, parameter in signature.parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    return named, any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())


def closest(name: str, known: list[str]) -> str | None:
    """The known name that is most like `name`, or None if none is."""
    return next(iter(get_close_matches(name, known, n=1)), None)


def _not_found(target: str, path: str, reason: str, parent: object, part: str) -> SettingError:
    near = closest(part, [name for name in dir(parent) if not name.startswith("_")]) if parent is not None else None
    if near is not None:
        advice = (
            f"did you mean {target.rsplit('.', 1)[0]}.{near}?" if target.endswith(part) else f"did you mean {near}?"
        )
    else:
        advice = "it is looked for in the working directory and among the installed packages."
    return SettingError(f"{path}._target_={target} cannot be found, {reason}; {advice}")
