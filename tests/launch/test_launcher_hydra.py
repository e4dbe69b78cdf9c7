"""The launcher under Hydra: all processes are one job, in one folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.launching.meeting import HERE, Meeting, Process

SCRIPT = HERE / "hydra_program.py"


@pytest.fixture
def meeting(tmp_path: Path) -> Iterator[Meeting]:
    meeting = Meeting(tmp_path)
    yield meeting
    meeting.close()


def leave_in_turn(processes: list[Process]) -> None:
    """The children, then the first, come to their job's end."""
    for process in processes[::-1]:
        process.ask("return")
        process.order("return")
        assert process.hear() == {"did": "return"}


def test_a_job_is_in_one_folder(meeting: Meeting, tmp_path: Path) -> None:
    first = meeting.run(SCRIPT, f"+address={meeting.address}", "+text='a, b=[c]'", "hydra.job.chdir=true",
                        folder=tmp_path)  # fmt: skip
    _, child = processes = meeting.launched(first)
    assert child.facts["config"] == first.facts["config"]
    assert child.facts["config"]["text"] == "a, b=[c]"
    assert child.facts["folder"] == first.facts["folder"]
    (folder,) = tmp_path.glob("outputs/*/*")
    assert first.ask("look")["folder"] == child.ask("look")["folder"] == str(folder)
    leave_in_turn(processes)
    code, out, err = meeting.ends()
    assert (code, err) == (0, [])
    assert ["says hello" in line for line in out] == [True], "children repeat what the first says"
    assert len((folder / "hydra_program.log").read_text().splitlines()) == 1
    assert sorted(path.name for path in tmp_path.glob("outputs/*/*/.hydra/*")) == ["config.yaml", "hydra.yaml",
                                                                                   "overrides.yaml"]  # fmt: skip


def test_each_job_of_a_sweep_has_children_of_its_own(meeting: Meeting, tmp_path: Path) -> None:
    """Lightning's launcher hands the whole sweep on to each child."""
    first = meeting.run(SCRIPT, "--multirun", f"+address={meeting.address}", "+stages=1,2", "+seed=7",
                        r"hydra.sweep.subdir='job ${hydra.job.num}\'s'", folder=tmp_path)  # fmt: skip
    folders = []
    for number, stages in enumerate((1, 2)):
        if number:
            # The first job's children are waited for when the second launches.
            first = meeting.meet()
        assert first.facts["config"] == {"address": meeting.address, "stages": stages, "seed": 7}
        _, child = processes = meeting.launched(first)
        assert child.facts["config"] == first.facts["config"]
        assert child.facts["num"] == first.facts["num"] == number
        assert child.facts["folder"] == first.facts["folder"]
        folders.append(first.facts["folder"])
        leave_in_turn(processes)
        assert child.ended() == [], "the child runs another job of the sweep"
    code, _, err = meeting.ends()
    assert (code, err) == (0, [])
    (sweep,) = tmp_path.glob("multirun/*/*")
    assert folders == [str(sweep / f"job {number}'s") for number in (0, 1)]
    assert not (tmp_path / "outputs").exists()
