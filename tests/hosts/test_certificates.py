"""The documented commands of openssl: a folder by which machines let each other in, and nobody else."""

from __future__ import annotations

import shutil
import socket
import stat
import subprocess
import threading
from pathlib import Path

import pytest

from lightning_hetpipe.hosts.secured_socket import Refused, admit, connect
from lightning_hetpipe.server.transport.security import Security
from tests.support.certificates import make

pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="the documented commands need the program openssl, which is not installed"
)


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
                    admit(raw, theirs, 20.0)
                except (Refused, OSError) as why:
                    its.append(str(why))

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            connect(f"{host}:{listener.getsockname()[1]}", ours, 20.0)[0].close()
        except (Refused, OSError) as why:
            its.append(str(why))
        thread.join()
    return " ".join(its) or None


def test_machines_with_the_folder_let_each_other_in(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    make(folder)
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    security = sourced(folder)
    assert len(security.token or "") == 64
    assert meets(security, security) is meets(security, security, "localhost") is None
    make(tmp_path / "others", ["IP:10.0.0.9"])
    assert "certificates do not fit" in str(meets(sourced(tmp_path / "others"), security))
    shutil.copytree(folder, tmp_path / "moved")
    assert meets(sourced(tmp_path / "moved"), security) is None


def test_a_further_certificate_is_of_the_same_authority(tmp_path: Path) -> None:
    make(tmp_path / "secrets")
    shutil.copytree(tmp_path / "secrets", tmp_path / "older")
    older = sourced(tmp_path / "older")
    make(tmp_path / "secrets", ["IP:127.0.0.1", "IP:::1", "DNS:node2.lab"])
    newer = sourced(tmp_path / "secrets")
    assert newer.token == older.token
    assert meets(older, newer) is meets(newer, older) is None
