"""Program of hetpipe-host on a machine that has the test accelerator, each of whose devices holds so many bytes.

python -m tests.hosts.accelerated_host BYTES address=127.0.0.1:0
"""

from __future__ import annotations

import sys

from lightning_hetpipe.cli.hetpipe_server import host_main
from lightning_hetpipe.server.process import signals
from tests.support.accelerator import set_limit, show

BEFORE = "from {} import child\n"
SHOWN = "from tests.hosts.accelerated_host import give; give({})\n"
"""In the program of a host's process, so that it has the devices, too."""


def give(limit: int) -> None:
    """Give this process the devices."""
    show()
    for index in range(4):
        set_limit(index, limit)


def with_devices(limit: int) -> str:
    """The program of a host's process that has the devices."""
    assert BEFORE in signals.CHILD
    return signals.CHILD.replace(BEFORE, SHOWN.format(limit) + BEFORE)


def main() -> None:
    limit = int(sys.argv.pop(1))
    signals.CHILD = with_devices(limit)
    give(limit)
    host_main()


if __name__ == "__main__":
    main()
