"""Ctrl-C while a console script loads its modules, which takes seconds."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lightning_hetpipe.cli import start_up

PROGRAM = """
import sys
import lightning_hetpipe.cli.start_up
print(*{name.partition(".")[0] for name in sys.modules})
"""


@pytest.mark.parametrize("script", ["train", "plan", "server", "host"])
def test_an_interrupt_while_modules_load(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(start_up, "import_module", interrupted)
    with pytest.raises(SystemExit) as end:
        getattr(start_up, script)()
    assert end.value.code == 130
    assert capsys.readouterr().err == f"\nhetpipe-{script}: interrupted.\n"


def test_it_loads_nothing_itself() -> None:
    """Else an interrupt would come before it is there."""
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True)
    assert not {"torch", "lightning", "hydra", "omegaconf"} & set(run.stdout.split())
