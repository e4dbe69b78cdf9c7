"""The experiments on weight policies: what a run is, how runs are kept, and what the docs have of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import experiments, experiments_runs
from benchmarks.experiments import BEGIN, DOCS, END, KEPT, PICTURES, block, main
from benchmarks.experiments_pictures import COLOURS, curves, survival
from benchmarks.experiments_runs import FULL, Found, Grid, Run, losses_of, make, read, runs_of
from benchmarks.experiments_table import Comparison, relative, table
from benchmarks.experiments_tasks import TASKS, loss, validation_loss
from benchmarks.results import block_in
from benchmarks.staleness_training import Recipe, batches
from lightning_hetpipe.rules.versions import POLICIES

SYNC = replace(TASKS["cnn_sgd"].recipe, weights="sync")
STASH = TASKS["cnn_sgd"].recipe


def _made(losses: Sequence[float] = (3.0,) * 30) -> Found:
    return {run: list(losses) for run in runs_of(list(TASKS), Grid((1, 4), (0,), (1.0,)))}


def test_the_docs_have_the_table_of_the_runs_that_are_kept() -> None:
    found, said = read(KEPT), block_in(DOCS.read_text(), BEGIN, END)
    assert set(runs_of(list(TASKS), Grid())) <= set(found)
    assert said == block(Comparison(found), said.split("\n\n")[-2])
    for name in PICTURES.values():
        assert f"]({name})" in DOCS.read_text()
        assert (DOCS.parent / name).read_text().startswith("<?xml")


def test_runs_that_the_default_grid_leaves_out_change_nothing_in_the_table() -> None:
    """As far as they are kept: those at the lowest rate, where AdamW or several minibatches to an update learn."""
    found, wide = read(KEPT), replace(Grid(), rates=(1.0, 0.3, 0.1), low=())
    chosen, all_runs = (
        {run: found[run] for run in runs_of(list(TASKS), grid) if run in found} for grid in (Grid(), wide)
    )
    assert set(chosen) <= set(all_runs)
    assert table(Comparison(chosen)) == table(Comparison(all_runs))


def test_every_policy_is_compared() -> None:
    for grid in (Grid(), FULL):
        assert {run.recipe.weights for run in runs_of(list(TASKS), grid)} == set(POLICIES)
    assert {run.in_flight for run in runs_of(["gpt"], FULL)} == {1, 2, 4, 8, 16, 32}
    assert {run.task for run in runs_of(["gpt"], FULL)} == {"gpt"}
    for task in TASKS.values():
        assert task.variants(4)["auto"] == replace(task.recipe, weights="auto").chosen


@pytest.mark.parametrize("name", TASKS)
def test_a_run_of_sync_is_plain_training(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiments_runs, "UPDATES", 4)
    monkeypatch.setattr(experiments_runs, "POINTS", 2)
    task = TASKS[name]
    run = Run(name, replace(task.recipe, weights="sync"), 1, seed=1)
    train, validation = task.data()
    net = task.seeded(1)
    optimizer = task.recipe.make(net.parameters())
    wanted = []
    for number, batch in zip(range(1, 5), batches(train, 1), strict=False):
        loss(net.train(), batch).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        optimizer.step()
        optimizer.zero_grad()
        if number % 2 == 0:
            wanted.append(round(validation_loss(net, validation), 4))
    assert losses_of(run) == wanted


def test_a_run_that_diverges_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiments_runs, "UPDATES", 30)
    found = losses_of(Run("cnn_sgd", replace(STASH, lr=1e20), 4, seed=0))
    assert len(found) < 30
    assert Comparison({Run("cnn_sgd", STASH, 4, 0): found}).results("cnn_sgd", STASH, 4)[0].loss == math.inf


@pytest.mark.slow
def test_runs_in_other_processes_give_the_same() -> None:
    runs = [Run("cnn_sgd", STASH, 4, seed) for seed in (0, 1)]
    assert dict(make(runs, jobs=2)) == {run: losses_of(run) for run in runs}


def test_the_command_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Run] = []

    def fake(runs: Sequence[Run], jobs: int) -> Iterator[tuple[Run, list[float]]]:
        for number, run in enumerate(runs):
            asked.append(run)
            yield run, [1.0] * 30
            if number == 4 and len(asked) == 5:
                raise KeyboardInterrupt

    monkeypatch.setattr(experiments, "make", fake)
    arguments = ["tasks=[gpt]", f"folder={tmp_path}"]
    with pytest.raises(KeyboardInterrupt):
        main(arguments)
    file = tmp_path / "runs.jsonl"
    assert len(file.read_text().splitlines()) == 5
    with file.open("a") as kept:  # a line that was not written to its end
        kept.write('{"task": "gpt", "rec')
    assert main(arguments) == 0
    assert asked == runs_of(["gpt"], Grid())  # each once
    assert list(read(file)) == asked
    assert main(arguments) == 0
    assert len(asked) == len(runs_of(["gpt"], Grid()))
    assert "| **GPT, AdamW** |" in capsys.readouterr().out
    assert all((tmp_path / name).exists() for name in PICTURES.values())


def test_what_is_written_goes_to_the_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docs, kept = tmp_path / "docs" / "staleness.md", tmp_path / "kept.jsonl"
    docs.parent.mkdir()
    docs.write_text(f"# Title\n\n{BEGIN}\nold\n{END}\n\nMore.\n")
    monkeypatch.setattr(experiments, "DOCS", docs)
    monkeypatch.setattr(experiments, "KEPT", kept)
    monkeypatch.setattr(experiments, "make", lambda runs, jobs: ((run, [1.0] * 30) for run in runs))
    assert main(["tasks=[cnn_adamw]", f"folder={tmp_path}", "write=true"]) == 0
    text = docs.read_text()
    assert text.startswith(f"# Title\n\n{BEGIN}\n\nA cell says")
    assert text.endswith(f"{END}\n\nMore.\n")
    assert "| **CNN, AdamW** |" in text
    assert read(kept) == read(tmp_path / "runs.jsonl")
    assert {each.name for each in docs.parent.iterdir()} == {docs.name, *PICTURES.values()}


@pytest.mark.parametrize(
    ("argument", "says"), [("tasks=[gtp]", "'gtp'"), ("jobs=0", "jobs=0"), ("ful=true", "ful"), ("jobs=many", "jobs")]
)
def test_settings_that_cannot_be(argument: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([argument]) == 2
    assert says in capsys.readouterr().err.splitlines()[0]


def test_results_are_means_over_seeds_at_each_rate() -> None:
    losses = [1.0] * 9 + [0.05] * 21  # at its target after the tenth of 30 validations
    late = [1.0] * 19 + [0.06] * 11
    found = {
        **{Run("cnn_sgd", SYNC, 1, seed): losses for seed in (0, 1)},
        **{Run("cnn_sgd", STASH, 4, seed): each for seed, each in enumerate((losses, [2.0] * 30))},
        **{Run("cnn_sgd", replace(STASH, lr=STASH.lr / 2), 4, seed): each for seed, each in enumerate((losses, late))},
    }
    comparison = Comparison(found)
    sync = comparison.plain("cnn_sgd", SYNC, 4)
    plain, tuned = comparison.plain("cnn_sgd", STASH, 4), comparison.tuned("cnn_sgd", STASH, 4)
    assert sync
    assert plain
    assert tuned
    assert (sync.updates, sync.loss) == (10 * 12, 0.05)
    assert (plain.updates, plain.loss) == (math.inf, 1.025)
    assert (tuned.updates, tuned.loss, tuned.rate) == (15 * 12, 0.055, 0.5)
    assert (relative(plain, sync), relative(tuned, sync)) == (math.inf, 1.5)
    assert "| stash | never, 1 | 1.5 x, 0.055 |" in table(comparison)
    assert "| sync | 1.0 x, 0.05 | 1.0 x, 0.05 |" in table(comparison)


def test_pictures_have_a_line_for_each_variant_and_are_the_same_again() -> None:
    comparison = Comparison(_made())
    for draw in (survival, curves):
        picture = draw(comparison)
        assert picture == draw(comparison)
        assert all(f">{name}<" in picture for name in (*COLOURS, *(task.title for task in TASKS.values())))
        assert "2026-" not in picture


def test_recipes_of_older_files_can_be_read(tmp_path: Path) -> None:
    (file := tmp_path / "runs.jsonl").write_text(
        '{"task": "gpt", "recipe": {"optimizer": "AdamW", "lr": 0.003}, "in_flight": 4, "seed": 0, "losses": [1.5]}\n'
    )
    assert read(file) == {Run("gpt", Recipe("AdamW", 0.003), 4, 0): [1.5]}
