"""Coordinator and shard on two nodes, and what befalls them; some die together with virtual workers (law L5)."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.wsp.launch import Job, left_behind, on_nodes, start
from tests.wsp.pushed import check_sum
from tests.wsp.test_exact import all_batches, check, expected, together
from tests.wsp.test_server_dies import address

pytestmark = pytest.mark.slow

AGAIN = "died by SIGKILL and was started again"


def job_of(tmp_path: Path, *faults: dict[str, Any], **wsp: Any) -> Job:
    """Two virtual workers, one on each node, and a server beside each: virtual worker 0's is the coordinator."""
    more: dict[str, Any] = {"virtual_workers": 1, "trainer": {"num_nodes": 2}, "faults": faults, "pushed": True}
    return Job(tmp_path, lengths=(5, 4), in_flight=2, more={**more, "wsp": {"lease": 9.0, **wsp}})


CASES: dict[str, tuple[list[dict[str, Any]], int]] = {
    "the coordinator, in mid-push": ([address(0, "StageUpdate", 2, "middle")], 1),
    "the shard, in mid-push": ([address(1, "StageUpdate", 2, "middle")], 1),
    "the shard, in mid-pull": ([address(1, "Read", 2, "middle")], 1),
    "the shard, and both while weights are loaded anew": (
        [address(1, "Read", 2, "middle"), {**address(0, "Load", 3, "before"), "what": "servers"}],
        3,
    ),
    "both, between bytes and word of a push": ([{**address(1, "Pushed", 2, "before"), "what": "servers"}], 2),
    "both, after a pull": ([{**address(0, "Pulled", 2, "after"), "what": "servers"}], 2),
    "one, and then the other": ([address(0, "Pulled", 1, "before"), address(1, "StageUpdate", 2, "middle")], 2),
}
"""Faults, and how many servers they kill."""


@pytest.mark.parametrize(
    ("name", "distance"),
    [
        *((name, 0) for name in CASES),
        *((name, 2) for name in CASES if name.startswith(("the coordinator", "both, after"))),
    ],
)
def test_servers_of_two_nodes_die(name: str, distance: int, tmp_path: Path) -> None:
    """With D = 0 training is exact; else each update is in the global weights once, whatever their order."""
    faults, deaths = CASES[name]
    job = job_of(tmp_path, *faults, clock_distance=distance)
    ended = on_nodes(job)
    said = "\n".join(err for _, _, err in ended)
    assert [code for code, _, _ in ended] == [0, 0], said
    assert said.count(AGAIN) == deaths, said
    found = job.written()
    if distance == 0:
        check(job, found, expected(job, 2))
    check_sum(found)
    assert left_behind(job) == []


HELD = {**address(0, "StageUpdate", 2, "before"), "what": "hold"}
DEATHS: dict[str, tuple[list[dict[str, Any]], int]] = {
    "before its first wave": ([address(1, "Pulled", 1, "after")], 0),
    "before its second wave": ([HELD, address(1, "StageUpdate", 2, "before", once="held")], 1),
    "with its second wave": ([HELD, address(1, "Pushed", 2, "after", once="held")], 1),
}
"""When they die, and how many waves of virtual worker 1's the other one has by then."""


@pytest.mark.parametrize("name", DEATHS)
def test_the_server_and_a_virtual_worker_die_together(name: str, tmp_path: Path) -> None:
    """Updates that only they held are reported; the other one goes on as if the dead one had had no more data."""
    faults, waves = DEATHS[name]
    faults = [{**each, "what": "servers and kill"} if each["vw"] else each for each in faults]
    job = Job(tmp_path, lengths=(5, 4), in_flight=2, more={"faults": faults, "wsp": {"lease": 5.0}})
    done = start(job)
    assert done.returncode == 1, done.stderr
    assert done.stderr.count(AGAIN) == 1
    lost = (
        f"what virtual worker 1 had pushed from wave {waves} on, if anything, is lost: only the lost server knew of it"
    )
    assert done.stderr.count(f"hetpipe: {lost}.\n") == 1, done.stderr
    assert "hetpipe: this run went on without virtual worker 1, which died by SIGKILL." in done.stderr
    mine, others = all_batches(job)
    runs = together(job, 2, [[mine] * 2, [others[: 2 * waves], []]])
    check(job, [torch.load(tmp_path / "0.pt", weights_only=False)], runs[:1])
    assert left_behind(job) == []


@pytest.mark.parametrize("lost", [0, 1])
def test_a_node_with_weights_is_lost(lost: int, tmp_path: Path) -> None:
    """Its virtual worker dies, and its server with it, which nobody starts again: the other one says so, and ends."""
    fault = {**address(lost, "StageUpdate", 2, "before"), "what": "kill"}
    job = job_of(tmp_path, fault)
    job.more["timeout"] = 12
    ended = on_nodes(job)
    code, _, said = ended[1 - lost]
    assert ended[lost][0] == -signal.SIGKILL
    assert code == 1, said
    assert re.search(rf"VW {1 - lost}, in state '\w+', has waited for 12 s for an answer: the server at 127\.", said)
    assert left_behind(job) == []
