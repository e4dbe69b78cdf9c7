"""The one table of all benchmarks' figures: kept as JSON, written as Markdown, cited by the project's README."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, Figure, Options, Outcome, Spread

RESULTS = ROOT / "benchmarks" / "results.json"
README = ROOT / "README.md"
BEGIN, END = "<!-- figures: python -m benchmarks --readme -->", "<!-- end of figures -->"
COMMAND = "python -m benchmarks --table benchmarks/results.md"

Results = Mapping[str, Mapping[str, Any]]
"""For each benchmark: its date, rounds, machine and figures, as JSON has them."""


def section(outcome: Outcome, options: Options, day: date) -> dict[str, Any]:
    """What is kept of one benchmark."""
    figures = [{**asdict(figure), "verdict": figure.verdict} for figure in outcome.figures]
    return {
        "date": day.isoformat(),
        "rounds": options.rounds,
        "quick": options.quick,
        "machine": outcome.data["machine"],
        "figures": figures,
    }


def read(file: Path) -> dict[str, Any]:
    """The results that were written to ``file``; none where there is no such file."""
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return results


def write(markdown: Path, outcomes: Mapping[str, Outcome], options: Options, order: Sequence[str], day: date) -> None:
    """Writes the table, and beside it the JSON. Benchmarks that were not run this time keep what they had there.

    Args:
        markdown: Where to write; the JSON goes to the same name with another ending.
        outcomes: Those that were run.
        options: How.
        order: Of the benchmarks.
        day: Today.
    """
    data = markdown.with_suffix(".json")
    found = read(data) | {name: section(outcome, options, day) for name, outcome in outcomes.items()}
    results = {name: found[name] for name in order if name in found}
    data.write_text(json.dumps(results, indent=2) + "\n")
    markdown.write_text(as_markdown(results))


def figures_of(section: Mapping[str, Any]) -> list[Figure]:
    """The figures of a benchmark, read back."""
    found = []
    for kept in section["figures"]:
        fields = {name: value for name, value in kept.items() if name != "verdict"}
        spread = fields["spread"]
        found.append(Figure(**{**fields, "spread": None if spread is None else Spread(**spread)}))
    return found


def as_markdown(results: Results) -> str:
    """The table, under a heading, and where its rows were measured."""
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
            *_markdown(rows),
            "",
            *(f"- {line}" for line in _measured(results)),
            "",
        ]
    )


def readme_block(results: Results) -> str:
    """What the project's README cites: the headlines, and where they were measured."""
    rows = [("", "median", "range", "target", "")]
    cited = {}
    for name, kept in results.items():
        headlines = [figure for figure in figures_of(kept) if figure.headline and figure.spread is not None]
        if headlines:
            cited[name] = kept
        for figure in headlines:
            title, median, reach, unit, target, verdict = _row(figure)
            rows.append((title, f"{median} {unit}".strip(), reach, target, verdict))
    return "\n".join([BEGIN, "", *_markdown(rows), "", *(f"- {line}" for line in _measured(cited)), "", END])


def cite(readme: Path, results: Results) -> None:
    """Puts the figures between the marks in ``readme``.

    Raises:
        ValueError: if the marks are not there.
    """
    text = readme.read_text()
    readme.write_text(text.replace(block_in(text), readme_block(results)))


def block_in(text: str, first: str = BEGIN, last: str = END) -> str:
    """What stands between the marks, with them."""
    begin, end = text.find(first), text.find(last)
    if not 0 <= begin < end:
        raise ValueError(f"there is no place for figures, between {first} and {last}")
    return text[begin : end + len(last)]


def _row(figure: Figure) -> tuple[str, str, str, str, str, str]:
    # The letters before two spaces are a benchmark's own.
    median, reach, target, verdict = figure.cells()
    bound = f"at {'most' if figure.at_most else 'least'} {target}" if target else ""
    if figure.spread is None:
        verdict = "not measured"
    return figure.name.split("  ")[-1], median, reach, figure.unit, bound, verdict


def _measured(results: Results) -> list[str]:
    """Where and when, the benchmarks that agree in it together; and how busy the machine was."""
    runs: dict[str, list[str]] = {}
    for name, kept in results.items():
        machine = kept["machine"]
        versions = ", ".join(f"{each} {machine[each]}" for each in ("python", "torch", "lightning") if each in machine)
        cores = machine.get("cores_used") or f"{machine.get('cpus')} CPUs"
        rounds = f"{kept['rounds']} {'short ' * kept['quick']}round{'s' * (kept['rounds'] > 1)}"
        run = f"{kept['date']}, {rounds}, on {machine['cpu']}, {cores}; {versions}"
        runs.setdefault(run, []).append(f"{name} (load average {machine['load_average']})")
    return [f"{', '.join(names)}: {run}" for run, names in runs.items()]


def _markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    first, *others = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return [first, "|" + " --- |" * len(rows[0]), *others]
