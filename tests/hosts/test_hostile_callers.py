"""Hostile callers of hosts while stages compute there: same bits, nothing grows, few lines say who."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, cast

import lightning as L
import pytest

from lightning_hetpipe.hosts.host_server import MOST_ASKING
from lightning_hetpipe.hosts.secured_socket import (
    RELEASE,
    Door,
    Refused,
    admit,
    connect,
    hear,
    listen,
)
from lightning_hetpipe.server.transport.security import Security
from tests.exact.running import assert_equal, expect, fit
from tests.hosts.elsewhere import Hosts, serving
from tests.hosts.limited_host import DESCRIPTORS
from tests.hosts.test_other_machines import apart, task
from tests.server.storm import shout, tuple_of
from tests.server.test_storm import knock, security_in
from tests.server.transports import PATIENCE, certificates, eventually
from tests.support.certificates import make
from tests.support.models import vectors
from tests.support.process_use import Use

TOKEN = {"HETPIPE_TOKEN": "one"}


class Annoys(L.Callback):
    """Calls something before the training is set up, and after each of the first minibatches."""

    def __init__(self, annoy: Callable[[], None], times: int = 3) -> None:
        self.annoy, self.times = annoy, times

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.annoy()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step <= self.times:
            self.annoy()


def told(**message: Any) -> bytes:
    text = json.dumps(message).encode()
    return len(text).to_bytes(4) + text


def messages(chance: random.Random) -> list[bytes]:
    """Garbage, oversize, truncated, of another token and of another release."""
    right = told(token="one", release=RELEASE)
    return [
        chance.randbytes(chance.randrange(1, 4000)),
        b"GET / HTTP/1.0\r\n\r\n",
        (1 << 31).to_bytes(4) + bytes(1000),
        (60_000).to_bytes(4) + b"[" * 60_000,
        right[: chance.randrange(1, len(right))],
        told(token="other", release=RELEASE),
        told(token="one", release="lightning_hetpipe 0.0.9 with torch 2.0"),
        told(token=["one"], release={}),
        told(),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + chance.randbytes(500),
    ]


def check_training(hosts: Hosts, annoy: Callable[[], None], monkeypatch: pytest.MonkeyPatch, **known: str) -> None:
    """A training with stages at ``hosts`` has the bits of the oracle."""
    for name, value in {**TOKEN, **known}.items():
        monkeypatch.setenv(name, value)
    expected = expect(task(), vectors(40, 4), 3)
    found = fit(task(), vectors(40, 4), [Annoys(annoy)], strategy=apart(hosts, "attic", "attic", "desk"))
    assert_equal(expected, found)


def check_nothing_grows(hosts: Hosts, annoy: Callable[[], None], monkeypatch: pytest.MonkeyPatch, **known: str) -> None:
    """Nor does such a training leave anything."""
    shout(hosts.address, b"\xff" * 9)  # which is closed once it takes callers
    before = Use.of(hosts.process.pid)
    check_training(hosts, annoy, monkeypatch, **known)
    eventually(lambda: not hosts.children(), "a host has not ended")
    eventually(lambda: Use.of(hosts.process.pid).descriptors <= before.descriptors, "descriptors stay")
    eventually(lambda: Use.of(hosts.process.pid).threads <= before.threads, "threads stay")
    assert Use.of(hosts.process.pid).memory < before.memory + (8 << 20)


@pytest.mark.parametrize("count", [10, pytest.param(100, marks=pytest.mark.slow)], ids=["short", "long"])
def test_messages_of_every_kind(count: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Each costs a bare interpreter for a moment; each cost a process that had imported torch."""
    chance = random.Random(0)
    with serving(TOKEN) as hosts, ThreadPoolExecutor(4) as pool:

        def annoy() -> None:
            sent = [chance.choice(messages(chance)) for _ in range(count)]
            sent[:10] = messages(chance)
            [*pool.map(lambda data: shout(hosts.address, data), sent)]

        check_nothing_grows(hosts, annoy, monkeypatch)
    said = [line.partition(" (since")[0] for line in capfd.readouterr().err.splitlines() if "turned away" in line]
    for why in (
        "HETPIPE_TOKEN is another one there; set the same one for both",
        "it speaks another protocol",
        f"it is of release {RELEASE}, and the caller of lightning_hetpipe 0.0.9 with torch 2.0; install",
    ):
        assert any(line.startswith(f"hetpipe-host: turned away 127.0.0.1: {why}") for line in said), (why, said)
    if count == 10:
        assert max(Counter(said).values()) == 1, said


def test_silent_connections_up_to_the_descriptor_limit(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A leader is let in while they last, and they start no process."""
    with serving(TOKEN, "tests.hosts.limited_host") as hosts, ExitStack() as flood:

        def annoy() -> None:
            for _ in range(DESCRIPTORS):
                flood.enter_context(socket.create_connection(tuple_of(hosts.address), PATIENCE))
            assert len(hosts.children()) <= 2

        check_training(hosts, annoy, monkeypatch)
        assert Use.of(hosts.process.pid).descriptors < DESCRIPTORS
    said = [line for line in capfd.readouterr().err.splitlines() if "turned away" in line]
    assert said == ["hetpipe-host: turned away 127.0.0.1: it has connected and said nothing"]


def test_who_begins_to_speak_and_goes_on_no_further() -> None:
    """Few processes ask at a time, and others wait for their turn."""
    with serving(TOKEN) as hosts, ExitStack() as slow:
        for _ in range(MOST_ASKING + 10):
            slow.enter_context(socket.create_connection(tuple_of(hosts.address), PATIENCE)).sendall(b"\0")
        eventually(lambda: len(hosts.children()) == MOST_ASKING, "as many ask as may")
        asking = Use.of(hosts.process.pid)
        slow.close()
        eventually(lambda: not hosts.children(), "a process is left")
        eventually(lambda: Use.of(hosts.process.pid).descriptors < asking.descriptors, "descriptors stay")
        raw, _ = connect(hosts.address, Security(token="one"), PATIENCE)
        raw.close()


def test_wrong_and_expired_certificates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ours, expired, theirs = certificates(), tmp_path / "expired", tmp_path / "theirs"
    shutil.copytree(ours, expired)
    make(expired, days=0)
    make(theirs)
    known = {f"HETPIPE_{name.upper()}": str(ours / f"{name}.pem") for name in ("ca", "certificate", "key")}
    with serving({**TOKEN, **known}) as hosts:

        def annoy() -> None:
            for shown in (security_in(expired), security_in(theirs, ours / "ca.pem"), None):
                knock(hosts.address, shown, 2)
            for shown in (security_in(expired), security_in(theirs, ours / "ca.pem")):
                with pytest.raises((Refused, ssl.SSLError, OSError)):
                    connect(hosts.address, shown, PATIENCE)
            shout(hosts.address, told(token="one", release=RELEASE))

        check_nothing_grows(hosts, annoy, monkeypatch, **known)
    said = [line for line in capfd.readouterr().err.splitlines() if "turned away" in line]
    assert 2 <= len(said) == len({*said}), said
    assert all("certificate" in line for line in said), said


def test_who_sends_byte_after_byte_is_not_heard_for_ever() -> None:
    """Each byte came within the time that all of them may take."""
    ours, theirs = socket.socketpair()
    over = threading.Event()

    def drip() -> None:
        with suppress(OSError):
            theirs.sendall((1000).to_bytes(4))
            while not over.wait(0.05):
                theirs.sendall(b" ")

    with listen("127.0.0.1", 0) as listener:
        ours.close()
        theirs.close()
        theirs = socket.create_connection(listener.getsockname())
        raw, _ = listener.accept()
    dripping = threading.Thread(target=drip, name="test-drip", daemon=True)
    dripping.start()
    with theirs, raw:
        with pytest.raises(TimeoutError, match=r"it has not shown who it is within 0\.5 s"):
            admit(raw, Security(token="one"), 0.5)
        over.set()
        dripping.join(PATIENCE)


def test_what_is_nested_too_deep_is_another_protocol() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall((60_000).to_bytes(4) + b"[" * 60_000)
        with pytest.raises(Refused, match="it speaks another protocol"):
            hear(ours)


def test_connections_are_taken_again_after_there_was_no_descriptor() -> None:
    """Nobody could come any more."""

    class Listener:
        errors = [errno.EMFILE, errno.ECONNABORTED, 0, errno.ENFILE, 0, errno.EINVAL]  # noqa: RUF012  # is used once

        def accept(self) -> tuple[Any, tuple[str, int]]:
            if code := self.errors.pop(0):
                raise OSError(code, os.strerror(code))
            return socket.socket(), ("10.0.0.1", 5)

    taken = list[str]()
    Door(cast(Any, Listener()), lambda _, host: taken.append(host), 2, "test-taking").open()
    eventually(lambda: taken == ["10.0.0.1"] * 2, "it does not go on")
    with listen("127.0.0.1", 0) as listener:
        door = Door(listener, lambda raw, _: None, 1, "test-taking")
        door.open()
        door.close()
        eventually(lambda: all(each.name != "test-taking" for each in threading.enumerate()), "it still takes some")
