"""The launcher with real processes, which do what the test tells each of them."""

from __future__ import annotations

import itertools
import os
import select
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.launching.meeting import HERE, Meeting, Process, stated

SCRIPT = HERE / "obedient.py"
LATE = HERE / "late.py"


@pytest.fixture
def meeting(tmp_path: Path) -> Iterator[Meeting]:
    meeting = Meeting(tmp_path)
    yield meeting
    meeting.close()


@pytest.fixture
def first(meeting: Meeting, tmp_path: Path) -> Process:
    """The first process of a program, which has not launched anything yet."""
    return meeting.run(SCRIPT, meeting.address, folder=tmp_path)


def test_a_child_is_the_same_program_in_the_same_place(meeting: Meeting, tmp_path: Path) -> None:
    script = os.path.relpath(SCRIPT, tmp_path)
    first = meeting.run("-BW", "ignore", script, "meeting", "an argument", "--name=a b", folder=tmp_path)
    first.ask("move")  # as scripts do; a child starts where the program did, and meets the same line
    _, child = meeting.launched(first)
    assert (first.number, child.number) == (0, 1)
    parents, childs = first.ask("look"), child.ask("look")
    assert childs["argv"][1:] == parents["argv"][1:] == ["meeting", "an argument", "--name=a b"]
    assert childs["flags"] == parents["flags"] == [1, 0, ["ignore"]]
    assert (parents["folder"], childs["folder"]) == ("/", str(tmp_path))
    assert parents["changed"] == [], "the launcher changed the environment of the user's process"
    assert childs["changed"] == [], "programs that a child starts inherited the servers' token"
    assert childs["own"] == {"A_SERVER": None, "LOCAL_RANK": "1", "HETPIPE_VIRTUAL_WORKER": None}
    assert (parents["told"], childs["told"]) == ({}, {"A_SERVER": "somewhere"})


def test_a_module_is_run_again_as_a_module(meeting: Meeting, tmp_path: Path) -> None:
    first = meeting.run("-m", "tests.launch.launching.obedient", meeting.address, folder=tmp_path)
    processes = meeting.launched(first, 3)
    assert [process.number for process in processes] == [0, 1, 2]
    for process in processes[::-1]:
        process.ask("return")
        process.order("return")
    assert meeting.ends()[0] == 0


def test_children_stay_through_all_fits_and_are_waited_for_at_the_end(meeting: Meeting, first: Process) -> None:
    _, child = meeting.launched(first)
    assert first.ask("return") == {"did": "return"}
    for process in (first, child):
        if process is child:
            assert process.ask("return") == {"did": "return"}
        assert process.ask("launch", 2) == {"did": "launched"}, "a second fit must start nothing, and call nothing"
        assert process.ask("finish_tuning") == {"refused": ""}, "the end of lr_find ended the launch"
        process.order("return")
        assert process.hear() == {"did": "return"}
    assert first.ended() == [{"closed": True}]
    assert child.ended() == []
    assert meeting.ends() == (0, [], [])


def test_another_number_of_virtual_workers_is_refused_by_name(meeting: Meeting, first: Process) -> None:
    meeting.launched(first)
    first.ask("return")
    refused = first.ask("launch", 3)["refused"]
    assert refused.startswith("virtual_workers=3, but the processes of this program are 2 virtual workers")
    assert refused.endswith("give every HetPipeStrategy of the program virtual_workers=2, or train the rest with"
                            " another strategy or in another program")  # fmt: skip


def test_a_child_that_goes_on_after_the_program_is_waited_for(meeting: Meeting, first: Process) -> None:
    """It was killed after 10 seconds, in the midst of its own code, and the exit code was 0."""
    first.ask("speak_soon")
    _, child = meeting.launched(first)
    first.ask("return")
    first.order("return")
    assert meeting.program is not None
    assert meeting.program.stderr is not None
    said = meeting.program.stderr.readline()
    assert said == (
        f"hetpipe: this process has ended, and waits for virtual worker 1 (process {child.pid}) to end;"
        " WSPCallback(end_timeout=...) bounds that.\n"
    )
    for _ in range(2):
        assert child.ask("return") == {"did": "return"}
    code, _, err = meeting.ends()
    assert (code, stated(err)) == (0, [])


def test_whoever_does_not_want_to_wait_for_a_child_interrupts(meeting: Meeting, first: Process) -> None:
    first.ask("speak_soon")
    _, child = meeting.launched(first)
    first.ask("return")
    first.order("return")
    assert meeting.program is not None
    assert meeting.program.stderr is not None
    assert "waits for virtual worker 1" in meeting.program.stderr.readline()
    first.signal(signal.SIGINT)
    child.ended()
    code, _, err = meeting.ends()
    assert (code, err) == (1, [])


def test_a_child_that_outstays_the_program_is_ended(meeting: Meeting, first: Process) -> None:
    first.ask("hurry")
    _, child = meeting.launched(first)
    child.ask("resist")
    first.ask("return")
    first.order("return")
    child.ended()
    code, _, err = meeting.ends()
    assert code == 1, "its work is not done"
    assert stated(err) == [
        f"hetpipe: virtual worker 1 (process {child.pid}) had not ended 0.5 seconds after this process, and is told to"
        " end; raise WSPCallback(end_timeout=...) if it may take longer.",
        f"hetpipe: virtual worker 1 (process {child.pid}) did not end when told to, and is killed.",
    ]


@pytest.mark.parametrize("hangs", [False, True])
def test_an_interpreter_that_is_taken_down_slowly_is_killed_only_if_it_does_nothing(
    meeting: Meeting, first: Process, hangs: bool
) -> None:
    """On a busy machine a run that had finished was killed 10 seconds after its end, and the exit code was 1."""
    first.ask("lose_patience")
    _, child = meeting.launched(first)
    child.ask("end_slowly")
    for process in (child, first):
        for _ in range(2):
            assert process.ask("return") == {"did": "return"}
    assert child.hear() == {"works_on": True}
    assert first.hear() == {"closed": True}
    assert not select.select([child.connection], [], [], 1.5)[0], "it was killed while it worked"
    assert child.ask("sleep") == {"did": "sleep"}
    if not hangs:
        child.order("return")
    child.ended()
    code, _, err = meeting.ends()
    why = "did not end in 0.5 seconds without work after its program, and is killed"
    assert (code, stated(err)) == (
        (1, [f"hetpipe: virtual worker 1 (process {child.pid}) {why}."]) if hangs else (0, [])
    )


@pytest.mark.parametrize("stubborn", [False, True])
def test_an_exception_ends_all(meeting: Meeting, first: Process, stubborn: bool) -> None:
    if stubborn:
        first.ask("lose_patience")
    _, child = meeting.launched(first)
    if stubborn:
        child.ask("resist")
    first.order("fail")
    child.ended()
    assert first.ended() == [{"closed": True}]
    code, _, err = meeting.ends()
    assert code == 1
    assert "ValueError: a bug" in err
    assert len(stated(err)) == stubborn, "that a child was told to end is no news"


def test_what_all_run_into_is_printed_once(meeting: Meeting, first: Process) -> None:
    """It used to be printed by every process, line by line between each other's."""
    _, *children = meeting.launched(first, 3)
    for child in children:
        child.order("fail")
        child.ended()
    while first.hear() != {"died": 2, "code": 1}:
        pass
    first.order("fail")
    code, _, err = meeting.ends()
    assert code == 1
    assert err.count("ValueError: a bug") == 1
    assert stated(err) == []


def test_what_ends_a_child_is_printed_before_what_follows_from_it(meeting: Meeting, first: Process) -> None:
    _, child = meeting.launched(first)
    child.order("fail", "elsewhere")
    child.ended()
    assert first.hear() == {"died": 1, "code": 1}
    first.order("fail", "here")
    code, _, err = meeting.ends()
    assert code == 1
    assert stated(err) == [f"hetpipe: virtual worker 1 (process {child.pid}) failed."]
    assert [line for line in err if line.startswith("ValueError")] == ["ValueError: elsewhere", "ValueError: here"]
    assert "in fail" in "".join(err).partition("ValueError: elsewhere")[0], "its traceback is lost"


def test_what_ends_a_child_is_printed_at_once_where_nobody_waits_for_it(meeting: Meeting, first: Process) -> None:
    """And at the next launch it is known that it has ended."""
    _, child = meeting.launched(first)
    for process in (child, first):
        process.ask("return")
    child.order("fail")
    child.ended()
    assert meeting.program is not None
    assert meeting.program.stderr is not None
    said = list(itertools.takewhile(lambda line: line != "ValueError: a bug\n", meeting.program.stderr))
    assert stated(said) == [f"hetpipe: virtual worker 1 (process {child.pid}) failed.\n"]
    first.order("launch", 2)
    assert first.hear() == {"died": 1, "code": 1}
    assert first.hear() == {"did": "launched"}
    for _ in range(2):
        first.ask("return")
    code, _, err = meeting.ends()
    assert code == 1
    assert stated(err) == ["hetpipe: this run went on without virtual worker 1, which ended with exit code 1."]


def test_an_exception_outside_of_a_launch_ends_the_others_at_once(meeting: Meeting, first: Process) -> None:
    """They were waited for, in vain, as they wait for this one in their next fit."""
    _, child = meeting.launched(first)
    first.ask("return")
    first.order("fail")
    child.ended()
    code, _, err = meeting.ends()
    assert code == 1
    assert stated(err) == []


def test_a_child_that_still_starts_ends_without_a_word(meeting: Meeting, first: Process) -> None:
    first.order("launch", 2)
    child = meeting.meet()
    first.order("fail")
    child.ended()
    _, _, err = meeting.ends()
    assert "KeyboardInterrupt" not in "".join(err)
    assert stated(err) == []


def test_after_a_failure_there_is_no_other_launch(meeting: Meeting, first: Process) -> None:
    meeting.launched(first)
    assert first.ask("leave") == {"left": True}
    assert "the other virtual workers have ended" in first.ask("launch", 2)["refused"]
    first.order("return")
    assert first.ended() == [{"did": "return"}, {"closed": True}]


@pytest.mark.parametrize("to_all", [False, True], ids=["to the parent", "to all, as a terminal does"])
def test_an_interrupt_ends_all(meeting: Meeting, first: Process, to_all: bool) -> None:
    _, child = meeting.launched(first)
    if to_all:
        os.killpg(first.pid, signal.SIGINT)
    else:
        first.signal(signal.SIGINT)
    child.ended()
    first.ended()
    code, _, err = meeting.ends()
    assert code == -signal.SIGINT
    assert stated(err) == []


@pytest.mark.parametrize("order", ["fail", "interrupt"])
def test_an_interrupt_reaches_the_processes_of_a_child(meeting: Meeting, first: Process, order: str) -> None:
    """A child that Ctrl-C met in its DataLoader left the workers' folders behind: nobody had told these to end."""
    _, child = meeting.launched(first)
    child.ask("fork_and_wait")
    if order == "fail":
        first.order("fail")
    else:
        first.signal(signal.SIGINT)
    assert child.ended() == [{"worker_ended": signal.SIGINT}]
    meeting.ends()


@pytest.mark.parametrize("handled", [False, True], ids=["dies", "handles it as Lightning does"])
def test_sigterm_ends_all(meeting: Meeting, first: Process, handled: bool) -> None:
    _, child = meeting.launched(first)
    if handled:
        first.ask("handle_sigterm")
    first.signal(signal.SIGTERM)
    child.ended()
    code, _, err = meeting.ends()
    assert code == (1 if handled else -signal.SIGTERM)
    assert len(stated(err)) == (0 if handled else 1)


def test_who_cleans_up_because_it_was_told_to_end_is_not_told_again(meeting: Meeting, first: Process) -> None:
    """A second signal has once hit a DataLoader that was ending its workers, which left their folders behind."""
    _, child = meeting.launched(first)
    first.ask("handle_sigterm")
    child.ask("tidy_up")
    first.signal(signal.SIGTERM)
    assert child.hear() == {"tidies": True}
    assert not select.select([child.connection], [], [], 0.5)[0], "it was interrupted"
    child.order("tidied")
    assert child.ended() == [{"tidied": True}]
    code, _, err = meeting.ends()
    assert (code, stated(err)) == (1, [])


@pytest.mark.parametrize("stubborn", [False, True])
def test_children_die_with_their_parent(meeting: Meeting, first: Process, stubborn: bool) -> None:
    """A worker of the parent's DataLoader inherits all descriptors, and may outlive it by seconds."""
    _, child = meeting.launched(first)
    worker = first.ask("fork")["worker"]
    if stubborn:
        child.ask("resist")
    try:
        first.signal(signal.SIGKILL)
        child.ended()
        os.kill(worker, 0)  # it is still there
    finally:
        os.kill(worker, signal.SIGKILL)
    code, _, err = meeting.ends()
    assert code == -signal.SIGKILL
    assert stated(err) == [f"hetpipe: process {child.pid} ends, as its launcher (process {first.pid}) has ended."]


@pytest.mark.parametrize(("fault", "how"), [("kill", "died by SIGKILL"), ("exit", "ended with exit code 3")])
def test_the_death_of_a_child_is_told_and_the_others_go_on(
    meeting: Meeting, first: Process, fault: str, how: str
) -> None:
    first.ask("stand_behind", 4)
    _, child, other = meeting.launched(first, 3)
    if fault == "kill":
        child.signal(signal.SIGKILL)
    else:
        child.order("exit", 3)
    assert first.hear() == {"died": 5, "code": -signal.SIGKILL if fault == "kill" else 3}
    for process in (other, first):
        assert process.ask("return") == {"did": "return"}
        process.order("return")
    code, _, err = meeting.ends()
    assert code == 1, "a script that goes by it would go on"
    assert stated(err) == [
        f"hetpipe: virtual worker 5 (process {child.pid}) {how}.",
        f"hetpipe: this run went on without virtual worker 5, which {how}.",
    ]


def test_a_child_that_ends_alone_is_told_at_once_and_the_others_go_on(meeting: Meeting, first: Process) -> None:
    """The launcher said nothing before the end, as of an exception that others may run into as well."""
    _, child, other = meeting.launched(first, 3)
    child.order("lack")
    child.ended()
    assert first.hear() == {"died": 1, "code": 1}
    for process in (other, first):
        assert process.ask("return") == {"did": "return"}
        process.order("return")
    code, _, err = meeting.ends()
    assert code == 1
    how = "was unable to go on, as the process of a stage has ended"
    assert [line for line in err if line] == [
        f"hetpipe: virtual worker 1 (process {child.pid}) is lost: it {how}; the others go on without it.",
        f"hetpipe: this run went on without virtual worker 1, which {how}.",
    ]


def test_the_first_one_of_a_node_that_ends_alone_says_so_at_once(meeting: Meeting, first: Process) -> None:
    first.ask("stand_behind", 1)
    meeting.launched(first)
    first.order("lack")
    code, _, err = meeting.ends()
    assert code == 1
    assert stated(err) == [
        "hetpipe: virtual worker 1 is lost: it was unable to go on, as the process of a stage has ended; the others go"
        " on without it."
    ]


@pytest.mark.parametrize("ending", ["return", "fail", "leave"])
def test_a_loss_that_the_servers_tell_of_ends_in_one(ending: str, meeting: Meeting, first: Process) -> None:
    """Processes that torchrun or the like had started said nothing, and the exit code was 0."""
    first.ask("be_started_elsewhere")
    assert first.ask("launch", 3) == {"did": "launched"}
    for _ in range(2):  # in the room of the launch, and in that of the fit
        assert first.ask("lose", 1) == {"did": "lose"}
    if ending == "leave":  # the program was told by an exception, and makes what it likes of it
        assert first.ask("leave") == {"left": True}
        first.ask("return")
    else:
        first.order(ending)
        if ending == "return":
            first.hear()
            first.ask("return")
    code, _, err = meeting.ends()
    assert code == {"return": 1, "fail": 1, "leave": 0}[ending]
    said = ["hetpipe: virtual worker 1 is lost."]
    if ending == "return":
        said.append("hetpipe: this run went on without virtual worker 1, which was silent for long.")
    assert stated(err) == said


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux's kernel tells children that their parent has ended")
def test_a_child_that_still_imports_ends_with_its_parent(meeting: Meeting, tmp_path: Path) -> None:
    """It went on importing torch, for half a minute on a busy machine, and then said what it thought of its end."""
    first = meeting.run(LATE, meeting.address, "imports", folder=tmp_path)
    first.order("launch", 2)
    child = meeting.meet()
    assert child.facts["imports"]
    first.signal(signal.SIGKILL)
    assert child.ended() == []
    code, _, err = meeting.ends()
    assert (code, err) == (-signal.SIGKILL, [])


def test_a_child_outlives_the_thread_that_launched_it(meeting: Meeting, tmp_path: Path) -> None:
    """The kernel watches a thread, not a process."""
    first = meeting.run(LATE, meeting.address, "imports", folder=tmp_path)
    assert first.ask("launch_in_a_thread", 2) == {"extra": True}
    assert first.hear() == {"did": "launched"}
    imports = meeting.meet()
    assert first.ask("return") == {"did": "return"}
    assert first.hear() == {"did": "launch_in_a_thread"}
    imports.release()
    child = meeting.meet()
    assert child.ask("launch", 2) == {"did": "launched"}
    for process in (child, first):
        if process is child:
            process.ask("return")
        process.order("return")
    assert meeting.ends()[0] == 0


@pytest.mark.parametrize("fails", [False, True])
def test_what_children_used_is_closed_while_their_interpreters_are_taken_down(
    meeting: Meeting, tmp_path: Path, fails: bool
) -> None:
    """One after the other took seconds: each has torch's and Lightning's million objects."""
    first = meeting.run(LATE, meeting.address, "ends", folder=tmp_path)
    _, child = meeting.launched(first)
    if fails:
        first.order("fail")
    else:
        for process in (child, child, first, first):
            process.order("return")
    ends = meeting.meet()
    assert ends.facts["ends"]
    assert bool(ends.facts["frozen"]) == fails, "after a failure there is no last search for garbage"
    while first.hear() != {"closed": True}:
        pass
    assert not select.select([first.connection], [], [], 0.5)[0], "it ended before its child"
    ends.release()
    code, _, err = meeting.ends()
    assert (code, stated(err)) == (1 if fails else 0, [])
