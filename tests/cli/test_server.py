"""hetpipe-server: serves until a signal, and prints the status of a running server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_hetpipe.cli.hetpipe_server import laid_out, main
from lightning_hetpipe.server.transport.grpc_server import GrpcServer
from lightning_hetpipe.server.transport.interface import Reply
from lightning_hetpipe.server.transport.security import Security
from tests.server.transports import PATIENCE, Desk
from tests.support import forks

SAID = {
    "epoch": "ab\x1b[2J",
    "slowest": 3,
    "weights_bytes": 5 << 20,
    "members": [{"vw": 0, "clock": 4, "lag": 1}, {"vw": 1, "clock": 3, "lag": 0, "waits_at": None}],
    "memory": {"staged_bytes": 12, "full": False},
}


class Telling(Desk):
    """Answers ``status``."""

    said: object = SAID

    def __init__(self, lease: float = 30, log: str | None = None) -> None:
        super().__init__()

    def run(self, method: str, header: bytes, body: memoryview) -> Reply:
        return Reply(json.dumps(self.said).encode())


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    quiet = ["hydra/job_logging=none", "hydra/hydra_logging=none"]  # the process's logging stays as it is
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["hetpipe-server", *arguments, *quiet])
    main()


def test_the_layout_shows_every_field_and_commands_no_terminal() -> None:
    assert laid_out(SAID).splitlines() == [
        "epoch          ab?[2J",
        "slowest        3",
        "weights bytes  5.0 MiB",
        "",
        "members",
        "  vw  clock  lag  waits at",
        "   0      4    1         -",
        "   1      3    0         -",
        "",
        "memory",
        "  staged bytes  12 bytes",
        "  full          no",
    ]


def test_status_of_a_running_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HETPIPE_TOKEN", "open-sesame")
    with GrpcServer(Telling(), security=Security(token="open-sesame")) as server:
        run(monkeypatch, "status", f"address={server.address}")
        assert capsys.readouterr().out.startswith("epoch ")
        monkeypatch.setenv("HETPIPE_TOKEN", "open-barley")
        with pytest.raises(SystemExit, match="1"):
            run(monkeypatch, "status", f"address={server.address}")
    with pytest.raises(SystemExit, match="1"):
        run(monkeypatch, "status", f"address={server.address}", "timeout=5")
    refused, gone = capsys.readouterr().err.splitlines()
    assert refused.endswith("the token is missing or wrong; give the server's as HETPIPE_TOKEN")
    assert gone.startswith(f"hetpipe-server: the server at {server.address} cannot be reached (unavailable: ")
    assert not [*tmp_path.iterdir()]


def test_an_answer_that_is_no_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    desk = Telling()
    desk.said = ["no", "object"]
    with GrpcServer(desk) as server, pytest.raises(SystemExit, match="1"):
        run(monkeypatch, "status", f"address={server.address}")
    assert "answered with no status" in capsys.readouterr().err


def test_a_port_that_is_in_use(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HETPIPE_TOKEN", "open-sesame")
    with GrpcServer(Telling()) as server, pytest.raises(SystemExit, match="2"):
        run(monkeypatch, f"address={server.address}", "service._target_=tests.cli.test_server.Telling")
    said = capsys.readouterr().err
    assert said.startswith(f"hetpipe-server: address={server.address} cannot be had: another program has the port, or")
    assert "give another, with port 0 for any free one." in said


LOADED = """
import sys
from lightning_hetpipe.cli.hetpipe_server import main
try:
    main()
finally:
    print(sorted({name.partition(".")[0] for name in sys.modules} & {"lightning", "torchmetrics", "grpc"}))
"""


@pytest.mark.parametrize(
    ("arguments", "loaded"), [(["--help"], []), (["status", "address=127.0.0.1:1", "timeout=1"], ["grpc"])]
)
def test_no_lightning_is_loaded(tmp_path: Path, arguments: list[str], loaded: list[str]) -> None:
    """Through code that all commands share it was, and a server took three seconds to start."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = forks.run("-c", LOADED, *arguments, loaded="libraries", cwd=tmp_path, environment=environment)
    assert done.stdout.splitlines()[-1] == str(loaded), done.stderr


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_a_signal_ends_it(tmp_path: Path, number: signal.Signals, code: int) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    environment.pop("HETPIPE_TOKEN", None)
    command = [sys.executable, "-m", "lightning_hetpipe.cli.hetpipe_server", "address=127.0.0.1:0"]
    with subprocess.Popen(
        [*command, "service._target_=tests.cli.test_server.Telling"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None
        assert server.stdout.readline().startswith("hetpipe-server: serving 127.0.0.1:")
        server.send_signal(number)
        assert server.wait(PATIENCE) == code
        assert server.stderr is not None
        assert len(warned := server.stderr.read().splitlines()) == 1
        assert warned[0].startswith("hetpipe-server: HETPIPE_TOKEN is not set, so that any user of this machine may")
    assert not [*tmp_path.iterdir()]
