"""Virtual workers train while a storm of hostile messages comes to their server: what they train stays the same."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lightning_hetpipe.server.process.server_process import ServerProcess
from tests.server.storm import FEW_ARENAS, GROWTH, Storm, Tap, check_log
from tests.server.transports import PATIENCE, eventually
from tests.support.process_use import Use
from tests.wsp.launch import Job, finished, left_behind
from tests.wsp.test_exact import check, expected

WARM_UP, COUNT = 4_000, 10_000


def met(path: Path, run: Future[Any]) -> None:
    """Returns once the training has come to the other end of the pipe; fails where it has ended before."""
    waiting = threading.Thread(target=path.read_text, name="test-met", daemon=True)
    waiting.start()
    while waiting.is_alive():
        assert not run.done(), run.result()
        waiting.join(0.1)


@pytest.mark.slow
def test_a_storm_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It begins in the third minibatch of the first epoch, and ends in that of the second one."""
    monkeypatch.setenv(*FEW_ARENAS)
    for name in ("paused", "go on"):
        os.mkfifo(tmp_path / name)
    sessions = ("lightning_hetpipe.server.process.sessions:Sessions", {"lease": PATIENCE})
    with (
        ServerProcess(*sessions) as server,
        Tap(server.address) as tap,
        ThreadPoolExecutor(20, thread_name_prefix="test-storm") as pool,
    ):
        assert server.pid is not None
        more = {"wsp": {"servers": [tap.address], "lease": PATIENCE}, "fault": (1, 2, "pause")}
        job = Job(tmp_path, lengths=(9, 8), in_flight=2, more=more)
        run = pool.submit(finished, job, HETPIPE_TOKEN=server.security.token or "")
        met(tmp_path / "paused", run)
        began = time.monotonic()
        storm = Storm(server.address, server.security, "fit-1", tap.recorded)
        for each in storm.blow(WARM_UP, pool):
            each.result()
        before = Use.of(server.pid)
        storm.may_end.clear()
        blowing = storm.blow(COUNT, pool)
        eventually(lambda: storm.sent > WARM_UP + COUNT / 4, "the storm does not blow")
        (tmp_path / "go on").write_text("")
        met(tmp_path / "paused", run)
        storm.may_end.set()
        for each in blowing:
            each.result()
        pid, most = server.pid, before.descriptors
        eventually(lambda: Use.of(pid).descriptors <= most, "descriptors stay")
        after = Use.of(pid)
        took = time.monotonic() - began
        (tmp_path / "go on").write_text("")
        found, said = run.result()
    assert storm.sent >= WARM_UP + COUNT
    assert after.memory < before.memory + GROWTH
    check(job, found, expected(job, 2))
    assert "without" not in said, "one was lost"
    assert left_behind(job) == []
    check_log(capfd.readouterr().err, took)
