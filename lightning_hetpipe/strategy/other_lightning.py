"""The package ``pytorch_lightning``: the code of ``lightning.pytorch`` once more, in classes of its own."""

from __future__ import annotations

import sys
from typing import Any

from lightning.pytorch.accelerators import Accelerator

from lightning_hetpipe.errors import SettingError

OTHER = "pytorch_lightning"


def let_in(strategy: type) -> None:
    """Lets a Trainer of ``pytorch_lightning``, where that is imported, take ``strategy``, by its name too.

    It would call the strategy an invalid name and leave the user with that. So :func:`refuse_trainer` has its say.
    """
    theirs: Any = sys.modules.get(f"{OTHER}.strategies")
    if theirs is None or issubclass(strategy, theirs.Strategy):
        return
    theirs.Strategy.register(strategy)
    theirs.StrategyRegistry.register(getattr(strategy, "strategy_name"), strategy)  # noqa: B009


def refuse_trainer(accelerator: Any) -> None:
    """Refuses the Trainer that has given ``accelerator``, if that is not one of ``lightning.pytorch``.

    Raises:
        SettingError: which names the import to change.
    """
    if not isinstance(accelerator, Accelerator):
        raise SettingError(f"HetPipeStrategy is given to a Trainer of {OTHER}; {way_out()}")


def is_of_other(thing: Any) -> bool:
    """Tell whether ``thing`` is of a class of ``pytorch_lightning``, or of one derived from such."""
    return any(each.__module__.partition(".")[0] == OTHER for each in type(thing).__mro__)


def way_out() -> str:
    return (
        "this package works with 'lightning', whose classes are others of the same names: write 'import"
        f" lightning.pytorch as pl' for 'import {OTHER} as pl', also where models and callbacks come from"
    )
