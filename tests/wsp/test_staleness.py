"""With D > 0: whole Trainers, one of them held up, and the coordinator's log of what it let them do."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, get_args

import pytest

from lightning_hetpipe.server.process.server_process import ServerProcess
from lightning_hetpipe.server.protocol.commit_log import Decision, ReadGranted, UpdatePushed
from tests.oracle_policies import global_staleness
from tests.server.test_decisions import check_distances, check_staleness
from tests.support.equality import assert_same
from tests.wsp.launch import Job, run_all

IN_FLIGHT = 2


def read(log: Path, session: str) -> list[Decision]:
    """Decisions in ``session``."""
    kinds: dict[str, Any] = {kind.__name__: kind for kind in get_args(Decision)}
    lines = [json.loads(each) for each in log.read_text().splitlines()]
    return [kinds[each.pop("decision")](**each) for each in lines if each.pop("session") == session]


@pytest.mark.slow
def test_a_fast_virtual_worker_runs_d_waves_ahead_and_no_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Virtual worker 1 is held in its second minibatch until 0 has done all that it can do alone: D + 1 waves."""
    log = tmp_path / "decisions.jsonl"
    with ServerProcess(
        "lightning_hetpipe.server.process.sessions:Sessions", {"lease": 30.0, "log": str(log)}
    ) as server:
        monkeypatch.setenv("HETPIPE_TOKEN", server.security.token or "")
        jobs = []
        for distance in (1, 2, 3):
            job = Job(tmp_path / str(distance), lengths=(14, 14), in_flight=IN_FLIGHT)
            job.folder.mkdir()
            os.mkfifo(job.folder / "meeting")
            job.more = {
                "wsp": {"servers": [server.address], "clock_distance": distance},
                "trainer": {"max_epochs": 1},
                "fault": (1, 1, "hold", str(job.folder / "meeting")),
                "acts": [(0, (distance + 1) * IN_FLIGHT, "meet")],
                "delays": distance,
            }
            jobs.append(job)
        found = run_all(*jobs)
    for distance, (fast, slow) in zip((1, 2, 3), found, strict=True):
        assert_same(fast["end"].weights, slow["end"].weights)
        decided = read(log, f"fit-{distance}")
        first = next(i for i, each in enumerate(decided) if isinstance(each, UpdatePushed) and each.vw == 1)
        alone = [
            each.clock for each in decided[:first] if isinstance(each, ReadGranted) and each.vw == 0 and each.clock
        ]
        assert alone == [*range(1, distance + 1)]
        check_distances(decided, distance)
        # The fast one's last minibatch of these is as stale as any may be.
        assert check_staleness(decided, distance, IN_FLIGHT) == global_staleness(IN_FLIGHT, distance)
