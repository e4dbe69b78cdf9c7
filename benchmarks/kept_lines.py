"""Files of one JSON document a line: commands add each result as it is there, and go on where they were stopped."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def lines(file: Path) -> Iterator[dict[str, Any]]:
    """The documents in ``file``, none if it is not there; a line that is not whole is left out."""
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:  # what wrote it was stopped
            continue


def add_line(file: Path, document: Mapping[str, Any]) -> None:
    """Add ``document`` to ``file``, on a line of its own also where the last one is not whole."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a+") as kept:
        kept.seek(0)
        torn = (text := kept.read()) and not text.endswith("\n")
        kept.write("\n" * bool(torn) + json.dumps(document) + "\n")
