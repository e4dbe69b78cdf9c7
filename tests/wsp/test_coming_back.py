"""A virtual worker that was lost comes back when an epoch begins, with the others' state; the bits are the oracle's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_hetpipe.launch.launcher import LEFT_OUT
from tests.hosts.elsewhere import serving
from tests.oracle import Run, State
from tests.support import forks
from tests.support.equality import assert_same
from tests.wsp.launch import Job, left_behind, start
from tests.wsp.membership import check_recorded, epochs_of
from tests.wsp.test_ends import ROOM, small_file_system
from tests.wsp.test_exact import all_batches, together

LEASE = 10.0
"""Seconds for which the others wait for one that was killed; and for one that is to load their state."""


def coming_back(
    folder: Path, message: str = "Pushed", nth: int = 4, when: str = "after", what: str = "kill", **more: Any
) -> Job:
    """A job whose virtual worker 1 ends in the second of four epochs and comes back to the third one."""
    fault = {"vw": 1, "room": "fit-1", "message": message, "nth": nth, "when": when, "what": what}
    faults = [{**fault, "mark": str(folder / "mark")}, *more.pop("faults", ())]
    wsp = {"lease": LEASE, "restarts": 1, **more.pop("wsp", {})}
    task = more.pop("task", "by epoch")
    told: dict[str, Any] = {"faults": faults, "wsp": wsp, "awaits": {"1": 1}, "trainer": {"max_epochs": 4}, **more}
    return Job(folder, task, lengths=(5, 5), in_flight=2, more=told)


def expected(job: Job, waves: int, wave: int = 2, **options: Any) -> tuple[list[Run], list[Run]]:
    """The oracle's runs before and after the return of virtual worker 1, which has pushed ``waves`` of epoch 1."""
    whole = all_batches(job)
    pushed = whole[1][: waves * wave]
    before = together(job, wave, [[whole[0]] * 2, [whole[1], pushed]], **options)
    state = before[0].states[-1]
    done = len(before[0].outputs)
    after = together(job, wave, [[each] * 2 for each in whole], resumed=[(done, state)] * 2, **options)
    return before, after


def ended_well(job: Job, **variables: str) -> str:
    """Runs ``job``, of which nothing is left then; gives what was said."""
    done = start(job, **variables)
    assert done.returncode == 0, done.stderr
    assert left_behind(job) == []
    return done.stderr


def check_first(found: dict[str, Any], before: list[Run], after: list[Run]) -> None:
    outputs = [*before[0].outputs, *after[0].outputs]
    assert len(found["outputs"]) == len(outputs)
    for p, (mine, wanted) in enumerate(zip(found["outputs"], outputs, strict=True), start=1):
        assert_same(wanted, mine, f"VW 0, minibatch {p}")
    check_end(found, after[0].states[-1], "VW 0")


def check_second(found: dict[str, Any], after: list[Run]) -> None:
    """Its process has seen nothing of what was before it came back."""
    assert len(found["outputs"]) == len(after[1].outputs)
    for p, (mine, wanted) in enumerate(zip(found["outputs"], after[1].outputs, strict=True), start=1):
        assert_same(wanted, mine, f"VW 1, minibatch {p} after its return")
    check_end(found, after[1].states[-1], "VW 1")


def check_end(found: dict[str, Any], wanted: State, who: str) -> None:
    assert_same(wanted.weights, found["end"].weights, who)
    assert_same(wanted.buffers, found["end"].buffers, who)
    assert_same(wanted.optimizer, found["end"].optimizer, who)


CASES: dict[str, tuple[dict[str, Any], int]] = {
    "after a push": ({}, 1),
    "in mid-push": ({"message": "StageUpdate", "when": "middle"}, 0),
    "in mid-pull": ({"message": "Read", "nth": 5, "when": "middle"}, 1),
    "batchnorm": ({"task": "resnet"}, 1),
    "a hook that asks all": ({"talks": True}, 1),
    "loaders made anew": ({"validate": True, "trainer": {"max_epochs": 4, "reload_dataloaders_every_n_epochs": 1}}, 1),
    "a first validation, made alone": (
        {"validate": True, "trainer": {"max_epochs": 4, "check_val_every_n_epoch": 3, "num_sanity_val_steps": 0}},
        1,
    ),
    "a first validation, made with the others": (
        {"validate": True, "trainer": {"max_epochs": 4, "check_val_every_n_epoch": 4, "num_sanity_val_steps": 0}},
        1,
    ),
    "checkpoints that a plugin writes": ({"saves_elsewhere": True}, 1),
}
"""Ends of virtual worker 1, and how many waves of that epoch it has pushed."""


@pytest.mark.slow
def test_stages_at_hosts_come_back(tmp_path: Path) -> None:
    with serving({}) as hosts:
        check_membership(tmp_path, {"hosts": hosts.address}, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_bits_are_those_of_the_oracle_with_that_membership(name: str, tmp_path: Path) -> None:
    check_membership(tmp_path, *CASES[name])


def check_membership(tmp_path: Path, how: dict[str, Any], waves: int) -> None:
    job = coming_back(tmp_path, **how)
    assert "died by SIGKILL, and is started again (no more restarts)" in ended_well(job)
    found = job.written()
    before, after = expected(job, waves)
    check_first(found[0], before, after)
    check_second(found[1], after)


@pytest.mark.slow
def test_one_comes_back_to_a_run_of_so_many_steps(tmp_path: Path) -> None:
    """It trained on nothing in its first epoch, as the one before was not over for Lightning."""
    job = coming_back(tmp_path, task="mlp", trainer={"max_epochs": 4, "max_steps": 18})
    ended_well(job)
    whole = all_batches(job)
    before = expected(job, 1)[0]
    done, state = len(before[0].outputs), before[0].states[-1]
    after = together(job, 2, [[each, each[:3]] for each in whole], resumed=[(done, state)] * 2)
    found = job.written()
    check_first(found[0], before, after)
    check_second(found[1], after)


@pytest.mark.slow
def test_one_that_was_stopped_for_longer_than_its_lease_comes_back(tmp_path: Path) -> None:
    """It is told so when it goes on, which is when virtual worker 0 takes weights without it."""
    goes_on = {"vw": 0, "room": "fit-1", "message": "Read", "nth": 5, "when": "before", "what": "continue"}
    job = coming_back(tmp_path, "StageUpdate", 5, "before", "stop", faults=[goes_on])
    said = ended_well(job)
    assert "virtual worker 1 ends, as the others have gone on without it: VW 1 was silent for longer" in said
    assert f"ended with exit code {LEFT_OUT}, and is started again" in said
    before, after = expected(job, 1)
    found = job.written()
    check_first(found[0], before, after)
    check_second(found[1], after)


@pytest.mark.slow
def test_one_that_dies_while_it_comes_back_leaves_the_others_unharmed(tmp_path: Path) -> None:
    """They wait a lease for it, and go on; its third process comes back an epoch later. No file is left of any."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    dies = {"vw": 1, "room": "talk-1", "message": "Recall", "nth": 2, "when": "after", "what": "kill"}
    job = coming_back(
        tmp_path,
        faults=[{**dies, "mark": str(tmp_path / "another mark")}],
        wsp={"restarts": 2},
        awaits={"1": 1, "2": 1},
    )
    said = ended_well(job, TMPDIR=str(temporary))
    assert not [*temporary.glob("hetpipe-*")]
    assert "and is started again (1 more restart)" in said
    assert "and is started again (no more restarts)" in said
    whole = all_batches(job)
    before = together(job, 2, [[whole[0]] * 3, [whole[1], whole[1][:2], []]])
    done, state = len(before[0].outputs), before[0].states[-1]
    after = together(job, 2, [[each] for each in whole], resumed=[(done, state)] * 2)
    found = job.written()
    check_first(found[0], before, after)
    check_second(found[1], after)


@pytest.mark.slow
def test_two_come_back_at_once(tmp_path: Path) -> None:
    job = coming_back(tmp_path, awaits={"1": 2})
    job.lengths = (5, 5, 5)
    fault = job.more["faults"][0]
    job.more["faults"] = [fault, {**fault, "vw": 2, "mark": str(tmp_path / "another mark")}]
    ended_well(job)
    whole = all_batches(job)
    before = together(job, 2, [[whole[0]] * 2, *([each, each[:2]] for each in whole[1:])])
    done, state = len(before[0].outputs), before[0].states[-1]
    after = together(job, 2, [[each] * 2 for each in whole], resumed=[(done, state)] * 3)
    found = job.written()
    check_first(found[0], before, after)
    check_second(found[1], after)
    check_end(found[2], after[2].states[-1], "VW 2")


@pytest.mark.slow
@pytest.mark.parametrize(("when", "nth"), [("before", 2), ("middle", 2)])
def test_one_comes_back_also_where_the_server_dies_while_it_waits(when: str, nth: int, tmp_path: Path) -> None:
    """Or while it gets the state, which is gone then.

    To the third epoch or a later one: virtual worker 0 may have seen that it is ready before that was forgotten, and
    the new server may take longer to start than the others wait.
    """
    server = {"vw": 1, "room": "talk-1", "message": "Recall", "nth": nth, "when": when, "what": "server"}
    recorded: dict[str, Any] = {"log": str(tmp_path / "decisions"), "awaits": "all"}
    recorded |= {"wsp": {"restarts": 2}, "trainer": {"max_epochs": 6}}
    job = coming_back(tmp_path, faults=[{**server, "mark": str(tmp_path / "another mark")}], **recorded)
    said = ended_well(job)
    assert "is started again (1 more restart)" in said
    assert "the parameter server died by SIGKILL and was started again" in said
    check_recorded(job, job.written(), epochs_of(tmp_path / "decisions"), 2)


@pytest.mark.slow
@pytest.mark.parametrize("after", [2, 3], ids=["the state is left", "it is taken away"])
def test_one_comes_back_also_where_the_server_dies_once(after: int, tmp_path: Path) -> None:
    """All that was left there was lost.

    Where it has none, as the new server had not heard of its wish in time, its next process has one later.
    """
    server = {"vw": 0, "room": "talk-1", "message": "KeepBytes", "nth": after, "when": "after", "what": "server"}
    another = {**server, "mark": str(tmp_path / "another mark")}
    recorded: dict[str, Any] = {"log": str(tmp_path / "decisions"), "awaits": "all"}
    recorded |= {"wsp": {"restarts": 2}, "trainer": {"max_epochs": 6}}
    job = coming_back(tmp_path, faults=[another], **recorded)
    said = ended_well(job)
    assert "the parameter server died by SIGKILL and was started again" in said
    check_recorded(job, job.written(), epochs_of(tmp_path / "decisions"), 2)


@pytest.mark.slow
def test_one_comes_back_with_d_1(tmp_path: Path) -> None:
    job = coming_back(tmp_path, wsp={"clock_distance": 1})
    ended_well(job)
    first, second = job.written()
    assert len(first["outputs"]) == 20
    assert len(second["outputs"]) == 10
    assert_same(first["end"].weights, second["end"].weights)


@pytest.mark.slow
def test_data_is_dealt_among_those_that_take_part(tmp_path: Path) -> None:
    """Epoch 2 is trained on by virtual worker 0 alone, all of it; the last one by both."""
    later: dict[str, Any] = {"late": str(tmp_path / "mark"), "acts": [(0, 11, "meet")]}
    job = coming_back(tmp_path, shares=10, awaits={"2": 1}, **later)
    said = ended_well(job)
    assert "epoch 2 and later ones are dealt among 1 of 2 virtual workers, without virtual worker 1" in said
    missed = "virtual worker 1 was lost after 1 wave of epoch 1: 12 of its 20 samples of that epoch were not trained on"
    assert said.count(missed) == 1, said
    first, second = job.written()
    logged = [row["hetpipe/missed_samples"] for row in first["logged"]]
    assert {*logged[:7]} == {0}
    assert {*logged[-15:]} == {12}
    assert len(first["outputs"]) == 5 + 5 + 10 + 5
    assert len(second["outputs"]) == 5
    assert_same(first["end"].weights, second["end"].weights)


@pytest.mark.slow
def test_one_that_came_back_takes_part_in_the_next_fit_at_servers_that_were_named(tmp_path: Path) -> None:
    folders = [tmp_path / each for each in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    command = ["-m", "lightning_hetpipe.cli.hetpipe_server", "address=127.0.0.1:0", f"service.lease={LEASE}"]
    server = forks.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True, loaded="libraries")
    try:
        assert server.stdout is not None
        wsp = {"lease": LEASE, "restarts": 1, "servers": [server.stdout.readline().split()[2].rstrip(";")]}
        first = coming_back(folders[0], wsp=wsp)
        second = Job(folders[1], "by epoch", lengths=(5, 5), in_flight=2, more={"wsp": wsp})
        done = start(first, second)
    finally:
        server.terminate()
        server.communicate()
    assert done.returncode == 0, done.stderr
    assert len(first.written()) == len(second.written()) == 2


@pytest.mark.slow
def test_one_that_comes_when_training_is_over_says_so(tmp_path: Path) -> None:
    job = coming_back(tmp_path, awaits={}, late=str(tmp_path / "mark"), acts=[(0, 20, "meet")])
    done = start(job)
    assert done.returncode == 1, done.stderr
    assert left_behind(job) == []
    assert "virtual worker 1 comes back to a run whose training is over" in done.stderr
    assert (tmp_path / "0.pt").exists()


@pytest.mark.slow
def test_what_comes_after_the_training_is_divided_without_one_that_comes_in_its_last_epoch(tmp_path: Path) -> None:
    job = coming_back(tmp_path, shares=10, trainer={"max_epochs": 2}, validates_after=6)
    done = start(job)
    assert done.returncode == 1, done.stderr
    assert "virtual worker 1 comes back to a run whose training is over" in done.stderr
    assert job.written_so_far()[0]["metrics"]["count"] == 6  # type: ignore[index]


@pytest.mark.slow
def test_who_comes_back_knows_who_has_come_back_before(tmp_path: Path) -> None:
    """It was told of all departures, and in the program's next fit waited for nobody, as that one was lost for it."""
    (tmp_path / "later").mkdir()
    job = coming_back(tmp_path, awaits={"1": 1, "2": 1})
    job.lengths = (5, 5, 5)
    fault = job.more["faults"][0]
    job.more["faults"] = [{**fault, "vw": 2}, {**fault, "nth": 7, "mark": str(tmp_path / "another mark")}]
    later = Job(tmp_path / "later", "by epoch", job.lengths, in_flight=2, more={"wsp": job.more["wsp"]})
    done = start(job, later)
    assert done.returncode == 0, done.stderr
    assert left_behind(job) == []
    first, *others = later.written()
    assert len(first["outputs"]) == 10
    for each in others:
        assert_same(first["end"].weights, each["end"].weights)


@pytest.mark.slow
def test_callbacks_decide_alike_by_a_validation_before_the_return(tmp_path: Path) -> None:
    """One saves within an epoch, if it knows the metric of the epoch before."""
    job = coming_back(tmp_path, validate=True, saves={"monitor": "count", "every_n_train_steps": 4})
    ended_well(job)


@pytest.mark.slow
def test_without_room_for_the_state_the_others_train_on(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    with small_file_system(small):
        (small / "filling").write_bytes(bytes(ROOM - (8 << 10)))
        job = coming_back(tmp_path, awaits={"1": 1, "2": 1})
        done = start(job, TMPDIR=str(small))
    assert done.returncode == 1, done.stderr
    assert left_behind(job) == []
    said = (
        "those that are ready to come back have to wait for another epoch: no file of the state that they need can be"
    )
    assert f"{said} written in {small} (No space left on device); make room there, or set TMPDIR" in done.stderr
    assert "virtual worker 1 comes back to a run whose training is over" in done.stderr
    assert len(torch.load(tmp_path / "0.pt", weights_only=False)["outputs"]) == 20


@pytest.mark.slow
def test_a_search_for_a_learning_rate_is_not_made_alone(tmp_path: Path) -> None:
    """Its steps were added to the others' weights."""
    waits = {"vw": 0, "room": "fit-1", "message": "Pushed", "nth": 10, "when": "before", "what": "hold"}
    job = coming_back(tmp_path, nth=5, finds_rate=6, awaits={}, faults=[waits])
    done = start(job)
    assert done.returncode == 1, done.stderr
    assert left_behind(job) == []
    assert "SettingError: virtual worker 1 cannot come back to a fit with a LearningRateFinder" in done.stderr
    assert len(torch.load(tmp_path / "0.pt", weights_only=False)["outputs"]) == 20
