"""The console scripts and the settings at the top of their configurations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class ConsoleScript:
    """A console script.

    Attributes:
        name: As it is called.
        groups: Sections, most of them files to choose from.
        settings: Values at the top of its configuration, with their annotations.
        experiments: Whether a file of the group ``experiment`` may set any of these.
    """

    name: str
    groups: tuple[str, ...]
    settings: Mapping[str, Any]
    experiments: bool = True

    @property
    def read(self) -> list[str]:
        """Every name at the top that is read."""
        return [*self.groups, *self.settings]


_GROUPS = ("model", "data", "trainer", "strategy", "cluster")

TRAIN = ConsoleScript(
    "hetpipe-train", _GROUPS, {"seed": int | None, "test": bool, "ckpt_path": str | None, "output_dir": str}
)

PLAN = ConsoleScript(
    "hetpipe-plan",
    _GROUPS,
    {
        "profile": str | None,
        "devices": Any,
        "link": Any,
        "optimizer": str | float,
        "ordered": bool,
        "synchronise": Any,
        "precision": Any,
        "seed": int | None,
        "output_dir": str,
    },
)

SERVER = ConsoleScript(
    "hetpipe-server",
    ("security", "service"),
    {"command": Literal["serve", "status"], "address": Any, "timeout": float},
    experiments=False,
)
