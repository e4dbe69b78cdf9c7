"""A server that dies is started again, not for ever, and not after it was told to end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from queue import SimpleQueue

import pytest

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.server.process import server_process
from lightning_hetpipe.server.process.server_process import STARTS, WINDOW, ServerProcess, Supervisor, pause
from tests.server.transports import PATIENCE, eventually

Heard = SimpleQueue[str]


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch) -> Heard:
    """Queue of the sentences of supervisors, which look often and restart at once."""
    heard, known = Heard(), pause

    def no_pause(ends: Sequence[float], now: float) -> float | None:
        return None if known(ends, now) is None else 0.0

    monkeypatch.setattr(server_process, "_LOOK", 0.01)
    monkeypatch.setattr(server_process, "pause", no_pause)
    monkeypatch.setattr(server_process, "say", heard.put)
    return heard


class Mortal(ServerProcess):
    """Starts as ``starts`` says, in read_lease: None: well. Runs until `die`."""

    def __init__(self, starts: Sequence[Exception | None]) -> None:
        super().__init__("nothing:Here", address="127.0.0.1:1")
        self.starts = list(starts)
        self.stopped = False
        self.started = threading.Semaphore(0)
        self._died: int | None = None

    def start(self, unwanted: threading.Event | None = None) -> None:
        if (error := self.starts.pop(0)) is not None:
            raise error
        self._died = None
        self.started.release()

    def stop(self) -> None:
        self.stopped = True

    def die(self, number: signal.Signals) -> None:
        assert self.started.acquire(timeout=PATIENCE)
        self._died = -number

    @property
    def code(self) -> int | None:
        return self._died


def test_it_is_started_again_and_that_is_said(heard: Heard) -> None:
    server = Mortal([None, None, SettingError("address=127.0.0.1:1 cannot be had."), None])
    with Supervisor(server) as supervisor:
        server.die(signal.SIGKILL)
        what = heard.get(timeout=PATIENCE)
        assert what.startswith("the parameter server died by SIGKILL and was started again; training goes on")
        server.die(signal.SIGSEGV)  # and then somebody has its port for a while
        assert "died by SIGSEGV and was started again" in heard.get(timeout=PATIENCE)
    assert server.stopped
    assert heard.empty()
    assert supervisor.failure is None


@pytest.mark.parametrize("dies", [True, False])
def test_one_that_dies_again_and_again_is_given_up(dies: bool, heard: Heard) -> None:
    fails = RuntimeError("The server's process ended before it served.")
    server = Mortal([None] * (STARTS + 1) if dies else [None] + [fails] * STARTS)
    with Supervisor(server) as supervisor:
        for _ in range(STARTS if dies else 0):
            server.die(signal.SIGKILL)
            assert "was started again" in heard.get(timeout=PATIENCE)
        server.die(signal.SIGKILL)
        eventually(lambda: supervisor.failure is not None, "the server is not given up")
    why = "died by SIGKILL" if dies else "could not be started again (The server's process ended before it served)"
    assert str(supervisor.failure) == f"the parameter server at 127.0.0.1:1 has failed {STARTS + 1} times: it {why}"
    assert server.starts == []


def test_what_ends_because_it_was_told_to_is_not_started_again(heard: Heard) -> None:
    server = Mortal([None])
    supervisor = Supervisor(server)
    with supervisor:
        pass
    server.die(signal.SIGTERM)
    assert server.stopped
    assert heard.empty()
    assert supervisor.failure is None


def test_pauses_grow_and_ends_are_forgotten() -> None:
    found = [pause([float(end) for end in range(number)], 10.0) for number in range(1, STARTS + 2)]
    assert found == [0.0, 0.5, 1.0, 2.0, 4.0, None]
    assert pause([0.0] * STARTS + [WINDOW], WINDOW) == 0.0
