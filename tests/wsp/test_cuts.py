"""Cuts at which virtual workers meet when one decides: by time, by a stop, or because its data ends earlier (L6)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_hetpipe.server.process.server_process import ServerProcess
from tests.oracle import Run
from tests.support.equality import assert_same
from tests.wsp.launch import Job, each_started, run, run_all, start
from tests.wsp.test_checkpoints import check_checkpoint
from tests.wsp.test_exact import all_batches, check, together


def until(job: Job, *counts: tuple[int, ...], **options: Any) -> list[Run]:
    """The oracle's run, where virtual worker i trains ``counts[epoch][i]`` minibatches of each epoch."""
    data = [[batches[: count[i]] for count in counts] for i, batches in enumerate(all_batches(job))]
    return together(job, 3, data, **options)


@pytest.mark.slow
def test_who_stops_stops_all(tmp_path: Path) -> None:
    """At the end of the epoch, as the others cannot know before; and by time at once, as virtual worker 0 decides."""
    stories: dict[str, tuple[Job, list[Run]]] = {}

    def story(name: str, lengths: tuple[int, ...], *counts: tuple[int, ...], cuts: Any = (), **more: Any) -> None:
        job = Job(tmp_path / name, lengths=lengths, more=more)
        job.folder.mkdir()
        stories[name] = job, until(job, *counts, cuts=cuts)

    story("the first stops", (5, 5), (2, 5), acts=[(0, 2, "stop")])
    story("the second stops", (5, 5), (5, 2), acts=[(1, 2, "stop")])
    story("max_steps", (5, 2), (5, 2), (2, 2), trainer={"max_steps": 7})
    story("time", (5, 5), (4, 4), clocks=[4, 9])
    every_step = {0: range(5), 1: range(5)}
    story("saves by time", (5, 4), (5, 4), (5, 4), cuts=every_step, saves={"train_time_interval": 0})
    story("saves by hand", (5, 4), (5, 4), (5, 4), cuts={0: [3]}, acts=[("all", 3, "save")])
    for (job, runs), found in zip(stories.values(), run_all(*(job for job, _ in stories.values())), strict=True):
        check(job, found, runs)
        assert_same(found[0]["end"].weights, found[1]["end"].weights)
    job, runs = stories["saves by time"]
    for step in range(1, 11):
        check_checkpoint(job.folder / f"step={step}.ckpt", runs[0].states[step])
        # Where the second one has come to the end of its four batches, it waits there, and gives nothing.
        states = torch.load(job.folder / f"step={step}.ckpt", weights_only=True)["hetpipe"]["states"]
        assert list(states) == ([] if step % 5 == 0 else [1])
    job, runs = stories["saves by hand"]
    check_checkpoint(job.folder / "saved.ckpt", runs[0].states[3])


@pytest.mark.slow
def test_all_validate_together_at_the_end_of_unequal_epochs(tmp_path: Path) -> None:
    """Each with its own number of batches; it was each for itself, with the metrics of its own share only."""
    job = Job(tmp_path, lengths=(5, 3), more={"validate": True, "trainer": {"max_epochs": 1}})
    (found,) = run_all(job)
    check(job, found, until(job, (5, 3)))
    one, other = found
    assert one["metrics"]["count"] == other["metrics"]["count"] == 6
    assert_same(one["validated"], other["validated"])


@pytest.mark.slow
def test_what_a_callback_makes_of_frozen_weights_is_the_same_at_every_cut(tmp_path: Path) -> None:
    """Until the next epoch each virtual worker had its own: they validated different models."""
    more = {"acts": [("all", 1, "edit"), ("all", 4, "edit")], "validate": True, "trainer": {"val_check_interval": 2}}
    one, other = run(Job(tmp_path, "frozen", (5, 5), more=more))
    assert len(one["validated"]) == 4
    assert_same(one["validated"], other["validated"])
    assert_same(one["end"].weights, other["end"].weights)


@pytest.mark.slow
def test_a_checkpoint_on_an_exception_waits_for_nobody(tmp_path: Path) -> None:
    """Virtual worker 1 fails; 0 learns it in the middle of a wait, and saves what it has."""
    done = start(Job(tmp_path, more={"fault": (1, 2, "raise"), "saves_on_exception": True}))
    assert done.returncode == 1
    assert "VW 1 failed: ValueError: a bad batch" in done.stderr
    saved = torch.load(tmp_path / "on_exception.ckpt", weights_only=True)
    assert (saved["hetpipe"]["virtual_workers"], saved["hetpipe"]["states"]) == (2, {})  # a run that resumes says so


@pytest.mark.slow
def test_a_checkpoint_in_the_middle_of_a_step_is_refused(tmp_path: Path) -> None:
    job = Job(tmp_path, in_flight=1, more={"fault": (0, 2, "save", str(tmp_path / "saved.ckpt"))})
    done = start(job)
    assert done.returncode == 1
    assert "a checkpoint is saved in the middle of a step" in done.stderr


@pytest.mark.slow
def test_slurm_requeues_at_a_cut(tmp_path: Path) -> None:
    """The signal reaches virtual worker 0 only, in its third minibatch: all cut after that wave, are saved, and end."""
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/requeued\n')
    scontrol.chmod(0o755)
    with ServerProcess("lightning_hetpipe.server.process.sessions:Sessions", {"lease": 30.0}) as server:
        job = Job(tmp_path, more={"wsp": {"servers": [server.address]}, "fault": (0, 2, "SIGUSR1")})
        job.more["trainer"] = {"default_root_dir": str(tmp_path), "max_epochs": 1}
        job.more["is_preempted"] = True
        told = {
            "SLURM_NTASKS": 2,
            "SLURM_NTASKS_PER_NODE": 2,
            "SLURM_JOB_ID": 7,
            "SLURM_JOB_NAME": "train",
            "SLURM_NODEID": 0,
        }
        told |= {"SLURM_NNODES": 1, "SLURM_STEP_TASKS_PER_NODE": 2, "SLURM_NODELIST": "localhost"}
        environment = {**os.environ, **{name: str(value) for name, value in told.items()}}
        environment |= {"HETPIPE_TOKEN": server.security.token or "", "PATH": f"{scontrol.parent}:{os.environ['PATH']}"}
        codes, said = each_started(
            job, [{**environment, "SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in ("0", "1")]
        )
    assert codes == [143, 143], said
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"
    runs = until(job, (3, 3))
    check(job, [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2)], runs)
    check_checkpoint(tmp_path / "hpc_ckpt_1.ckpt", runs[0].states[3])
