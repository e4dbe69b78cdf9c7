"""`python -m benchmarks.models_table`: which models of timm, torchvision and transformers are captured, as a table.

Each is trained for three minibatches, plainly and as two stages with one minibatch in flight, in a process of its own;
*equal* means that every weight and buffer is equal to the bit. *Partly* is a model that was taken apart, with the
strategy's sentence on what runs as user code. It needs timm, torchvision and transformers, for the models of each:

    python -m benchmarks.models_table --only "timm/resnet.*" --limit 120 --write table.md
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.models_list import models

WORKER = (
    "from benchmarks.models_list import define_operators\n"
    "define_operators()\n"  # before Lightning, which imports torchvision where it is installed
    "from benchmarks.models_table_worker import main\n"
    "main()"
)
HEADER = "| model | library | outcome | Nm = 1, against a plain Trainer | seconds |\n| --- | --- | --- | --- | --- |"
Row = dict[str, Any]


def tried(name: str, limit: float) -> Row:
    """Train the model ``name`` in a process of its own, which is ended after ``limit`` seconds."""
    started = time.perf_counter()
    command = [sys.executable, "-c", WORKER, name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
        found: Row = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        found = {"outcome": "error", "said": f"it took more than {limit:g} seconds", "equal": ""}
    except (IndexError, json.JSONDecodeError):
        last = (done.stderr.splitlines() or [""])[-1]
        found = {"outcome": "error", "said": f"its process ended with {done.returncode}: {last}", "equal": ""}
    return {**found, "seconds": round(time.perf_counter() - started)}


def line(name: str, found: Row) -> str:
    """One model's row of the table in Markdown."""
    library, _, model = name.partition("/")
    said = f": {found['said']}" if found["said"] else ""
    outcome = f"{found['outcome']}{said}".replace("|", "\\|").replace("<", "\\<")
    return f"| {model} | {library} | {outcome} | {found['equal']} | {found['seconds']} |"


def totals(rows: Mapping[str, Row]) -> str:
    """One sentence with the numbers of each outcome."""
    counts = Counter(found["outcome"] for found in rows.values())
    equal = sum(found["equal"] == "equal" for found in rows.values())
    parts = [f"{counts[outcome]} {outcome}" for outcome in ("captured", "partly", "refused", "error")]
    return f"{len(rows)} models: {', '.join(parts)}; {equal} equal to a plain run."


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models_table", description=__doc__)
    parser.add_argument("--only", default=".*", metavar="REGEX", help='models such as "timm/.*"; by default all')
    parser.add_argument("--limit", type=float, default=300.0, metavar="SECONDS", help="for one model; by default 300")
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="write the table there, too")
    parser.add_argument("--list", action="store_true", help="only name the models")
    given = parser.parse_args(arguments)
    every = models()
    chosen = [name for name in every if re.fullmatch(given.only, name)]
    if given.list:
        print(*chosen, sep="\n")
        return
    print(HEADER, flush=True)
    rows: dict[str, Row] = {}
    for name in chosen:
        rows[name] = tried(name, given.limit)
        print(line(name, rows[name]), flush=True)
    print(f"\n{totals(rows)}")
    if given.write is not None:
        lines = [HEADER, *(line(name, found) for name, found in rows.items()), "", totals(rows)]
        given.write.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
