"""Pictures of timelines: what they show, where, and what is said where they cannot be drawn."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.planning.model.simulate import simulate
from lightning_hetpipe.reporting.plots import COLOURS, draw
from lightning_hetpipe.reporting.timeline import Timeline
from tests.reporting.test_timeline import EXAMPLE, TIMES, simulated


def texts(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_rows_numbers_and_a_legend() -> None:
    above, below, *_ = draw(simulated()).axes
    assert [label.get_text() for label in above.get_yticklabels()] == ["stage 0", "stage 1", "stage 2"]
    legend: Any = above.get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["forward", "loss", "backward", "nothing to do yet"]
    assert "10" in texts(above)  # the middle of twenty
    assert "1" not in texts(above)
    assert "20" not in texts(above)
    assert below.get_xlabel() == "ms"
    assert [line.get_label() for line in below.lines] == ["stage 0", "stage 1", "stage 2"]
    curves: Any = below.lines
    assert all(0 <= value <= 100 + 1e-6 for line in curves for value in line.get_ydata())


def test_a_window_shows_all_that_is_between() -> None:
    """Also the minibatches that were in flight with those that were asked for."""
    above, *_ = draw(simulated(), first=9, last=10).axes
    assert {"8", "9", "10", "11"} <= set(texts(above))
    run = simulated().between(9, 10)
    start, end = run.extent
    assert above.get_xlim() == pytest.approx((0.0, 1000 * (end - start)))


def test_waits_are_hatched_and_passes_coloured() -> None:
    above, *_ = draw(EXAMPLE, 7, 8).axes
    found: Any = above.collections
    assert {box.get_hatch() for box in found} == {None, "////", "xxxx"}
    legend: Any = above.get_legend()
    words = [text.get_text() for text in legend.get_texts()]
    assert len(set(words)) == len(words)
    assert {"wait for user code", "nothing to do yet", "training_step", "Lightning's step", "evaluate"} <= set(words)
    assert COLOURS["forward"] != COLOURS["backward"]


def test_rows_have_their_devices_names() -> None:
    above, *_ = draw(EXAMPLE, 7, 8).axes
    labels = [label.get_text() for label in above.get_yticklabels()]
    assert labels == ["stage 0\nRTX-3090:0", "stage 1\nT4:1", "user code", "Lightning"]


def test_a_notebook_shows_a_timeline_as_a_picture() -> None:
    picture = EXAMPLE._repr_png_()
    assert picture is not None
    assert picture.startswith(b"\x89PNG")


def test_of_a_long_run_only_what_can_be_read_is_drawn() -> None:
    """So that it is drawn as fast as a short one."""
    long = Timeline.simulated(simulate(TIMES, 4, 500), TIMES, 4)
    above, *_ = draw(long).axes
    assert len(above.collections) < 200


def test_nothing_to_draw() -> None:
    with pytest.raises(SettingError, match="this timeline is empty"):
        draw(Timeline((), 2, 2))
    assert Timeline((), 2, 2)._repr_png_() is None
    with pytest.raises(SettingError, match="between"):
        draw(EXAMPLE, 50, 60)


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SettingError, match=r'pip install "lightning-hetpipe\[plot\]"'):
        draw(EXAMPLE)
    assert EXAMPLE._repr_png_() is None
