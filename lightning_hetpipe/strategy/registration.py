"""Registration of the strategy "hetpipe" with Lightning, whichever of the two packages is imported first."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.launch import command as command  # notes the working folder before the program changes it

if TYPE_CHECKING:
    from lightning_hetpipe.strategy.hetpipe_strategy import HetPipeStrategy

_NAME = "hetpipe"
_STRATEGIES = "lightning.pytorch.strategies"


def register() -> None:
    """Register the strategy now if Lightning is loaded, or else once Lightning's registry is loaded."""
    if _STRATEGIES in sys.modules:
        _add_to(sys.modules[_STRATEGIES])
    else:
        sys.meta_path.insert(0, _OnImport())


class _OnImport:
    """Finder on ``sys.meta_path`` that registers the strategy right after Lightning's registry is made."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _STRATEGIES:
            return None
        sys.meta_path.remove(self)
        try:
            spec = find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            sys.meta_path.remove(self)
            _add_to(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _add_to(strategies: ModuleType) -> None:
    """Register a function that loads the strategy when called, because Lightning may be only half imported now. Add
    Lightning's exception to the bases of SettingError, whose own module must not load Lightning."""
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    if not issubclass(SettingError, MisconfigurationException):
        SettingError.__bases__ += (MisconfigurationException,)
    if _NAME not in strategies.StrategyRegistry:
        what = "Trains one LightningModule as a pipeline over devices that need not match, exactly."
        strategies.StrategyRegistry.register(_NAME, _made, what)


def _made(**arguments: Any) -> HetPipeStrategy:
    from lightning_hetpipe.strategy.hetpipe_strategy import HetPipeStrategy

    return HetPipeStrategy(**arguments)
