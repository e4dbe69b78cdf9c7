"""The pages that list features and faults name tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
PAGES = {"trainer-features": 60, "faults": 30}
"""Fewer rows were a page that is not read."""


@pytest.mark.parametrize("page", PAGES)
def test_every_row_has_its_tests(page: str) -> None:
    lines = (TESTS.parent / "docs" / f"{page}.md").read_text().splitlines()
    headings = ("| feature ", "| fault ", "| --- ", "| | test |")
    rows = [line for line in lines if line.startswith("| ") and not line.startswith(headings)]
    assert len(rows) > PAGES[page]
    uses = "".join(file.read_text() for file in TESTS.glob("wsp/*uses*.py"))
    for row in rows:
        cell = row.split("|")[-2]
        names = re.findall(r"`([^`]+)`", cell)
        assert names, f"no test in: {row}"
        for name in names:
            file, _, function = name.partition("::")
            assert f"def {function}(" in (TESTS / file).read_text() if function else (TESTS / file).is_file(), name
        for use in re.findall(r"(\w+) in `wsp", cell):
            assert f"def {use}(" in uses, use
