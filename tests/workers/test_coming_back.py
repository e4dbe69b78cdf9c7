"""The return of a virtual worker at the coordinator: what it is answered before it has a seat, and how it gets one."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_hetpipe import WSPCallback
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.server.process.client import Client
from lightning_hetpipe.server.protocol.identifiers import Refusal, RemoteFault
from lightning_hetpipe.server.protocol.messages import Recall
from lightning_hetpipe.workers.seats import STATE, CameTooLate, SeatMissed
from tests.workers.test_group import LEASE, SECONDS, Pair, close, group_of
from tests.wsp.faults import until

NAMED = [("p0", torch.full((3,), 1.0))]
CUT = 7


@pytest.fixture
def exits() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


class Lost(Pair):
    """A pair whose second virtual worker is lost, after both have begun the first epoch of a fit."""

    def __init__(self, exits: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(exits, monkeypatch)
        self.found[1] = replace(self.found[1], hosts=False)
        self.groups[1]._found = self.found[1]  # which does not wait for others then that need its server
        self.both("gather", lambda index: (torch.ones(9), "the exchange of buffers"))
        self.both("gather", lambda index: (index, "a broadcast"))
        self.enter_fit(1.0)
        self.both("begin_epoch", lambda index: ())
        self.both("agree", lambda index: (index, "the choice of in_flight"))
        self.groups[1].part("", alone=True)
        self.again = group_of(1, 2, self.found[1], WSPCallback(lease=LEASE).settings)
        self.back: list[int] = []
        self.groups[0]._on_return = self.back.append

    def comes(self) -> Future[Any]:
        """Have the lost one come back, until it is ready; gives its entry into the fit, which is to come."""
        self.again.open()
        entered = self.threads.submit(self.again.enter_fit, NAMED, ())
        until(lambda: bool(self.groups[0].seats.ready()), "it does not come")
        return entered

    def both(self, method: str, arguments: Any) -> None:
        calls = [self.threads.submit(getattr(each, method), *arguments(each.index)) for each in self.groups]
        for call in calls:
            call.result(SECONDS)


def state(folder: Path) -> Path:
    """A checkpoint for whoever comes back."""
    saved = folder / "state.ckpt"
    saved.write_bytes(b"state")
    return saved


def test_it_is_answered_from_the_record_until_it_has_a_seat(
    exits: ExitStack, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lost = Lost(exits, monkeypatch)
    first, again = lost.groups[0], lost.again
    again.open()
    returning = again.seats.returning
    assert returning is not None
    assert again.gather("mine", "strategy.barrier('x')") == [None, None], "nobody waits for it"
    assert again.gather("mine", "a broadcast") == [0, 1]
    assert [what for what, _ in returning.record.gathers] == ["the list of servers", "a broadcast"], "and no tensors"
    with pytest.raises(SettingError, match="comes back, and calls all_gather before it takes part"):
        again.gather("mine", "all_gather")
    entered = lost.threads.submit(again.enter_fit, NAMED, ())
    until(lambda: bool(first.seats.ready()), "it does not come")
    saved = tmp_path / "state.ckpt"
    saved.write_bytes(b"state" * 5)
    assert first.readmit(first.seats.ready(), saved, CUT) == [1]
    assert [each.tolist() for each in entered.result(SECONDS)] == [[1.0] * 3]
    assert returning.checkpoint.read_bytes() == saved.read_bytes()
    assert lost.back == [1]
    assert again._launch is not None
    again._launch.kept.leave_again()  # as when the coordinator is started again
    assert first.seats.ready() == {}, "it is not ready to come back once more"
    lost.groups[1] = again
    again.take_part()
    lost.both("begin_epoch", lambda index: ())
    assert again.seats.returning is None
    assert again.agree("other", "the choice of in_flight") == [0, 1]
    lost.both("gather", lambda index: (index, "the end of an epoch"))
    lost.close()


def test_one_that_asks_for_a_seat_too_late_may_be_started_again(
    exits: ExitStack, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The others went on without it, and it waited for the next one to come back, or the end of the run."""
    monkeypatch.setattr("lightning_hetpipe.workers.join_handshake.LEASES_FOR_A_SEAT", 0.5)
    lost = Lost(exits, monkeypatch)
    first, again = lost.groups[0], lost.again
    entered = lost.comes()
    saved = state(tmp_path)
    first.seats.offer(first.seats.ready(), saved, first.check)  # and no cut
    with pytest.raises(SeatMissed, match="it had no seat when they went on") as missed:
        entered.result(SECONDS)
    assert missed.value.may_return
    first.check()
    again.part(why=missed.value.how)
    close(first)


def test_one_that_comes_to_a_later_cut_than_that_of_its_state_has_no_seat(
    exits: ExitStack, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lost = Lost(exits, monkeypatch)
    first, again = lost.groups[0], lost.again
    entered = lost.comes()
    saved = state(tmp_path)
    first.seats.offer(first.seats.ready(), saved, first.check)  # and no cut
    saved.write_bytes(b"")
    assert first.readmit({}, saved, CUT) == []
    assert list(first.seats.taken) == [0]
    with pytest.raises(SeatMissed, match="it had no seat when they went on") as missed:
        entered.result(SECONDS)
    again.part(why=missed.value.how)
    assert first.gather("alone", "a test") == ["alone"]
    close(first)


def test_one_that_is_left_out_while_it_comes_back_may_come_once_more(
    exits: ExitStack, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It had its seat, and was silent for a lease before it knew: it is refused as one that was left out."""
    lost = Lost(exits, monkeypatch)
    first, again = lost.groups[0], lost.again

    def silent(*_: Any) -> None:
        raise RemoteFault(Refusal.LEFT_OUT, "VW 1 was silent for longer than its lease")

    entered = lost.comes()
    saved = state(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(Client, "join", silent)
        first.seats.offer(first.seats.ready(), saved, first.check)
        with pytest.raises(RemoteFault, match="was silent for longer") as caught:
            entered.result(SECONDS)
    assert caught.value.refusal is Refusal.LEFT_OUT
    again.part(why="it was left out")
    first.check()
    close(first)


def test_the_seat_of_one_that_lives_is_not_taken(exits: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number was given to two processes."""
    pair = Pair(exits, monkeypatch)
    other = group_of(1, 2, replace(pair.found[1], hosts=False), WSPCallback(lease=LEASE).settings)
    with pytest.raises(SettingError, match="virtual worker 1 takes part already, in another process that lives"):
        other.open()
    calls = [pair.threads.submit(each.gather, each.index, "a test") for each in pair.groups]
    assert [call.result(SECONDS) for call in calls] == [[0, 1]] * 2
    closed = [pair.threads.submit(close, each) for each in pair.groups]
    assert [call.result(SECONDS) for call in closed] == [None] * 2


def test_a_failure_of_one_that_comes_back_is_its_own(exits: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as of its program, before it trains: all ended."""
    lost = Lost(exits, monkeypatch)
    lost.again.open()
    lost.again.part("SettingError: a wrong setting")
    assert lost.groups[0].gather("alone", "a test") == ["alone"]
    lost.groups[0].check()
    close(lost.groups[0])


def test_others_do_not_wait_for_one_that_does_not_ask(
    exits: ExitStack, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It was ready, and has died since: they wait for a lease."""
    lost = Lost(exits, monkeypatch)
    first, again = lost.groups[0], lost.again
    again.open()
    assert again.seats.returning is not None
    launch = again._launch
    assert launch is not None
    launch.ask(Recall(1, launch.member.incarnation, STATE))
    saved = state(tmp_path)
    assert first.readmit(first.seats.ready(), saved, CUT) == []
    assert list(first.seats.taken) == [0]
    again.part("", alone=True)
    close(first)


def test_nobody_comes_back_to_a_fit_that_is_over(exits: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = Lost(exits, monkeypatch)
    lost.groups[0].leave_fit()
    with pytest.raises(CameTooLate, match="virtual worker 1 comes back to a run whose training is over"):
        lost.again.open()
    assert lost.groups[0].gather("alone", "a test") == ["alone"], "nobody waits for it"
    close(lost.groups[0])


def test_one_that_is_ready_when_the_fit_ends_ends_as_well(exits: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waited for a next epoch, and whatever the others did next, such as a test, waited for it."""
    lost = Lost(exits, monkeypatch)
    first, again = lost.groups[0], lost.again
    entered = lost.comes()
    first.leave_fit()
    with pytest.raises(CameTooLate, match="training is over") as late:
        entered.result(SECONDS)
    again.part(why=late.value.how)
    assert first.gather("alone", "a test") == ["alone"]
    close(first)


def test_settings_other_than_the_others_are_named(exits: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares may have changed since."""
    lost = Lost(exits, monkeypatch)
    lost.again.open()
    returning = lost.again.seats.returning
    assert returning is not None
    returning.record.settings = ["wave=1", "shares=equal"]
    returning.check("fit-1", ["wave=1", "shares=auto"])
    with pytest.raises(SettingError, match="virtual worker 1 comes back with wave=2 to a run that has wave=1"):
        returning.check("fit-1", ["wave=2", "shares=equal"])
    with pytest.raises(CameTooLate, match="only to the first fit of a program one can come back"):
        returning.check("fit-2", ["wave=1", "shares=equal"])
    lost.again.part("", alone=True)
    close(lost.groups[0])
