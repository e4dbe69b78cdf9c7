"""Prints the checkpoint of a folder that has the most progress, from which a loop starts a run again; else nothing.

python -m lightning_hetpipe.cli.newest_checkpoint checkpoints
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from lightning_hetpipe.launch.supervision import furthest


def main() -> None:
    """The program."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m lightning_hetpipe.cli.newest_checkpoint FOLDER")
    found = furthest(map(str, sorted(Path(sys.argv[1]).glob("*.ckpt"), key=os.path.getmtime)))
    if found is not None:
        print(found)


if __name__ == "__main__":
    main()
