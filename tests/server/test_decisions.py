"""With D > 0: how far a fast VW runs ahead, and how stale what it computes on can be, from the coordinator's log."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest
import torch

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.server.process.client import Client
from lightning_hetpipe.server.process.sessions import Service, SessionChannel, Sessions, log_line
from lightning_hetpipe.server.protocol.commit_log import (
    CutClosed,
    Decision,
    GenerationBegan,
    ReadGranted,
    ReadHeld,
    UpdateCommitted,
    UpdatePushed,
)
from lightning_hetpipe.server.protocol.messages import Parameter, TrainingSignature
from tests.oracle_policies import global_staleness
from tests.server.channels import DirectChannel, Faults, Host
from tests.server.test_client import WAIT, all_at_once

WAVES = 6


def run_ahead(distance: int) -> tuple[list[Decision], list[int]]:
    """VW 1 pushes nothing before VW 0 was told to wait; gives what was decided, and VW 0's clock when it was."""
    log: list[Decision] = []
    held, clocks = threading.Event(), []

    def note(decision: Decision) -> None:
        log.append(decision)
        if isinstance(decision, ReadHeld) and decision.vw == 0 and not held.is_set():
            # Not where it waits for the other to take w_0.
            too_far = decision.slowest is not None and decision.slowest < decision.clock - distance
            if too_far:
                clocks.append(decision.clock)
                held.set()

    host = Host(lambda: Service(30.0, longest_wait=0.2, note=note))
    signature = TrainingSignature("1", 2, distance, "sum", 1, (), (Parameter("w", (2,), "float32", "float32"),))

    def train(vw: int) -> None:
        with Client([DirectChannel(host, vw, 0, Faults())], signature, [[0]], vw, 0, timeout=WAIT) as client:
            client.join([torch.zeros(2)])
            for _ in range(WAVES):
                if vw == 1:
                    assert held.wait(WAIT)
                client.synchronise([torch.ones(2)])
            assert torch.equal(client.arrive(1)[0], torch.full((2,), 2.0 * WAVES))

    all_at_once([lambda: train(0), lambda: train(1)])
    return log, clocks


@pytest.mark.parametrize("distance", [0, 1, 3])
def test_a_fast_vw_runs_d_waves_ahead_and_no_further(distance: int) -> None:
    log, clocks = run_ahead(distance)
    assert clocks == [distance + 1], "it has pushed D + 1 waves, and may not take weights before the other's first"
    before = log[: next(i for i, each in enumerate(log) if isinstance(each, UpdatePushed) and each.vw == 1)]
    assert [each.clock for each in before if isinstance(each, ReadGranted) and each.clock > 0] == [
        *range(1, distance + 1)
    ]
    check_distances(log, distance)
    for in_flight in (1, 4):
        check_staleness(log, distance, in_flight)
    assert isinstance(log[0], GenerationBegan)
    assert [each.clock for each in log if isinstance(each, CutClosed)] == [WAVES]


def check_distances(log: Sequence[Decision], distance: int) -> None:
    """Every VW that took weights was at most D waves ahead of the slowest (HetPipe, section 5.1)."""
    grants = [each for each in log if isinstance(each, ReadGranted)]
    assert grants
    for each in grants:
        assert each.slowest is None or each.slowest >= each.clock - distance, each


def check_staleness(log: Sequence[Decision], distance: int, in_flight: int) -> int:
    """No minibatch misses more than s_global of another VW's, with W = Nm; gives the most that one misses.

    For a log of waves before the first cut. Minibatch p computes on version p - Nm, which holds what its VW took after
    its last full wave by then (HetPipe, section 5.2).
    """
    waves: dict[int, int] = {}
    taken: dict[tuple[int, int], dict[int, int]] = {}
    for each in log:
        if isinstance(each, CutClosed):
            break
        if isinstance(each, UpdateCommitted):
            waves[each.vw] = waves.get(each.vw, 0) + 1
        elif isinstance(each, ReadGranted):
            taken[each.vw, each.clock] = dict(waves)
    most = 0
    vws = {vw for vw, _ in taken}
    for vw in vws:
        pulls = max(clock for other, clock in taken if other == vw)
        for p in range(1, (pulls + 1) * in_flight + 1):
            had = taken.get((vw, max(0, p - in_flight) // in_flight), {})  # none at the start
            most = max(most, *(p - 1 - had.get(other, 0) * in_flight for other in vws - {vw}))
    assert most <= global_staleness(in_flight, distance)
    return most


def test_decisions_are_lines_of_json(tmp_path: Path) -> None:
    log, began = tmp_path / "decisions.jsonl", round(time.time(), 6)
    sessions = Sessions(30.0, str(log))

    def train(vw: int) -> None:
        signature = TrainingSignature("1", 2, 0, "sum", 1, (), (Parameter("w", (2,), "float32", "float32"),))
        channel = SessionChannel(DirectChannel(Host(lambda: cast(Service, sessions)), vw, 0, Faults()), "fit-1")
        with Client([channel], signature, [[0]], vw, 0, timeout=WAIT) as client:
            client.join([torch.zeros(2)])
            client.synchronise([torch.ones(2)])

    all_at_once([lambda: train(0), lambda: train(1)])
    sessions.close()
    told = [json.loads(each) for each in log.read_text().splitlines()]
    assert {each["session"] for each in told} == {"fit-1"}
    assert [each["vw"] for each in told if each["decision"] == "UpdateCommitted"] == [0, 1]
    assert began <= told[0]["time"] <= told[-1]["time"] <= time.time()
    assert json.loads(log_line("fit-2", UpdatePushed(1, 2, 3), 1.5)) == {
        "time": 1.5, "session": "fit-2", "decision": "UpdatePushed", "vw": 1, "incarnation": 2, "clock": 3
    }  # fmt: skip
    with pytest.raises(SettingError, match="cannot be written"):
        Sessions(30.0, str(tmp_path / "nowhere" / "log"))
