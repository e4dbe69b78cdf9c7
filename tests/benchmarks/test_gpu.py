"""The trial on a GPU: what it says where there is none, what it writes, and that its comparisons find differences."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import gpu, gpu_worker
from benchmarks.gpu import Part, Trial
from lightning_hetpipe.errors import SettingError


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens on a host without a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert gpu.main(["--out", str(tmp_path)]) == 1
    assert "needs a CUDA device" in capsys.readouterr().out
    assert not [*tmp_path.iterdir()]


def test_comparisons_tell_refusals_from_differences() -> None:
    left = iter([1, 2, 1])

    def refuses() -> None:
        raise SettingError("set in_flight=1")

    def breaks() -> None:
        raise ValueError("it broke")

    cases = {
        "same": lambda: gpu_worker.compared(lambda: torch.ones(2), lambda: torch.ones(2)),
        "other": lambda: gpu_worker.compared(lambda: next(left), lambda: next(left)),
        "refused": lambda: gpu_worker.compared(lambda: 1, refuses),
        "broken": lambda: gpu_worker.compared(breaks, lambda: 1),
    }
    found = {result.case: result for result in gpu_worker.results("a part", cases)}
    assert [each.result for each in found.values()] == ["equal", "differs", "refused", "error"]
    assert "a repetition of what it should be equals it" in found["other"].detail
    assert found["refused"].detail == "set in_flight=1"
    assert "the run that it is compared with: ValueError: it broke" in found["broken"].detail


def test_each_group_has_cases() -> None:
    assert gpu.GROUPS.keys() == gpu_worker.GROUPS.keys()
    for make in gpu_worker.GROUPS.values():
        assert make("cpu")


def python(code: str, limit: float = 60.0) -> Part:
    return Part("a part", (sys.executable, "-c", code), limit, "results")


def test_what_a_process_has_written_before_it_is_ended_counts(tmp_path: Path) -> None:
    """A line that it was writing when it was ended is left out."""
    trial = Trial(tmp_path, time.monotonic() + 60)
    line = json.dumps({"case": "one", "result": "equal", "detail": "", "seconds": 0.1})
    trial.run(python(f"import os; print({line!r}, '{{half', sep='\\n', flush=True); os.kill(os.getpid(), 9)"))
    assert [(row["case"], row["result"]) for row in trial.rows] == [("one", "equal"), ("the process", "error")]
    written = [json.loads(each) for each in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert written == trial.rows
    assert sorted(each.name for each in tmp_path.iterdir()) == ["log.txt", "results.jsonl"]


def test_without_time_a_part_is_left_out(tmp_path: Path) -> None:
    trial = Trial(tmp_path, time.monotonic())
    trial.run(python("raise SystemExit(1)"))
    assert [row["result"] for row in trial.rows] == ["left out"]


def test_ratios_are_formed_within_turns() -> None:
    one = {"part": "a", "loss": None, "cores": 1.0, "first_step": 1.0, "peak_bytes": 2**30}
    rows = [
        {**one, "task": "plain", "turn": 0, "rate": 10.0},
        {**one, "task": "two", "turn": 0, "rate": 5.0},
        {**one, "task": "two", "turn": 1, "rate": 30.0},
        {**one, "task": "plain", "turn": 1, "rate": 20.0},
    ]
    _, plain, two = gpu.ratios(rows)
    assert plain[2:4] == ("1.000", "1.000 .. 1.000")
    assert two[2:4] == ("1.000", "0.500 .. 1.500")
    assert two[5] == "1.333"


def test_programs_are_copied_for_the_device(tmp_path: Path) -> None:
    folder, into = tmp_path / "from", tmp_path / "to"
    folder.mkdir()
    into.mkdir()
    (folder / "one.py").write_text('Trainer(accelerator="cpu", devices=1); torch.zeros(1, device="cpu")\n')
    (folder / "other.py").write_text("print(1)\n")
    (part,) = gpu.programs(folder, "cuda", into)
    assert (
        Path(part.command[1]).read_text() == 'Trainer(accelerator="cuda", devices=1); torch.zeros(1, device="cuda")\n'
    )


@pytest.mark.slow
def test_a_rehearsal_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--device", "cpu", "--only", "timings", "--turns", "1", "--out", str(tmp_path)]) == 0
    assert "GPT 8x256: k=2 Nm=3" in capsys.readouterr().out
