"""Console scripts: names, settings, exit codes, and a start in which Ctrl-C prints one line, even during imports."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

from lightning_hetpipe.server.process.signals import INTERRUPTED

WRONG_SETTING = 2
FAILED = 1


@dataclass(frozen=True)
class ConsoleScript:
    """Console script with its config ``groups``, and the ``settings`` at the top of its configuration, with hints."""

    name: str
    groups: tuple[str, ...]
    settings: Mapping[str, Any]

    @property
    def read(self) -> list[str]:
        """All names that may stand at the top of the configuration."""
        return [*self.groups, *self.settings]


def _start(name: str, module: str = "", function: str = "main") -> None:
    try:
        main = getattr(import_module(f"lightning_hetpipe.cli.{module or name.replace('-', '_')}"), function)
    except KeyboardInterrupt:
        print(f"\n{name}: interrupted.", file=sys.stderr)
        sys.exit(INTERRUPTED)
    main()


train, plan = partial(_start, "hetpipe-train"), partial(_start, "hetpipe-plan")
server, host = partial(_start, "hetpipe-server"), partial(_start, "hetpipe-host", "hetpipe_server", "host_main")
"""Entry points of the console scripts, under the names in the package's metadata."""
