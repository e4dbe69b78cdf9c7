"""The comparison of Lightning's own tests, on a suite of four tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.lightning_suite import compare, files

SUITE = """
import os

def test_that_passes():
    pass

def test_that_passes_plainly():
    assert "PL_TRAINER_STRATEGY" not in os.environ, "it was our strategy"

def test_that_fails():
    assert False

def test_that_ends_the_process():
    if "PL_TRAINER_STRATEGY" in os.environ:
        os._exit(1)
"""


@pytest.mark.slow
def test_tests_that_pass_plainly_only(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").touch()
    folder = tmp_path / "tests" / "tests_pytorch"
    for part in ("first", "second"):
        (folder / part).mkdir(parents=True)
        (folder / part / "test_four.py").write_text(SUITE)
    assert list(files(folder, [])) == ["first/test_four.py", "second/test_four.py"]
    passed, lost = compare(folder.parent, ["second"], tmp_path / "reports", 60)
    assert passed == 3
    names = "test_that_passes_plainly", "test_that_ends_the_process"
    assert list(lost) == [f"tests/tests_pytorch/second/test_four.py::{name}" for name in names]
    errors = list(lost.values())
    assert "it was our strategy" in errors[0]
    assert "its process has ended" in errors[1]
