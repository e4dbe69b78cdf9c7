"""Virtual workers that are told to end: all of them at a cut that is saved (law L6), or one that leaves the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.equality import assert_same
from tests.wsp.launch import Job, left_behind, run_all, start
from tests.wsp.test_checkpoints import check_checkpoint, check_resumed
from tests.wsp.test_cuts import until
from tests.wsp.test_exact import all_batches, check, together


class Story:
    """A job whose virtual worker 0, or all, are told to end, and the step after which they are saved."""

    def __init__(self, fault: tuple[Any, ...], step: int, in_flight: int = 3, distance: int = 0, **more: Any) -> None:
        self.fault = fault
        self.step = step
        self.distance = distance
        self.job = Job(Path(), "mlp", (8, 8) if distance else (5, 5), 1 if in_flight == 1 else 2, in_flight, more)

    def run(self, folder: Path) -> tuple[list[dict[str, Any]], Path, str]:
        """Records of virtual workers until they ended, the file in which they are saved, and what was said."""
        settings = {"enable_checkpointing": True, "default_root_dir": str(folder)}
        self.job.folder = folder
        self.job.more |= {"is_preempted": True, "wsp": {"clock_distance": self.distance}}
        self.job.more["fault"] = (*self.fault, "SIGTERM") if len(self.fault) == 2 else self.fault
        self.job.more["trainer"] = {**settings, **self.job.more.get("trainer", {})}
        done = start(self.job)
        assert done.returncode == 143, done.stderr
        assert "Traceback" not in done.stderr
        assert left_behind(self.job) == []
        (file,) = folder.rglob("preempted-*.ckpt")
        assert file.name.endswith(f"step={self.step}.ckpt")
        return self.job.written(), file, done.stderr


STORIES = {
    "the first one is": Story((0, 1), 3),
    "all are": Story(("all", 1), 3),
    "all processes are": Story((0, 1, "SIGTERM of all"), 3),
    "a distance": Story((0, 1), 6, in_flight=2, distance=2),
    "one in flight": Story((0, 1), 2, in_flight=1),
    "at the end of an epoch": Story((), 5, acts=[(0, 5, "SIGTERM")]),
    "in a validation": Story((0, "validation"), 2, validate=True, trainer={"val_check_interval": 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STORIES)
def test_all_end_at_a_cut_that_is_saved(name: str, tmp_path: Path) -> None:
    """With a distance D at most D + 1 waves later. A run that resumes is the oracle's from there, bit for bit."""
    story, step = STORIES[name], STORIES[name].step
    found, file, said = story.run(tmp_path)
    assert said.count(f"told to end after {step} steps, and is saved in {file}; to resume") == 1
    if story.distance == 0:  # else the order of updates depends on time
        data = [[batches[:step]] for batches in all_batches(story.job)]
        runs = together(story.job, story.job.in_flight, data)
        check(story.job, found, runs)
        check_checkpoint(file, runs[0].states[step])
    ends = [each["end"] for each in found]
    assert [len(each["outputs"]) for each in found] == [step, step]
    assert_same(ends[0].weights, ends[1].weights)
    assert_same(ends[0].weights, dict(torch.load(file, weights_only=False)["state_dict"]))
    again = Job(tmp_path / "again", "mlp", story.job.lengths, 2, 3, {"resume": str(file)})
    again.folder.mkdir()
    check_resumed(again, step, run_all(again)[0], [end.optimizer for end in ends])


@pytest.mark.slow
def test_one_that_is_told_alone_finishes_its_wave_and_leaves(tmp_path: Path) -> None:
    """Its update is there, the others go on at once, whatever its lease, and say what has become of it."""
    job = Job(tmp_path, lengths=(6, 6), more={"fault": (1, 1, "SIGTERM"), "together": 0.0, "wsp": {"lease": 600.0}})
    job.more["is_preempted"] = True
    done = start(job)
    assert done.returncode == 1, done.stderr
    assert left_behind(job) == []
    told = "hetpipe: virtual worker 1 is lost after 1 waves: it was told to end; the others go on without it.\n"
    assert done.stderr.count(told) == 1
    assert done.stderr.count("hetpipe: this run went on without virtual worker 1, which was told to end.\n") == 1
    assert "Traceback" not in done.stderr
    first, other = job.written()
    wanted = until(job, (6, 3), (6, 0))
    assert len(other["outputs"]) == 3
    check(job, [first], wanted[:1])


@pytest.mark.slow
def test_one_that_is_told_twice_leaves_after_its_step(tmp_path: Path) -> None:
    """The others ended with it, and were not saved."""
    more = {"acts": [(1, 1, "SIGTERM"), (1, 2, "SIGTERM")], "together": -1.0, "is_preempted": True, "wsp": {"wave": 6}}
    done = start(job := Job(tmp_path, lengths=(6, 6), in_flight=2, more=more))
    assert done.returncode == 1, done.stderr
    assert left_behind(job) == []
    assert "hetpipe: virtual worker 1 is lost after 0 waves: it was told to end; the others go on" in done.stderr
    assert "Traceback" not in done.stderr
    assert [len(each["outputs"]) for each in job.written()] == [12, 2]


@pytest.mark.slow
def test_without_checkpoints_all_end_and_nothing_is_saved(tmp_path: Path) -> None:
    done = start(job := Job(tmp_path, more={"fault": (0, 2, "SIGTERM")}))
    assert done.returncode == 143, done.stderr
    assert "told to end after 3 steps, and is not saved; its Trainer saves no checkpoints" in done.stderr
    assert "Traceback" not in done.stderr
    assert left_behind(job) == []
    assert list(tmp_path.iterdir()) == []
