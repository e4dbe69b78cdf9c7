"""Train one unchanged LightningModule over devices that do not match: HetPipe for PyTorch Lightning.

The import registers the strategy ``"hetpipe"`` with Lightning, and loads nothing heavy. Lightning may be imported
before or after. The names below are loaded at their first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from lightning_hetpipe.errors import of_import
from lightning_hetpipe.strategy import registration

if TYPE_CHECKING:
    from lightning_hetpipe.planning.model.cluster import Cluster, Device, Link, Node
    from lightning_hetpipe.planning.plan.document import Plan
    from lightning_hetpipe.strategy.hetpipe_strategy import HetPipeStrategy
    from lightning_hetpipe.strategy.virtual_workers import WSPCallback
else:
    _MODULES = {
        **dict.fromkeys(("Cluster", "Device", "Link", "Node"), "planning.model.cluster"),
        "Plan": "planning.plan.document",
        "HetPipeStrategy": "strategy.hetpipe_strategy",
        "WSPCallback": "strategy.virtual_workers",
    }

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
        try:
            return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        except RuntimeError as error:
            if (said := of_import(error)) is error:
                raise
            raise said from error

    def __dir__() -> list[str]:
        return __all__


__all__ = ["Cluster", "Device", "HetPipeStrategy", "Link", "Node", "Plan", "WSPCallback"]

registration.register()
