"""Certificates by the commands of docs/several-machines.md."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

_DOCUMENT = (Path(__file__).parents[2] / "docs" / "several-machines.md").read_text()
AUTHORITY, CERTIFICATE = re.findall(
    r"^```bash\n# (?:once|for the hosts)\n(.*?)^```", _DOCUMENT, re.MULTILINE | re.DOTALL
)
"""Commands that make an authority with a token, and a certificate; both in the folder ``secrets``."""


def make(folder: Path, names: Sequence[str] = ("IP:127.0.0.1", "DNS:localhost"), days: int = 2) -> None:
    """Make a certificate for ``names`` in ``folder``, and an authority if the folder has none."""
    commands = ("" if (folder / "ca.key").exists() else AUTHORITY) + CERTIFICATE
    for documented, ours in (
        ("IP:10.0.0.1,IP:10.0.0.2", ",".join(names)),
        ("-days 365 ", f"-days {days} "),
        ("secrets", shlex.quote(str(folder))),
    ):
        assert documented in commands
        commands = commands.replace(documented, ours)
    subprocess.run(["bash", "-euc", commands], check=True, capture_output=True, timeout=60)
