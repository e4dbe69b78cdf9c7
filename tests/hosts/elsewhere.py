"""Stages at hosts, as on other machines: ``hetpipe-host`` in a process, and strategies whose stages are there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe.hosts.stages_apart import StageElsewhere
from tests.exact.pipelines import even
from tests.support import forks

NEAR = "127.0.0.1:1"
"""Address at which the fixture ``host_threads`` has hosts."""


class Hosts:
    """A running hetpipe-host."""

    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self.process, self.address = process, address

    def children(self) -> list[int]:
        """Processes that are hosts and have not ended."""
        found = list[int]()
        for path in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            with suppress(OSError):  # the thread has ended
                found += map(int, path.read_text().split())
        return [pid for pid in found if runs(pid) and not forks.is_server(pid)]


def runs(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@contextmanager
def serving(environment: dict[str, str], *program: str) -> Iterator[Hosts]:
    module, *arguments = program or ("tests.hosts.plain_host",)
    process = forks.Popen(
        [sys.executable, "-m", module, *arguments, "address=127.0.0.1:0"],
        stdout=subprocess.PIPE,
        text=True,
        env={**{name: value for name, value in os.environ.items() if not name.startswith("HETPIPE")}, **environment},
        start_new_session=True,
        loaded="host",
        starting=1,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("hetpipe-host: serving 127.0.0.1:"), line
        yield Hosts(process, line.split()[2].rstrip(";"))
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.communicate()


def away(
    strategy: HetPipeStrategy,
    address: str = NEAR,
    accelerators: Mapping[int, Sequence[tuple[int, str]]] | None = None,
) -> HetPipeStrategy:
    """Have all stages of ``strategy`` but the last be at hosts at ``address``, whatever is planned.

    Args:
        strategy: It has a number of stages.
        address: Of hetpipe-host.
        accelerators: Number and name of the accelerators that stages are on, as of ``StageElsewhere``.
    """
    assert isinstance(strategy.stages, int)
    own = accelerators or {}
    places = {stage: StageElsewhere(address, "", own.get(stage, ())) for stage in range(strategy.stages - 1)}
    strategy._overrides |= {"elsewhere": places}
    return strategy


def elsewhere(layers: int, stages: int, in_flight: int, address: str = NEAR, **settings: Any) -> HetPipeStrategy:
    """A pipeline of stages with equal numbers of layers, all but the last of which are at hosts."""
    return away(even(layers, stages, in_flight, **settings), address)
