"""`python -m benchmarks.models_table`: which third-party models are captured, as a table.

Each is trained for five minibatches: plainly, as two stages with one minibatch in flight, as two stages with three, and
by the oracle; then it is validated. *Equal* means that every weight and buffer, or every loss, is equal to the bit.
*Partly* is a model that was taken apart, with the reason. It needs the libraries whose models are tried (the extra
``models``):

    python -m benchmarks.models_table --only "timm/resnet.*" --limit 120 --write docs/captured-models.md
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import benchmarks.torchvision_operators  # noqa: F401  # before Lightning
from benchmarks.models_list import models
from benchmarks.models_table_worker import Found, send

BEGIN, END = "<!-- table: python -m benchmarks.models_table -->", "<!-- end of table -->"
COLUMNS = ("model", "library", "outcome", "Nm = 1, against a plain Trainer", "Nm = 3, against the oracle", "evaluation")
ESCAPE = r"\\\1"
HEADER = f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}"
OURS = ("benchmarks.torchvision_operators", "benchmarks.models_table_worker")
LIBRARIES = ("timm", "torchvision", "transformers", "peft", "segmentation_models_pytorch")


def tried(name: str, limit: float) -> Found:
    """Train the model ``name`` in a process of its own, which is ended after ``limit`` seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*OURS, *filter(find_spec, LIBRARIES)])  # to import them takes ten seconds
    results, to_results = context.Pipe(duplex=False)
    process = context.Process(target=send, args=(name, to_results))
    process.start()
    to_results.close()
    try:
        found: Found = results.recv() if results.poll(limit) else Found("error", f"it took more than {limit:g} seconds")
        process.join(limit)
    except EOFError:
        process.join()
        found = Found("error", f"its process ended with {process.exitcode}")
    finally:
        process.kill()
        process.join()
    return found


def line(name: str, found: Found) -> str:
    """One model's row of the table in Markdown."""
    library, _, model = name.partition("/")
    outcome = f"{found.outcome}: {found.said}" if found.said else found.outcome
    cells = [model, library, outcome, found.plain, found.oracle, found.evaluation]
    return f"| {' | '.join(re.sub(r'([|<])', ESCAPE, cell) for cell in cells)} |"


def read(text: str) -> dict[str, Found]:
    """The rows of the table in ``text``, by the names of models."""
    rows: dict[str, Found] = {}
    for row in text.splitlines():
        cells = [re.sub(r"\\([|<])", r"\1", cell.strip()) for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
        if len(cells) == len(COLUMNS) and cells[1] in LIBRARIES:
            outcome, _, said = cells[2].partition(": ")
            rows[f"{cells[1]}/{cells[0]}"] = Found(outcome, said, cells[3], cells[4], cells[5])
    return rows


def totals(rows: Mapping[str, Found]) -> str:
    """Sentences with the numbers of each outcome."""
    counts = Counter(found.outcome for found in rows.values())
    outcomes = ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("captured", "partly", "refused", "error"))
    run = [found for found in rows.values() if found.plain]
    plain, stale, evaluated = (
        sum(getattr(found, part) == "equal" for found in run) for part in ("plain", "oracle", "evaluation")
    )
    return (
        f"{len(rows)} models: {outcomes}. Of the {len(run)} that are trained, {plain} equal a plain run, {stale} the"
        f" oracle; the evaluation of {evaluated} is pipelined, and equal."
    )


def write(file: Path, rows: Mapping[str, Found]) -> None:
    """Put the table between its marks in ``file``, or make it all of a new one; rows of other models stay."""
    held = file.read_text() if file.exists() else f"{BEGIN}\n{END}\n"
    before, _, rest = held.partition(BEGIN)
    earlier, _, after = rest.partition(END)
    kept = {**read(earlier), **rows}
    every = {name: kept[name] for name in models() if name in kept}
    table = "\n".join([HEADER, *(line(name, found) for name, found in every.items())])
    file.write_text(f"{before}{BEGIN}\n\n{totals(every)}\n\n{table}\n\n{END}{after}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models_table", description=__doc__)
    parser.add_argument("--only", default=".*", metavar="REGEX", help='all of a name, as "timm/.*"; by default all')
    parser.add_argument("--limit", type=float, default=300.0, metavar="SECONDS", help="for one model; by default 300")
    parser.add_argument(
        "--write", type=Path, metavar="FILE.md", help="put the rows into the table there, between its marks"
    )
    parser.add_argument("--list", action="store_true", help="only name the models")
    given = parser.parse_args(arguments)
    every = models()
    chosen = [name for name in every if re.fullmatch(given.only, name)]
    if given.list:
        print(*chosen, sep="\n")
        return
    if not chosen:
        parser.error(f"no model matches --only {given.only}; --list names them")
    print(HEADER, flush=True)
    rows: dict[str, Found] = {}
    for name in chosen:
        started = time.perf_counter()
        rows[name] = tried(name, given.limit)
        print(line(name, rows[name]), flush=True)
        print(f"{name}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
        if given.write is not None:  # each time, as the whole takes an hour
            write(given.write, {name: rows[name]})
    print(f"\n{totals(rows)}")


if __name__ == "__main__":
    main()
