"""A supervisor starts a program again where its first process is lost, from the newest checkpoint that is there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from lightning_hetpipe.launch import supervision
from lightning_hetpipe.launch.command import Command
from lightning_hetpipe.launch.supervision import (
    VARIABLE,
    RunSupervisor,
    can_supervise,
    note_saved,
    own_number,
    supervised,
)
from tests.launch.test_checkpoint_progress import saved

PROGRAM = """
import os, signal, subprocess, sys
from lightning_hetpipe.launch.supervision import note_saved, supervised

pipe, folder = supervised(), sys.argv[1]
assert pipe is not None and "HETPIPE_SUPERVISED" not in os.environ
with open(f"{folder}/runs", "a") as runs:
    print(*sys.argv[2:], file=runs)
times = len(open(f"{folder}/runs").readlines())
"""
"""Beginning of a program: each of its runs writes down its further arguments."""

SUPERVISE = "from lightning_hetpipe.launch.supervision import Command, RunSupervisor"
ROOT = Path(__file__).parents[2]
DIES = "os.kill(os.getpid(), signal.SIGKILL)"


def supervise(folder: Path, what: str, restarts: int = 1) -> tuple[int, list[str]]:
    """Run a program that does ``what``; gives its exit code, and the further arguments of each of its runs."""
    command = [sys.executable, "-c", PROGRAM + what, str(folder)]
    code = RunSupervisor(Command(command, str(ROOT), None), restarts, lambda path: ["from", path]).run()
    return code, (folder / "runs").read_text().splitlines()


@pytest.mark.parametrize(
    ("ends", "code"), [("", 0), ("sys.exit(1)", 1), ("sys.exit(2)", 2), ("sys.exit(143)", 143), ("sys.exit(130)", 130)]
)
def test_what_ends_by_itself_is_not_started_again(ends: str, code: int, tmp_path: Path) -> None:
    assert supervise(tmp_path, ends) == (code, [""])


@pytest.mark.parametrize("loss", [DIES, "os._exit(75)", "os._exit(3)"])
def test_it_goes_on_from_what_was_saved_last_and_is_there(
    loss: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The one that is saved after the first process has died, by another one, is the newest."""
    one, two = tmp_path / "one.ckpt", tmp_path / "two.ckpt"
    later = f"""
if times == 1:
    note_saved("{one}")
    code = "import os, sys; sys.stdin.read(); open({str(two)!r}, 'w').close(); "
    code += "os.write(int(sys.argv[1]), b'{two}\\\\n'); os.write(int(sys.argv[1]), b'/removed.ckpt\\\\n')"
    subprocess.Popen([sys.executable, "-c", code, str(pipe)], stdin=subprocess.PIPE, pass_fds=[pipe])
    {loss}
"""
    assert supervise(tmp_path, later) == (0, ["", f"from {two}"])
    (said,) = capfd.readouterr().err.splitlines()
    assert said.startswith("hetpipe: virtual worker 0 (process ")
    assert said.endswith(f"and the run is started again from {two} (no more restarts).")


def test_it_goes_on_from_the_one_with_the_most_progress(tmp_path: Path) -> None:
    ahead, straggler = saved(tmp_path / "ahead.ckpt", 1, 4), saved(tmp_path / "straggler.ckpt", 1, 2)
    later = f"if times == 1: note_saved({ahead!r}); note_saved({straggler!r}); {DIES}"
    assert supervise(tmp_path, later) == (0, ["", f"from {ahead}"])


def test_who_is_lost_is_woken_and_who_is_no_first_one_starts_as_before(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One that is stopped ends when it goes on; the others ask the first one what they go on from."""
    what = f"""
if times == 1:
    note_saved({saved(tmp_path / "one.ckpt", 0, 1)!r})
    child = os.fork()
    if not child:
        while open(f"/proc/{{os.getppid()}}/stat").read().rpartition(")")[2].split()[0] != "T":
            pass
        note_lost()
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)
    os._exit(75)
"""
    program = PROGRAM.replace("import note_saved", "import note_lost, note_saved")
    command = [sys.executable, "-c", program + what, str(tmp_path)]
    assert RunSupervisor(Command(command, str(ROOT), None), 1, lambda path: ["from", path], vw=2).run() == 0
    assert (tmp_path / "runs").read_text().splitlines() == ["", ""]
    (said,) = capfd.readouterr().err.splitlines()
    assert said.startswith("hetpipe: virtual worker 2 (process ")
    assert said.endswith("ended with exit code 75, and is started again (no more restarts).")


def test_it_is_started_again_so_often_and_ends_as_it_died(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert supervise(tmp_path, DIES, 2) == (128 + signal.SIGKILL, ["", "", ""])
    lines = capfd.readouterr().err.splitlines()
    assert [line.partition("SIGKILL")[2] for line in lines] == [
        ", and the run is started again anew (1 more restart).",
        ", and the run is started again anew (no more restarts).",
        ", and the run has ended; no restart is left.",
    ]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_one_that_is_told_to_end_is_not_started_again(signum: int, tmp_path: Path) -> None:
    """A terminal's Ctrl-C reaches both; SIGTERM is passed on, and kills what does not know it."""
    both = f"os.kill(os.getppid(), {int(signum)}); signal.signal({int(signum)}, signal.SIG_DFL); "
    ends = f"os.kill(os.getpid(), {int(signum)})" if signum == signal.SIGINT else "signal.pause()"
    assert supervise(tmp_path, both + ends) == (128 + signum, [""])


def test_a_signal_between_two_processes_ends_the_second_one(tmp_path: Path) -> None:
    saved = tmp_path / "one.ckpt"
    saved.touch()
    what = f"note_saved({str(saved)!r}); " + DIES.join(("times == 1 and ", "; signal.alarm(60); signal.pause()"))
    command = [sys.executable, "-c", PROGRAM + what, str(tmp_path)]

    def going_on(path: str) -> Sequence[str]:
        os.kill(os.getpid(), signal.SIGTERM)
        return ["from", path]

    assert RunSupervisor(Command(command, str(ROOT), None), 1, going_on).run() == 128 + signal.SIGTERM


def test_an_interrupt_of_the_supervisor_alone_ends_the_program(tmp_path: Path) -> None:
    """There is no terminal, which would interrupt both."""
    command = [sys.executable, "-c", PROGRAM + "print(flush=True); signal.alarm(60); signal.pause()", str(tmp_path)]
    code = f"import sys; {SUPERVISE}; sys.exit(RunSupervisor(Command({command!r}, {str(ROOT)!r}, None), 1, list).run())"
    supervisor = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True
    )
    assert supervisor.stdout is not None
    with supervisor.stdout as out:
        out.readline()
        supervisor.send_signal(signal.SIGINT)
        assert supervisor.wait() == 128 + signal.SIGINT


def test_an_ignored_interrupt_is_ignored_by_the_program(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        code = supervise(tmp_path, "os.kill(os.getppid(), 2); os.kill(os.getpid(), 2); sys.exit(3)", 0)
    finally:
        signal.signal(signal.SIGINT, before)
    assert code == (3, [""])


def test_a_program_ends_with_its_supervisor(tmp_path: Path) -> None:
    command: Sequence[str] = [sys.executable, "-c", PROGRAM + "print(os.getpid(), flush=True); signal.pause()"]
    code = f"{SUPERVISE}; RunSupervisor(Command({[*command, str(tmp_path)]!r}, {str(ROOT)!r}, None), 1, list).run()"
    supervisor = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert supervisor.stdout is not None
    supervisor.stdout.readline()
    supervisor.kill()
    with supervisor.stdout as out:
        assert out.read() == "", "it has closed its end"
    supervisor.wait()


def test_who_is_supervised_or_numbered_supervises_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "_pipe", None)
    for name in supervision._NUMBERED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert can_supervise()
    assert own_number() == 0
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert can_supervise(), "a person has started it, beside others"
    assert own_number() == 2
    monkeypatch.setattr(supervision, "this_child", lambda: object())
    assert not can_supervise()
    monkeypatch.setattr(supervision, "this_child", lambda: None)
    monkeypatch.setenv("RANK", "0")
    assert not can_supervise()
    monkeypatch.delenv("RANK")
    ours, theirs = os.pipe()
    monkeypatch.setenv(VARIABLE, str(theirs))
    assert not can_supervise()
    assert supervised() == theirs
    assert VARIABLE not in os.environ
    note_saved("a.ckpt")
    os.close(theirs)
    with open(ours) as pipe:
        assert pipe.read() == f"{os.getcwd()}/a.ckpt\n"
