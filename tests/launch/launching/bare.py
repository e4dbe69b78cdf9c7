"""Takes the launcher without torch and Lightning, which take seconds to import in every process of a test."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import tests

ROOT = Path(tests.__file__).parents[1]


class _Stub(ModuleType):
    """A module in which every name is a class of its own."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (Exception,) if "Exception" in name or "Exit" in name else (), {})
        setattr(self, name, made)
        return made


for _name in (
    "torch",
    "lightning",
    "lightning.fabric",
    "lightning.fabric.plugins",
    "lightning.fabric.plugins.environments",
    "lightning.pytorch",
    "lightning.pytorch.trainer",
    "lightning.pytorch.trainer.states",
    "lightning.pytorch.utilities",
    "lightning.pytorch.utilities.exceptions",
    "lightning.pytorch.utilities.rank_zero",
    "lightning_hetpipe.lightning_private",
):
    sys.modules[_name] = _Stub(_name)
    sys.modules[_name].__path__ = []
_package = ModuleType("lightning_hetpipe")
_package.__path__ = [str(ROOT / "lightning_hetpipe")]
sys.modules["lightning_hetpipe"] = _package

from lightning_hetpipe.errors import SettingError, VirtualWorkerLost  # noqa: E402
from lightning_hetpipe.launch import children, parent_watch  # noqa: E402
from lightning_hetpipe.launch.ends import lost_workers  # noqa: E402
from lightning_hetpipe.launch.launcher import Launcher, check_processes  # noqa: E402
from lightning_hetpipe.launch.ranks import Rank, Role  # noqa: E402
from lightning_hetpipe.lightning_private import TunerExit  # noqa: E402

parent_watch.this_child()  # as the constructor of the strategy does

__all__ = [
    "Launcher",
    "Rank",
    "Role",
    "SettingError",
    "TunerExit",
    "VirtualWorkerLost",
    "check_processes",
    "children",
    "lost_workers",
    "parent_watch",
]
