"""The README's own example runs as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text()


def blocks() -> dict[str, str]:
    """The README's code blocks that are files: those that begin with a comment that is a path.

    Hydra wants its own comment, `# @package`, above it.
    """
    found = re.findall(r"^```\w+\n((?:# @.*\n)?# (\S+\.(?:py|yaml))\n.*?)^```", README, re.MULTILINE | re.DOTALL)
    return {path: text for text, path in found}


def test_a_model_of_ones_own_trains_from_the_command_line(tmp_path: Path) -> None:
    assert set(blocks()) == {"my_model.py", "mine/experiment/mine.yaml"}
    for path, text in blocks().items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    (command,) = re.findall(r"^    hetpipe-train (--config-dir .*)$", README, re.MULTILINE)
    run = subprocess.run(
        [sys.executable, "-m", "lightning_hetpipe.cli.hetpipe_train", *command.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert run.returncode == 0, run.stderr
    assert "Trained as a pipeline of 2 stages, 3 minibatches in flight" in run.stdout
    accuracy = re.search(r"test accuracy +([\d.]+)%", run.stdout)
    assert accuracy is not None
    assert float(accuracy[1]) > 80  # two thirds of the points would be right by always saying no


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\(((?!http)[^)]+)\)", README))))
def test_the_links_lead_somewhere(path: str) -> None:
    assert (Path(__file__).parents[2] / path).exists()
