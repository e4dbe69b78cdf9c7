"""hetpipe-certificates: a folder by which machines let each other in, and nobody else."""

from __future__ import annotations

import shutil
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lightning_hetpipe.cli.hetpipe_certificates import main
from lightning_hetpipe.hosts.secured_socket import Refused, admit, connect
from lightning_hetpipe.server.transport.security import Security

NAMES = ["ca.key", "ca.pem", "certificate.pem", "hetpipe.sh", "key.pem"]

pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="certificates are made with the program openssl, which is not installed"
)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    quiet = ["hydra/job_logging=none", "hydra/hydra_logging=none"]  # the process's logging stays as it is
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["hetpipe-certificates", *arguments, *quiet])
    main()


def sourced(folder: Path) -> Security:
    """The security of a program in a shell that has read the script."""
    names = ("CA", "CERTIFICATE", "KEY", "TOKEN")
    shown = " ".join(f'"$HETPIPE_{name}"' for name in names)
    script = f"source {folder.name}/hetpipe.sh; printf '%s\\n' {shown}"
    said = subprocess.run(
        ["bash", "-ec", script], cwd=folder.parent, capture_output=True, text=True, check=True, timeout=30
    ).stdout.split("\n")
    return Security(ca=said[0], certificate=said[1], key=said[2], token=said[3])


def meets(ours: Security, theirs: Security, host: str = "127.0.0.1") -> str | None:
    """Why one process does not let another one in, at ``host``; None if it does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        its: list[str] = []

        def answer() -> None:
            raw, _ = listener.accept()
            with raw:
                try:
                    admit(raw, theirs, "release", 20.0)
                except (Refused, OSError) as why:
                    its.append(str(why))

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            connect(f"{host}:{listener.getsockname()[1]}", ours, "release", 20.0)[0].close()
        except (Refused, OSError) as why:
            its.append(str(why))
        thread.join()
    return " ".join(its) or None


def test_machines_with_the_folder_let_each_other_in(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "hosts=[127.0.0.1,localhost]")
    folder = here / "secrets"
    assert "secrets has a new certificate for 127.0.0.1, localhost, for 365 days" in capsys.readouterr().out
    assert sorted(path.name for path in folder.iterdir()) == NAMES
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    security = sourced(folder)
    assert len(security.token or "") == 64
    assert meets(security, security) is meets(security, security, "localhost") is None
    run(monkeypatch, "hosts=[10.0.0.9]", "folder=others")
    other = sourced(here / "others")
    assert "certificates do not fit" in str(meets(other, security))
    shutil.copytree(folder, here / "moved")
    assert meets(sourced(here / "moved"), security) is None


def test_another_call_keeps_the_authority_and_the_token(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "hosts=[127.0.0.1]")
    shutil.copytree(here / "secrets", here / "older")
    older = sourced(here / "older")
    run(monkeypatch, "hosts=[127.0.0.1,'[::1]',node2.lab]", "days=2")
    assert "for 2 days, of the authority that was there" in capsys.readouterr().out
    newer = sourced(here / "secrets")
    assert newer.token == older.token
    assert meets(older, newer) is meets(newer, older) is None
    command = ["openssl", "x509", "-in", "secrets/certificate.pem", "-noout", "-ext", "subjectAltName"]
    named = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    assert "IP Address:127.0.0.1, IP Address:0:0:0:0:0:0:0:1, DNS:node2.lab" in named


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "hosts=[] names no machine"),
        (["hosts=[]"], "hosts=[] names no machine"),
        (["hosts=[10.0.0.1:7070]"], "hosts has '10.0.0.1:7070', which is no address and no name"),
        (["hosts=[10.0.0]"], "hosts has '10.0.0', which is no address and no name"),
        (["hosts=['a,DNS:b']"], "which is no address and no name"),
        (["hosts=[a]", "days=0"], "days=0 must be from 1 to 36500"),
        (["hosts=[a]", "folder=file/in"], "cannot be written"),
        (["hosts=[a]", "dayz=3"], "dayz"),
        (["hosts=10.0.0.1"], "hosts=10.0.0.1"),
    ],
)
def test_wrong_settings(
    arguments: list[str], message: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "file").touch()
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, *arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in here.iterdir()] == ["file"]


def test_openssl_is_missing(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", str(here))
    with pytest.raises(SystemExit):
        run(monkeypatch, "hosts=[a]")
    assert "the program openssl, which is not installed; install it" in capsys.readouterr().err
