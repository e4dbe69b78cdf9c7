"""The table of all figures: verdicts, what is kept of benchmarks that are not run again, and what the README cites."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path

import pytest

from benchmarks import results, time_to_target
from benchmarks.__main__ import BENCHMARKS, main
from benchmarks.harness import Figure, Options, Outcome, Spread, figures_table

DAY = date(2026, 11, 21)
MACHINE = {"cpu": "a cpu", "cpus": 2, "cores_used": "CPUs 0 and 1", "load_average": 0.5, "python": "3.11", "torch": "2"}
FAST = Figure("a/b  two over one", Spread(1.9, 1.8, 2.0), target=1.8)
SLOW = Figure("seconds", Spread(3.0, 2.0, 4.0), unit="s", target=2.5, at_most=True, digits=1)
LOST = Figure("lost", None, target=1.0)


def outcome(*figures: Figure, load: float = 0.5) -> Outcome:
    return Outcome("text", {"machine": MACHINE | {"load_average": load}}, complete=True, figures=figures)


def test_verdicts() -> None:
    assert (FAST.verdict, SLOW.verdict, LOST.verdict) == ("met", "missed", "")
    assert Figure("", Spread(1.0, 1.0, 1.0)).verdict == ""
    # The very value that was hoped for is enough.
    assert Figure("", Spread(1.8, 1.0, 2.0), target=1.8).verdict == "met"
    assert Figure("", Spread(1.8, 1.0, 2.0), target=1.8, at_most=True).verdict == "met"
    rows = [line.split() for line in figures_table([FAST, SLOW, LOST]).splitlines()[1:]]
    assert rows[0][-5:] == ["1.80", "..", "2.00", "1.80", "met"]
    assert rows[1] == ["seconds", "3.0", "2.0", "..", "4.0", "2.5", "missed"]
    assert rows[2] == ["lost", "?", "1.00"]


def test_one_table_of_all_benchmarks(tmp_path: Path) -> None:
    table = tmp_path / "results.md"
    order = ["one", "two", "three"]
    results.write(table, {"two": outcome(SLOW), "one": outcome(FAST)}, Options(quick=True, rounds=1), order, DAY)
    lines = table.read_text().splitlines()
    assert "| one | two over one | 1.90 | 1.80 .. 2.00 |  | at least 1.80 | met |" in lines
    assert "| two | seconds | 3.0 | 2.0 .. 4.0 | s | at most 2.5 | missed |" in lines
    assert lines[-1].startswith("- one (load average 0.5), two (load average 0.5): 2026-11-21, 1 short round, on a cpu")

    # A benchmark that is run again replaces its own figures only.
    results.write(table, {"one": outcome(LOST, load=2.0)}, Options(quick=False, rounds=5), order, DAY)
    lines = table.read_text().splitlines()
    assert "| one | lost | ? |  |  | at least 1.00 | not measured |" in lines
    assert "| two | seconds | 3.0 | 2.0 .. 4.0 | s | at most 2.5 | missed |" in lines
    assert sum(line.startswith("| one") for line in lines) == 1
    assert lines[-2].startswith("- one (load average 2.0): 2026-11-21, 5 rounds, on a cpu, CPUs 0 and 1; python 3.11")
    kept = json.loads((tmp_path / "results.json").read_text())
    assert list(kept) == ["one", "two"]
    assert results.figures_of(kept["two"]) == [SLOW]
    assert kept["two"]["figures"][0]["verdict"] == "missed"


def test_the_readme_cites_some_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "CITED", {("one", "two over one"): "twice as much", ("one", "lost"): "what is lost"})
    readme, table = tmp_path / "README.md", tmp_path / "results.md"
    results.write(table, {"one": outcome(FAST, SLOW, LOST)}, Options(quick=False, rounds=5), ["one"], DAY)
    readme.write_text(f"# Title\n\n{results.BEGIN}\nold\n{results.END}\n\nMore.\n")
    results.cite(readme, results.read(tmp_path / "results.json"))
    text = readme.read_text()
    assert text.startswith("# Title\n\n")
    assert text.endswith("\n\nMore.\n")
    assert "| twice as much | **1.90** | 1.80 .. 2.00 |" in text
    assert all(word not in text for word in ("old", "seconds", "lost"))
    readme.write_text("# Title\n")
    with pytest.raises(ValueError, match="no place for figures"):
        results.cite(readme, {})


def test_all_that_the_readme_cites_are_figures_of_benchmarks() -> None:
    kept = results.read(results.RESULTS)
    known = {(name, figure.name.split("  ")[-1]) for name, each in kept.items() for figure in results.figures_of(each)}
    assert len(results.CITED) == 5
    assert set(results.CITED) <= known


def test_what_readme_and_docs_cite_was_measured() -> None:
    """Figures get there by `python -m benchmarks --readme`, from the results that are kept beside the benchmarks."""
    kept = results.read(results.RESULTS)
    assert set(kept) <= set(BENCHMARKS)
    assert results.block_in(results.README.read_text()) == results.readme_block(kept)
    docs = time_to_target.DOCS.read_text()
    assert results.block_in(docs, time_to_target.BEGIN, time_to_target.END) == time_to_target.block(kept)
    assert results.RESULTS.with_suffix(".md").read_text() == results.as_markdown(kept)


def test_to_cite_measures_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme, docs = tmp_path / "README.md", tmp_path / "staleness.md"
    readme.write_text(f"{results.BEGIN}\n{results.END}")
    docs.write_text(f"{time_to_target.BEGIN}\n{time_to_target.END}")
    monkeypatch.setattr(results, "README", readme)
    monkeypatch.setattr(time_to_target, "DOCS", docs)
    monkeypatch.setattr(results, "RESULTS", tmp_path / "none.json")
    assert main(["--readme"]) == 0
    assert readme.read_text() == results.readme_block({})
    assert docs.read_text() == time_to_target.block({})
