"""Console scripts: their settings and ends, and their start: Ctrl-C while modules load ends them in one line."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

WRONG_SETTING = 2
FAILED = 1
INTERRUPTED = 130  # as a shell reports a program that SIGINT ended
TERMINATED = 143  # likewise, SIGTERM


@dataclass(frozen=True)
class ConsoleScript:
    """A console script.

    Attributes:
        name: As it is called.
        groups: Sections at the top, most of them files to choose from.
        settings: Values at the top of its configuration, with their annotations.
    """

    name: str
    groups: tuple[str, ...]
    settings: Mapping[str, Any]

    @property
    def read(self) -> list[str]:
        """Every name at the top that is read."""
        return [*self.groups, *self.settings]


def _start(name: str) -> None:
    """Load the modules of ``name``, and run it."""
    try:
        main = import_module(f"lightning_hetpipe.cli.{name.replace('-', '_')}").main
    except KeyboardInterrupt:
        print(f"\n{name}: interrupted.", file=sys.stderr)
        sys.exit(INTERRUPTED)
    main()


train, plan = partial(_start, "hetpipe-train"), partial(_start, "hetpipe-plan")
server, host = partial(_start, "hetpipe-server"), partial(_start, "hetpipe-host")
"""The console scripts, as the package's metadata names them."""
