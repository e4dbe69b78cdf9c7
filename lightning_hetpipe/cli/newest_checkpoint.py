"""Print the checkpoint with the most progress in a folder, if there is one. A shell loop restarts a run from it.

python -m lightning_hetpipe.cli.newest_checkpoint checkpoints
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from lightning_hetpipe.launch.supervision import furthest


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python -m lightning_hetpipe.cli.newest_checkpoint FOLDER")
    found = furthest(map(str, sorted(Path(sys.argv[1]).glob("*.ckpt"), key=os.path.getmtime)))
    if found is not None:
        print(found)


if __name__ == "__main__":
    main()
