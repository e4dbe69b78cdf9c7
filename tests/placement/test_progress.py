"""The bar of what takes longer than a moment: on a terminal, where bars are wanted, and gone afterwards."""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from functools import partial
from typing import Any

import pytest
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from tqdm import tqdm

from lightning_hetpipe import Cluster, HetPipeStrategy, Node
from lightning_hetpipe.capture.profiling import ROUNDS
from lightning_hetpipe.placement import progress
from tests.support.small import Learner, batches
from tests.support.trainers import quiet_trainer


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """As stderr; every wait is longer than a moment, and every step is drawn."""
    stderr = Terminal()
    monkeypatch.setattr(progress, "MOMENT", 0)
    monkeypatch.setattr(progress, "tqdm", partial(tqdm, mininterval=0, miniters=1, ncols=80, file=stderr))
    return stderr


def last_line(text: str) -> str:
    """Text on a terminal in the end."""
    return text.rsplit("\r", 1)[-1].strip()


def test_a_bar_tells_how_far_it_is_and_goes(terminal: Terminal) -> None:
    with progress.on_terminal("measuring on cpu", 4) as tick:
        for _ in range(4):
            tick()
    written = terminal.getvalue()
    assert "measuring on cpu" in written
    assert "2/4" in written
    assert last_line(written) == ""


def test_a_bar_counts_what_has_no_end(terminal: Terminal) -> None:
    with progress.on_terminal("searching for a plan", None) as tick:
        for _ in range(3):
            tick()
    assert "searching for a plan: 3plan" in terminal.getvalue()
    assert last_line(terminal.getvalue()) == ""


def test_a_failure_leaves_no_bar(terminal: Terminal) -> None:
    def interrupted() -> None:
        with progress.on_terminal("measuring", 4) as tick:
            tick()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert "1/4" in terminal.getvalue()
    assert last_line(terminal.getvalue()) == ""


def test_nothing_is_drawn_within_a_moment(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "MOMENT", 60)
    with progress.on_terminal("measuring", 4) as tick:
        tick()
    assert terminal.getvalue().strip() == ""


def test_nothing_is_drawn_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "MOMENT", 0)
    with redirect_stderr(io.StringIO()) as file, progress.on_terminal("measuring", 4) as tick:
        tick()
    assert file.getvalue() == ""


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("cluster", [None, Cluster([Node("box", ["cpu", "cpu"])])], ids=["equal", "declared"])
def test_layers_are_measured_under_a_bar_unless_the_trainer_has_none(
    wanted: bool, cluster: Cluster | None, terminal: Terminal, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("HETPIPE_CACHE", str(tmp_path))
    strategy = HetPipeStrategy(stages=2, cluster=cluster)
    callbacks = [TQDMProgressBar()] if wanted else []
    quiet_trainer(strategy, enable_progress_bar=wanted, callbacks=callbacks).fit(Learner(), batches(3))
    assert ("measuring on cpu" in terminal.getvalue()) == wanted


@pytest.mark.parametrize("cluster", [None, Cluster([Node("box", ["cpu", "cpu"])])], ids=["equal", "declared"])
def test_below_richs_bar_it_is_a_line_of_rich(
    cluster: Cluster | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """Rich, which Lightning takes where it is installed, made a line of its own of each step of any other bar."""
    monkeypatch.setenv("HETPIPE_CACHE", str(tmp_path))
    rich = pytest.importorskip("rich.progress", reason="Lightning takes Rich's bar where rich is installed")
    monkeypatch.setattr(progress, "MOMENT", 0)
    lines: list[Any] = []

    class Bars(RichProgressBar):
        @property
        def is_enabled(self) -> bool:
            return True

        def on_train_batch_end(self, *args: Any) -> None:
            super().on_train_batch_end(*args)
            shown: Any = self.progress
            left.append([task.description for task in shown.tasks if task.visible])

    left: list[list[str]] = []
    update = rich.Progress.update

    def spying(self: Any, task: Any, **changes: Any) -> None:
        update(self, task, **changes)
        found = self._tasks[task]
        lines.append((found.description, found.completed, found.total))

    monkeypatch.setattr(rich.Progress, "update", spying)
    with redirect_stderr(io.StringIO()) as stderr:
        strategy = HetPipeStrategy(stages=2, cluster=cluster)
        quiet_trainer(strategy, enable_progress_bar=True, callbacks=[Bars()]).fit(Learner(), batches(3))
    measured = [line for line in lines if line[0] == "measuring on cpu"]
    steps = 4 * ROUNDS if cluster is None else 4  # of four layers
    assert measured[-1] == ("measuring on cpu", steps, steps)
    assert any(line[0] == "searching for a plan" for line in lines) == (cluster is not None)
    assert all({"measuring on cpu", "searching for a plan"}.isdisjoint(names) for names in left)
    assert stderr.getvalue() == ""
