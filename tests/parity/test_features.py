"""The page that lists features names tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent.parent
PAGE = TESTS.parent / "docs" / "trainer-features.md"


def test_every_feature_has_its_tests() -> None:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    rows = [line for line in lines if not line.startswith(("| feature ", "| --- ", "| | test |"))]
    assert len(rows) > 60
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
