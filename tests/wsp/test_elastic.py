"""Virtual workers come to a run that has begun without them, and go; the bits are those of the recorded membership."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import namespaces
from tests.support.equality import assert_same
from tests.wsp.faults import until
from tests.wsp.launch import MARK, ROOT, SECONDS, Job, free_port, left_behind
from tests.wsp.membership import check_recorded, epochs_of
from tests.wsp.pushed import check_sum
from tests.wsp.test_plans import planned, ran
from tests.wsp.worker import task_of

LEASE = 10.0


def elastic(folder: Path, least: int, most: int, **more: Any) -> Job:
    """A job of three epochs with room for ``most``, whose decisions are recorded."""
    wsp = {"lease": LEASE, **more.pop("wsp", {})}
    told = {"virtual_workers": [least, most], "wsp": wsp, "trainer": {"max_epochs": 3}, "log": f"{folder}/decisions"}
    return Job(folder, "by epoch", lengths=(5,) * most, in_flight=2, more={**told, **more})


Ended = tuple[int, str, str]
"""Exit code, standard output and error."""


class Processes:
    """Processes of ``job`` that a test starts one by one, in the same environment but for their seats."""

    def __init__(self, job: Job) -> None:
        self.job = job
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "HETPIPE_TOKEN": "one"}
        self._environment = {**os.environ, **meeting, MARK: str(job.folder)}
        self._all: list[subprocess.Popen[str]] = []

    def start(self, **seat: object) -> subprocess.Popen[str]:
        variables = {**self._environment, **{name: str(value) for name, value in seat.items()}}
        told: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        command = self.job.command()
        self._all.append(subprocess.Popen(command, cwd=ROOT, env=variables, start_new_session=True, **told))
        return self._all[-1]

    def await_beginning(self) -> None:
        """Return once the virtual workers of a fit have met."""
        log = self.job.folder / "decisions"
        until(lambda: log.exists() and '"fit-1"' in log.read_text(), "no fit begins")

    def finished(self) -> list[Ended]:
        """The end of each, once all have come to it."""
        return namespaces.finished(self._all, SECONDS)

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._all:
            process.kill()
            process.communicate()


def one_later(job: Job, **seat: object) -> list[Ended]:
    """Runs ``job`` with a process that comes when the fit of the first one has begun."""
    with Processes(job) as processes:
        processes.start()
        processes.await_beginning()
        processes.start(**seat)
        ends = processes.finished()
    assert left_behind(job) == []
    return ends


def check(job: Job) -> list[dict[int, int]]:
    """Compare with the oracle; gives the waves of each epoch, by virtual worker."""
    parts = epochs_of(job.folder / "decisions")
    check_recorded(job, job.written_so_far(), parts, 2)
    return [part.waves for part in parts]


@pytest.mark.slow
def test_one_joins_in_the_second_epoch(tmp_path: Path) -> None:
    """Virtual worker 0 begins alone, as one is enough."""
    job = elastic(tmp_path, 1, 2, awaits={"0": 1})
    first, second = one_later(job, LOCAL_RANK=1)
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    assert "virtual worker 1 comes to a run that goes on, and takes part from its next epoch on" in second[2]
    assert "virtual worker 1 has joined, and takes part from epoch 1 on" in first[2]
    assert check(job) == [{0: 3}, {0: 3, 1: 3}, {0: 3, 1: 3}]
    members = [row["hetpipe/members"] for row in job.written()[0]["logged"]]
    assert {*members[:3]} == {1}
    assert {*members[-8:]} == {2}


@pytest.mark.slow
def test_a_third_one_joins_while_another_is_lost(tmp_path: Path) -> None:
    """Virtual worker 1, which the first process has started, is killed in the first epoch, and 2 comes to the next."""
    kill = {"vw": 1, "room": "fit-1", "message": "Pushed", "nth": 2, "when": "after", "what": "kill"}
    job = elastic(tmp_path, 2, 3, awaits={"0": 1}, faults=[kill])
    first, third = one_later(job, LOCAL_RANK=2)
    assert (first[0], third[0]) == (1, 0), first[2] + third[2]
    assert "virtual worker 2 has joined, and takes part from epoch 1 on" in first[2]
    assert "this run went on without virtual worker 1, which died by SIGKILL" in first[2]
    assert check(job) == [{0: 3, 1: 2}, {0: 3, 2: 3}, {0: 3, 2: 3}]


@pytest.mark.slow
@pytest.mark.parametrize("distance", [1, 3])
def test_with_a_clock_distance_each_update_counts_once(distance: int, tmp_path: Path) -> None:
    """Updates of those that join do, too; at the end all hold the same weights."""
    job = elastic(tmp_path, 1, 3, awaits={"0": 2}, pushed=True, wsp={"clock_distance": distance})
    with Processes(job) as processes:
        processes.start()
        processes.await_beginning()
        processes.start(LOCAL_RANK=2)
        processes.start(LOCAL_RANK=1)
        ends = processes.finished()
    assert left_behind(job) == []
    assert [code for code, *_ in ends] == [0, 0, 0], "".join(said for *_, said in ends)
    found = job.written()
    assert [len(each["outputs"]) for each in found] == [15, 10, 10]
    check_sum(found, later=[1, 2])
    for each in found[1:]:
        assert_same(found[0]["end"].weights, each["end"].weights)


@pytest.mark.slow
def test_with_a_clock_distance_one_joins_while_another_is_lost(tmp_path: Path) -> None:
    """All that are left hold the same weights at the end."""
    kill = {"vw": 1, "room": "fit-1", "message": "Pushed", "nth": 2, "when": "after", "what": "kill"}
    job = elastic(tmp_path, 2, 3, awaits={"0": 1}, faults=[kill], pushed=True, wsp={"clock_distance": 2})
    first, third = one_later(job, LOCAL_RANK=2)
    assert (first[0], third[0]) == (1, 0), first[2] + third[2]
    assert "virtual worker 2 has joined, and takes part from epoch 1 on" in first[2]
    found = [each for each in job.written_so_far() if each is not None]
    assert [len(each["outputs"]) for each in found] == [15, 10]
    assert_same(found[0]["end"].weights, found[1]["end"].weights)


@pytest.mark.slow
def test_a_seat_is_taken_again(tmp_path: Path) -> None:
    """A process joins and is killed; another one takes its seat."""
    kill = {"vw": 1, "room": "fit-1", "message": "Pushed", "nth": 2, "when": "after", "what": "kill"}
    faults = [{**kill, "mark": str(tmp_path / "mark")}]
    job = elastic(tmp_path, 1, 2, awaits={"0": 1, "1": 1}, faults=faults)
    with Processes(job) as processes:
        processes.start()
        processes.await_beginning()
        processes.start(LOCAL_RANK=1).wait(SECONDS)
        processes.start(LOCAL_RANK=1)
        first, second, third = processes.finished()
    assert left_behind(job) == []
    assert (first[0], second[0], third[0]) == (0, -signal.SIGKILL, 0), first[2] + third[2]
    assert "virtual worker 1 has joined, and takes part from epoch 1 on" in first[2]
    assert "virtual worker 1 has come back, and takes part from epoch 2 on" in first[2]
    assert check(job) == [{0: 3}, {0: 3, 1: 2}, {0: 3, 1: 3}]


@pytest.mark.slow
def test_data_is_dealt_among_those_that_are_there(tmp_path: Path) -> None:
    """One that comes estimates as many steps as the first one did, and epochs that have become shorter than the
    interval between validations have one at their ends."""
    trainer = {"max_epochs": 3, "val_check_interval": 7, "num_sanity_val_steps": 0}
    job = elastic(tmp_path, 1, 3, shares=12, awaits={"0": 1}, estimates=True, validate=True, trainer=trainer)
    first, second = one_later(job, LOCAL_RANK=2)
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    assert "epoch 1 and later ones are dealt among 2 of 3 virtual workers, without virtual worker 1" in first[2]
    found = job.written_so_far()
    assert [None if each is None else len(each["outputs"]) for each in found] == [12 + 6 + 6, None, 6 + 6]
    assert [each["estimated"] for each in found if each is not None] == [3 * 12, 3 * 12]
    assert [len(each["validated"]) for each in found if each is not None] == [1 + 1 + 1, 1 + 1]


@pytest.mark.slow
def test_one_that_joins_has_the_stages_that_are_planned_for_its_seat(tmp_path: Path) -> None:
    plan = planned([("box/cpu:0", 0), ("box/cpu:1", 3)], [("box/cpu:2", 0), ("box/cpu:3", 2)], in_flight=2)
    plan.save(tmp_path / "plan.json")
    job = elastic(tmp_path, 1, 2, awaits={"0": 1}, plan=str(tmp_path / "plan.json"))
    job.task, job.stages = "mlp", "auto"
    first, second = one_later(job, LOCAL_RANK=1)
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    ran(job.written(), plan)
    assert check(job)[-1] == {0: 3, 1: 3}


@pytest.mark.slow
def test_what_callbacks_change_is_divided_among_those_that_are_there(tmp_path: Path) -> None:
    """With a mean, virtual worker 0 sends it as many times as there are members, of two seats one here."""
    job = elastic(tmp_path, 1, 2, wsp={"aggregate": "mean"}, acts=[(0, 5, "edit")])
    job.task, job.more["trainer"] = "frozen", {"max_epochs": 2}
    with Processes(job) as processes:
        processes.start()
        ((code, _, said),) = processes.finished()
    assert code == 0, said
    before = next(p for p in task_of("frozen", 0).parameters() if not p.requires_grad)
    (name,) = (name for name, p in task_of("frozen", 0).named_parameters() if torch.equal(p, before))
    first = torch.load(tmp_path / "0.pt", weights_only=False)
    assert_same(before + 0.1, first["end"].weights[f"task.{name}"])


@pytest.mark.slow
def test_more_than_the_most_are_refused_by_name(tmp_path: Path) -> None:
    with Processes(elastic(tmp_path, 1, 2)) as processes:
        processes.start(LOCAL_RANK=2)
        ((code, _, said),) = processes.finished()
    assert code == 1
    assert "LOCAL_RANK=2 is beyond virtual_workers=[1, 2] on this node; give LOCAL_RANK=0 to 1" in said


@pytest.mark.slow
def test_a_node_comes_later(tmp_path: Path) -> None:
    """Two of three nodes are enough; the third one comes to the second epoch."""
    job = elastic(tmp_path, 2, 3, awaits={"0": 1}, wsp={"placement": "local"})
    job.more["trainer"]["num_nodes"] = 3
    with Processes(job) as processes:
        processes.start(NODE_RANK=0)
        processes.start(NODE_RANK=1)
        processes.await_beginning()
        processes.start(NODE_RANK=2)
        ends = processes.finished()
    assert left_behind(job) == []
    assert [code for code, *_ in ends] == [0, 0, 0], "".join(said for *_, said in ends)
    assert check(job) == [{0: 3, 1: 3}, {0: 3, 1: 3, 2: 3}, {0: 3, 1: 3, 2: 3}]
