"""The one table of all benchmarks' figures: kept as JSON, written as Markdown, cited by the project's README."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, Figure, Options, Outcome, Spread

RESULTS = ROOT / "benchmarks" / "results.json"
README = ROOT / "README.md"
BEGIN, END = "<!-- figures: python -m benchmarks --readme -->", "<!-- end of figures -->"
COMMAND = "python -m benchmarks --table benchmarks/results.md"

CITED = {
    (
        "two_stages_gpt",
        "two stages over one thread, GPT",
    ): "two stages of a GPT on two cores, over a plain Trainer on one",
    ("two_stages_gpt", "two stages over Schedule1F1B, GPT"): "the same, over `torch.distributed.pipelining`'s 1F1B",
    ("two_stages_gpt", "two stages over DDP, GPT"): "the same, over Lightning's DDP",
    ("virtual_workers", "two virtual workers over DDP"): (
        "two virtual workers with one stage each on two cores, one minibatch in flight, over DDP"
    ),
    ("several_nodes", "HetPipeStrategy, Nm = 4 over DDP, 1 Gbit/s"): (
        "two machines with 1 Gbit/s between them, a wave of 4 minibatches, over DDP"
    ),
}
"""The ratios that the project's README has, by benchmark and figure, in its own words."""

Results = Mapping[str, Mapping[str, Any]]
"""For each benchmark: its date, rounds, machine and figures, as JSON has them."""


def section(outcome: Outcome, options: Options, day: date) -> dict[str, Any]:
    """The record of one benchmark, as results.json has it."""
    figures = [{**asdict(figure), "verdict": figure.verdict} for figure in outcome.figures]
    return {
        "date": day.isoformat(),
        "rounds": options.rounds,
        "quick": options.quick,
        "machine": outcome.data["machine"],
        "figures": figures,
    }


def read(file: Path) -> dict[str, Any]:
    """Read results from ``file``; an empty dictionary if there is no such file."""
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return results


def write(markdown: Path, outcomes: Mapping[str, Outcome], options: Options, order: Sequence[str], day: date) -> None:
    """Write the table and the JSON beside it; benchmarks that were not run keep their records.

    Args:
        markdown: File of the table; the JSON file differs in its suffix only.
        outcomes: Outcomes of the benchmarks that were run, by name.
        options: The options that they were run with.
        order: Names of all benchmarks, in the table's order.
        day: Date of the measurement.
    """
    data = markdown.with_suffix(".json")
    found = read(data) | {name: section(outcome, options, day) for name, outcome in outcomes.items()}
    results = {name: found[name] for name in order if name in found}
    data.write_text(json.dumps(results, indent=2) + "\n")
    markdown.write_text(as_markdown(results))


def figures_of(section: Mapping[str, Any]) -> list[Figure]:
    """The figures in a benchmark's record."""
    found = []
    for kept in section["figures"]:
        fields = {name: value for name, value in kept.items() if name != "verdict"}
        spread = fields["spread"]
        found.append(Figure(**{**fields, "spread": None if spread is None else Spread(**spread)}))
    return found


def as_markdown(results: Results) -> str:
    """All figures as a table in Markdown, with when and where they were measured."""
    rows = [("benchmark", "figure", "median", "range", "unit", "target", "")]
    for name, kept in results.items():
        rows += [(name, *_row(figure)) for figure in figures_of(kept)]
    return "\n".join(
        [
            "# Results of the benchmarks",
            "",
            f"Written by `{COMMAND}`; [README.md](README.md) says what each figure is.",
            "Figures without a unit are ratios, formed within a round.",
            "",
            *as_table(rows),
            "",
            *(f"- {line}" for line in measured(results)),
            "",
        ]
    )


def readme_block(results: Results) -> str:
    """The table of the README: the figures of ``CITED`` that were measured, and where they were."""
    rows = [("minibatches per second", "ratio", "range over rounds")]
    found = {(name, _title(figure)): figure for name, kept in results.items() for figure in figures_of(kept)}
    cited: dict[str, Mapping[str, Any]] = {}
    for (name, title), text in CITED.items():
        figure = found.get((name, title))
        if figure is not None and figure.spread is not None:
            median, reach, _, _ = replace(figure, digits=2).cells()
            rows.append((text, f"**{median}**", reach))
            cited[name] = results[name]
    return "\n".join([BEGIN, "", *as_table(rows), "", *(f"- {line}" for line in measured(cited)), "", END])


def cite(readme: Path, results: Results) -> None:
    """Replace the table in ``readme`` by that of ``results``.

    Raises:
        ValueError: if the marks are not there.
    """
    replace_block(readme, readme_block(results))


def replace_block(page: Path, block: str, first: str = BEGIN, last: str = END) -> None:
    """Put ``block`` into ``page``, instead of the part from ``first`` to ``last``.

    Raises:
        ValueError: if the marks are not there.
    """
    text = page.read_text()
    page.write_text(text.replace(block_in(text, first, last), block))


def show_block(block: str, pictures: Mapping[str, str], file: Path, page: Path | None, first: str, last: str) -> None:
    """Write ``block`` to ``file``, and ``pictures``, by name, beside it; both into ``page`` of the docs, if given."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(block + "\n")
    for folder in [file.parent] if page is None else [file.parent, page.parent]:
        for name, picture in pictures.items():
            (folder / name).write_text(picture)
    if page is not None:
        replace_block(page, block, first, last)


def block_in(text: str, first: str = BEGIN, last: str = END) -> str:
    """The part of ``text`` from ``first`` to ``last``, both included.

    Raises:
        ValueError: if they are not there.
    """
    begin, end = text.find(first), text.find(last)
    if not 0 <= begin < end:
        raise ValueError(f"there is no place for figures, between {first} and {last}")
    return text[begin : end + len(last)]


def _title(figure: Figure) -> str:
    """The figure's name without the letters that its benchmark puts before it, and two spaces."""
    return figure.name.split("  ")[-1]


def _row(figure: Figure) -> tuple[str, str, str, str, str, str]:
    median, reach, target, verdict = figure.cells()
    bound = f"at {'most' if figure.at_most else 'least'} {target}" if target else ""
    if figure.spread is None:
        verdict = "not measured"
    return _title(figure), median, reach, figure.unit, bound, verdict


def measured(results: Results) -> list[str]:
    """One line for each date, machine and set of versions, with its benchmarks and their load averages."""
    runs: dict[str, list[str]] = {}
    for name, kept in results.items():
        machine = kept["machine"]
        versions = ", ".join(f"{each} {machine[each]}" for each in ("python", "torch", "lightning") if each in machine)
        cores = machine.get("cores_used") or f"{machine.get('cpus')} CPUs"
        rounds = f"{kept['rounds']} {'short ' * kept['quick']}round{'s' * (kept['rounds'] > 1)}"
        run = f"{kept['date']}, {rounds}, on {machine['cpu']}, {cores}; {versions}"
        runs.setdefault(run, []).append(f"{name} (load average {machine['load_average']})")
    return [f"{', '.join(names)}: {run}" for run, names in runs.items()]


def as_table(rows: Sequence[Sequence[str]]) -> list[str]:
    first, *others = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return [first, "|" + " --- |" * len(rows[0]), *others]
