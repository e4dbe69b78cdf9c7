"""Start-up of the console scripts: Ctrl-C while their modules load ends them in one line, too."""

from __future__ import annotations

import sys
from importlib import import_module

from lightning_hetpipe.cli.console_script import INTERRUPTED
from lightning_hetpipe.errors import of_import


def train() -> None:
    """The console script hetpipe-train."""
    _start("hetpipe-train")


def plan() -> None:
    """The console script hetpipe-plan."""
    _start("hetpipe-plan")


def server() -> None:
    """The console script hetpipe-server."""
    _start("hetpipe-server")


def host() -> None:
    """The console script hetpipe-host."""
    _start("hetpipe-host")


def _start(name: str) -> None:
    """Load the modules of ``name``, torch and Lightning among them, and run it."""
    try:
        main = import_module(f"lightning_hetpipe.cli.{name.replace('-', '_')}").main
    except KeyboardInterrupt:
        print(f"\n{name}: interrupted.", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except RuntimeError as error:
        if (said := of_import(error)) is error:
            raise
        sys.exit(f"{name}: {said}.")
    main()
